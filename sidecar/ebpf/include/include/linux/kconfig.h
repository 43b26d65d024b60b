/* bcc refuses to compile without this one; nothing else of the configuration is used. */
#define CONFIG_BPF_SYSCALL 1
