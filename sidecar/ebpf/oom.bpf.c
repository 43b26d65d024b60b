/* OOM kills of processes of one PID namespace, or of one below it.
 *
 * mark_victim (mm/oom_kill.c) passes the victim's task and its uid, or, on older kernels, only
 * its number in the root namespace (ARGS: how many arguments). Of a bare number the namespace is
 * unknown; then the process that ran out of memory stands for it, which is right for a limit
 * of the pod's own cgroup.
 */

#define LEVELS 8 /* nested PID namespaces looked through; the kernel allows 32 */

BPF_ARRAY(kills, u64, 1);

struct upid { /* include/linux/pid.h; its layout is checked against BTF by UPID_SIZE */
	int nr;
	void *ns;
};
_Static_assert(sizeof(struct upid) == UPID_SIZE && __builtin_offsetof(struct upid, ns) == OFF_UPID_NS,
	       "struct upid has changed");

static inline int ours(void *task)
{
	void *pid = 0;
	u32 level = 0;

	bpf_probe_read_kernel(&pid, sizeof(pid), task + OFF_THREAD_PID);
	bpf_probe_read_kernel(&level, sizeof(level), pid + OFF_LEVEL);
#pragma unroll
	for (int i = 0; i < LEVELS; i++) {
		struct upid number = {};
		u32 inum = 0;

		if (i > level)
			return 0;
		bpf_probe_read_kernel(&number, sizeof(number),
				      pid + OFF_NUMBERS + i * sizeof(number));
		bpf_probe_read_kernel(&inum, sizeof(inum), number.ns + OFF_PIDNS_INUM);
		if (inum == PIDNS_INO)
			return 1;
	}
	return 0;
}

int on_victim(struct bpf_raw_tracepoint_args *ctx)
{
	void *task = ARGS > 1 ? (void *)ctx->args[0] : (void *)bpf_get_current_task();
	u32 zero = 0;
	u64 *count;

	if (!ours(task))
		return 0;
	count = kills.lookup(&zero);
	if (count)
		__sync_fetch_and_add(count, 1);
	return 0;
}
