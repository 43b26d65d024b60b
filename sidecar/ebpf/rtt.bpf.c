/* Round-trip times of TCP connections, summed up in the kernel per connection.
 *
 * One program per hook, chosen by HOOK_<NAME>; every hook fills the same map `cells`. Only
 * connections of one network namespace count (NETNS: its inode number; NETNS_COOKIE for
 * sock_ops). With HOST_PORTS, which a pod without a namespace of its own needs, also only local
 * ports set in the bitmap `ports`.
 *
 * Offsets come from BTF (OFF_*). Reads of kernel memory are explicit: bcc rewrites dereferences
 * in some program types and not in others.
 */

#define AF_INET 2
#define AF_INET6 10
#define SOCK_COMMON_BYTES 128 /* covers what is read of struct sock_common */
#define MAX_CELLS 4096
#define FIRST_OCTAVE 5 /* below 32 us: slot 0 */
#define OCTAVES 16     /* from 2.1 s on: the last slot */
#define SLOTS (2 * OCTAVES + 2)
#define FRESH_US 2000000
#define SPACING_US 500 /* of the segments whose round trips count, on a busy connection */
#define LOOKS 8 /* at so many segments of a connection in a jiffy (1 to 10 ms) */
#define RECENT 256
#define RECENT_SHIFT 56 /* 64 less the bits of RECENT */

struct connection { /* as inet_diag names it: all in network order */
	u16 local_port;
	u16 remote_port;
	u32 local[4]; /* an IPv4 address is the first word */
	u32 remote[4];
};

struct cell {
	u64 count;
	u64 sum_us;
	u64 slots[SLOTS]; /* two linear steps per power of two */
	u64 made_ns; /* tells a cell from one of the same connection that the map let go before */
	u64 mark; /* when the sampled segment was sent: tells a new sample from an old one */
};

BPF_TABLE("lru_hash", struct connection, struct cell, cells, MAX_CELLS);
BPF_ARRAY(ports, u64, 1024);
BPF_ARRAY(smoothed, u64, 1); /* samples that were srtt for want of a raw one */

static inline u32 slot_of(u32 us)
{
	u32 octave = FIRST_OCTAVE;
	u32 v = us >> FIRST_OCTAVE;

	if (v == 0)
		return 0;
	if (v >= 1u << OCTAVES)
		return SLOTS - 1;
	if (v >= 1u << 8) { octave += 8; v >>= 8; }
	if (v >= 1u << 4) { octave += 4; v >>= 4; }
	if (v >= 1u << 2) { octave += 2; v >>= 2; }
	if (v >= 1u << 1) octave += 1;
	return 1 + 2 * (octave - FIRST_OCTAVE) + ((us >> (octave - 1)) & 1);
}

static inline int wanted_port(u16 port)
{
#ifdef HOST_PORTS
	u32 word = port >> 6;
	u64 *bits = ports.lookup(&word);

	return bits && (*bits >> (port & 63)) & 1;
#else
	return 1;
#endif
}

static inline void add(struct cell *cell, u32 us)
{
	u64 slot = slot_of(us);

	/* The bound must be seen on the register that indexes: older verifiers (6.1) lose it on a copy. */
	asm volatile("" : "+r"(slot));
	__sync_fetch_and_add(&cell->count, 1);
	__sync_fetch_and_add(&cell->sum_us, us);
	if (slot < SLOTS)
		__sync_fetch_and_add(&cell->slots[slot], 1);
}

static inline struct cell *cell_of(struct connection *key, u64 mark)
{
	struct cell *cell = cells.lookup(key);

	if (!cell) {
		struct cell empty = {};

		empty.made_ns = bpf_ktime_get_ns();
		empty.mark = mark;
		cells.insert(key, &empty);
		cell = cells.lookup(key);
	}
	return cell;
}

#ifndef HOOK_SOCK_OPS
/* The agent keeps its namespace alive, so what struct net has its number stays the same. */
BPF_ARRAY(own_net, u64, 1);

static inline int in_namespace(void *sk)
{
	u32 zero = 0, inum = 0;
	u64 net = 0;
	u64 *known = own_net.lookup(&zero);

	if (!known || bpf_probe_read_kernel(&net, sizeof(net), sk + OFF_NET))
		return 0;
	if (*known)
		return net == *known;
	bpf_probe_read_kernel(&inum, sizeof(inum), (void *)net + OFF_INUM);
	if (inum != NETNS)
		return 0;
	*known = net;
	return 1;
}

/* Fills the key; 0 for sockets of other families and ports. */
static inline int identify(void *sk, struct connection *key)
{
	u64 common[SOCK_COMMON_BYTES / 8];
	u8 *c = (u8 *)common;
	u16 family;

	if (bpf_probe_read_kernel(common, sizeof(common), sk))
		return 0;
	if (!wanted_port(*(u16 *)(c + OFF_NUM)))
		return 0;
	key->local_port = bpf_htons(*(u16 *)(c + OFF_NUM));
	key->remote_port = *(u16 *)(c + OFF_DPORT);
	family = *(u16 *)(c + OFF_FAMILY);
	if (family == AF_INET) {
		key->local[0] = *(u32 *)(c + OFF_SADDR);
		key->remote[0] = *(u32 *)(c + OFF_DADDR);
		return 1;
	}
	if (family != AF_INET6)
		return 0;
	__builtin_memcpy(key->local, c + OFF_SADDR6, sizeof(key->local));
	__builtin_memcpy(key->remote, c + OFF_DADDR6, sizeof(key->remote));
	return 1;
}
#endif

#if defined(HOOK_ESTIMATOR) || defined(HOOK_ACK)
static inline void sample(void *sk, long us)
{
	struct connection key = {};
	struct cell *cell;

	if (us < 0 || !in_namespace(sk) || !identify(sk, &key))
		return;
	cell = cell_of(&key, 0);
	if (cell)
		add(cell, us);
}
#endif

/* tcp_rtt_estimator(sk, mrtt_us) and its caller tcp_ack_update_rtt(sk, flag, seq_rtt_us,
 * sack_rtt_us, ca_rtt_us, rs), both in net/ipv4/tcp_input.c. */
#ifdef HOOK_ESTIMATOR
#ifdef FENTRY
struct sock;
KFUNC_PROBE(tcp_rtt_estimator, struct sock *sk, long mrtt_us)
{
	sample((void *)sk, mrtt_us);
	return 0;
}
#else
#include <uapi/linux/ptrace.h>
int on_estimator(struct pt_regs *ctx, void *sk, long mrtt_us)
{
	sample(sk, mrtt_us);
	return 0;
}
#endif
#endif

#ifdef HOOK_ACK
#ifdef FENTRY
struct sock;
KFUNC_PROBE(tcp_ack_update_rtt, struct sock *sk, int flag, long seq_us, long sack_us)
{
	sample((void *)sk, seq_us < 0 ? sack_us : seq_us);
	return 0;
}
#else
#include <uapi/linux/ptrace.h>
int on_ack(struct pt_regs *ctx, void *sk, int flag, long seq_us, long sack_us)
{
	sample(sk, seq_us < 0 ? sack_us : seq_us);
	return 0;
}
#endif
#endif

/* tcp_probe(sk, skb) fires for every segment received, before it is processed: what is read is
 * the round trip of the segment acknowledged last (struct tcp_rack, net/ipv4/tcp_recovery.c).
 *
 * A connection at full speed would pay for each of its segments. `recent` remembers what was counted
 * last of a socket, so that all but one in SPACING_US cost two reads of kernel memory, also those of
 * other namespaces. Reads are what costs most, so no more than LOOKS segments are looked at in a
 * jiffy: that thins what has over 800 to 8,000 segments a second, by CONFIG_HZ. Whoever shares an
 * entry only makes it forget. */
#ifdef HOOK_TCP_PROBE
struct recent { /* two cache lines each, as arrays begin inside one: no two share what is used */
	u64 sk;
	u64 mark;
	u64 jiffy;
	u64 looks;
	u64 pad[12];
};

BPF_ARRAY(recent, struct recent, RECENT);

static inline int worth_a_look(struct recent *last, u64 sk)
{
	u64 now = bpf_jiffies64(); /* from 5.6; a load, not a call */

	if (last->sk != sk) {
		last->sk = sk;
		last->mark = 0;
		last->jiffy = now;
		last->looks = 0;
	} else if (last->jiffy != now) {
		last->jiffy = now;
		last->looks = 0;
	} else if (last->looks >= LOOKS) {
		return 0;
	}
	last->looks++;
	return 1;
}

int on_tcp_probe(struct bpf_raw_tracepoint_args *ctx)
{
	void *sk = (void *)ctx->args[0];
	u32 place = ((u64)sk * 0x9e3779b97f4a7c15) >> RECENT_SHIFT;
	struct recent *last = recent.lookup(&place);
	struct connection key = {};
	struct cell *cell;
	u64 sent_us = 0, acked_us;
	u32 us = 0;

	if (!last || !worth_a_look(last, (u64)sk))
		return 0;
	bpf_probe_read_kernel(&sent_us, sizeof(sent_us), sk + OFF_RACK_MSTAMP);
	if (!sent_us)
		return 0;
	bpf_probe_read_kernel(&us, sizeof(us), sk + OFF_RACK_RTT);
	/* Spaced by when they were acknowledged: the segments of a burst are sent at once. */
	acked_us = sent_us + us;
	if (acked_us - last->mark < SPACING_US)
		return 0;
	last->mark = acked_us;
	if (!in_namespace(sk) || !identify(sk, &key))
		return 0;
	cell = cells.lookup(&key);
	if (cell) {
		if (acked_us - cell->mark < SPACING_US)
			return 0;
		cell->mark = acked_us;
	} else {
		cell = cell_of(&key, acked_us);
		/* A cell made anew for an idle connection must not count its old sample. */
		if (!cell || (s64)(bpf_ktime_get_ns() / 1000 - acked_us) > FRESH_US)
			return 0;
	}
	add(cell, us);
	return 0;
}
#endif

/* The callback is asked for when a connection is established, so older ones are not seen.
 * args[0] is the raw sample and args[1] srtt << 3 (tcp_bpf_rtt, include/net/tcp.h); both are 0
 * on kernels before 6.10. */
#ifdef HOOK_SOCK_OPS
/* The verifier rejects a context pointer that a branch chose: load each field in its place. */
#define FIELD(name) (*(volatile u32 *)&ops->name)
#define REMOTE_PORT_SHIFT 16 /* the port's two bytes are the last of four, on little-endian */

int on_sock_ops(struct bpf_sock_ops *ops)
{
	struct connection key = {};
	struct cell *cell;
	u32 op = ops->op;
	u32 us;

	if (op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB &&
	    op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB && op != BPF_SOCK_OPS_RTT_CB)
		return 1;
	if (bpf_get_netns_cookie(ops) != NETNS_COOKIE)
		return 1;
	if (op != BPF_SOCK_OPS_RTT_CB) {
		bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags |
						       BPF_SOCK_OPS_RTT_CB_FLAG);
		return 1;
	}
	u32 local[4] = {FIELD(local_ip6[0]), FIELD(local_ip6[1]), FIELD(local_ip6[2]),
			FIELD(local_ip6[3])};
	u32 remote[4] = {FIELD(remote_ip6[0]), FIELD(remote_ip6[1]), FIELD(remote_ip6[2]),
			 FIELD(remote_ip6[3])};
	u32 local4 = FIELD(local_ip4), remote4 = FIELD(remote_ip4);

	if (!wanted_port(ops->local_port))
		return 1;
	key.local_port = bpf_htons(ops->local_port);
	key.remote_port = ops->remote_port >> REMOTE_PORT_SHIFT;
	if (ops->family == AF_INET) {
		key.local[0] = local4;
		key.remote[0] = remote4;
	} else {
		__builtin_memcpy(key.local, local, sizeof(local));
		__builtin_memcpy(key.remote, remote, sizeof(remote));
	}
	us = ops->args[0];
	if (!us) {
		u32 zero = 0;
		u64 *count = smoothed.lookup(&zero);

		us = ops->srtt_us >> 3;
		if (count)
			__sync_fetch_and_add(count, 1);
	}
	cell = cell_of(&key, 0);
	if (cell)
		add(cell, us);
	return 1;
}
#endif
