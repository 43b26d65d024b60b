/* Packets that the kernel dropped in one network namespace, by reason.
 *
 * kfree_skb (net/core/skbuff.c) fires for drops only; consumed packets have a tracepoint of their
 * own. A packet belongs to the namespace of the socket that owns it (or, from 6.11 on, of the
 * receiving socket: ARGS > 3), else to that of its device. Reasons below FIRST_DROP mean no drop.
 */

BPF_TABLE("hash", u32, u64, drops, 512);

static inline void *pointer(void *at)
{
	void *value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), at);
	return value;
}

static inline u32 inum(void *net)
{
	u32 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), net + OFF_INUM);
	return value;
}

int on_drop(struct bpf_raw_tracepoint_args *ctx)
{
	void *skb = (void *)ctx->args[0];
	u32 reason = ctx->args[2];
	void *sk, *dev;
	u64 one = 1, *count;
	u32 owner;

	if (reason < FIRST_DROP)
		return 0;
	sk = pointer(skb + OFF_SK);
#if ARGS > 3
	if (!sk)
		sk = (void *)ctx->args[3];
#endif
	if (sk) {
		owner = inum(pointer(sk + OFF_SOCK_NET));
	} else {
		dev = pointer(skb + OFF_DEV);
		if (!dev)
			return 0;
		owner = inum(pointer(dev + OFF_DEV_NET));
	}
	if (owner != NETNS)
		return 0;
	count = drops.lookup(&reason);
	if (count)
		__sync_fetch_and_add(count, 1);
	else
		drops.insert(&reason, &one);
	return 0;
}
