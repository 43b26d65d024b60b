"""eBPF programs, the child that loads them, and the readers of their maps and of BTF."""
