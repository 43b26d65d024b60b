/* Why a thread was off its CPU, and for how long: futex waits, preemption, wake-up latency.
 *
 * A perf-event program on context switches of the watched threads: it runs as the thread leaves
 * its CPU. Threads that are not watched never run it, which no program on the sched_switch
 * tracepoint can offer. What happened before the previous departure and this one follows
 * from the scheduler's own accounts:
 *
 *   off the CPU  = time between the two departures - growth of se.sum_exec_runtime
 *   ready, not running = growth of sched_info.run_delay
 *   blocked, not preempted = nvcsw grew at the previous departure
 *
 * So a wait is counted when the thread next leaves its CPU, not while it lasts.
 * Sources: kernel/sched/{core.c,stats.h}, kernel/events/core.c.
 */

#define MAX_THREADS 8192
#define MAX_PROCESSES 1024
#define BUCKETS 12 /* upper edges 4 us, 16 us, ... 4.2 s, none */

enum { UNKNOWN, READY, BLOCKED, FUTEX };

struct thread {
	u64 left_ns;
	u64 ran_ns;
	u64 delayed_ns;
	u64 voluntary;
	u64 started; /* tells a thread from an earlier one of its number */
	u32 how;
	u32 unused;
};

struct histogram {
	u64 sum_ns;
	u64 counts[BUCKETS];
};

struct waits {
	struct histogram futex, preempt, wakeup;
};

BPF_TABLE("lru_hash", u32, struct thread, threads, MAX_THREADS);
BPF_TABLE("lru_hash", u32, struct waits, processes, MAX_PROCESSES);
BPF_ARRAY(blank, struct waits, 1);

static inline void count(struct histogram *h, u64 ns)
{
	u64 edge = 4096;
	u32 bucket = 0;

#pragma unroll
	for (int i = 0; i < BUCKETS - 1; i++) {
		bucket += ns >= edge;
		edge <<= 2;
	}
	__sync_fetch_and_add(&h->sum_ns, ns);
	if (bucket < BUCKETS)
		__sync_fetch_and_add(&h->counts[bucket], 1);
}

static inline u64 field(void *task, u32 offset)
{
	u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), task + offset);
	return value;
}

/* In which way the current thread blocks: the system call it is in. */
static inline u32 blocked_in(void)
{
	void *regs = (void *)bpf_task_pt_regs(bpf_get_current_task_btf());
	u64 call = field(regs, OFF_SYSCALL);

	return call == NR_FUTEX || call == NR_FUTEX_WAITV || call == NR_FUTEX_WAIT ? FUTEX : BLOCKED;
}

static inline struct waits *waits_of(u32 tgid)
{
	struct waits *waits = processes.lookup(&tgid);

	if (!waits) {
		u32 zero = 0;
		struct waits *empty = blank.lookup(&zero);

		if (!empty)
			return 0;
		processes.insert(&tgid, empty);
		waits = processes.lookup(&tgid);
	}
	return waits;
}

int on_leave(struct bpf_perf_event_data *ctx)
{
	struct bpf_pidns_info id = {};
	struct thread now = {};
	struct thread *then;
	struct waits *waits;
	u32 tid = bpf_get_current_pid_tgid();
	void *task = (void *)bpf_get_current_task();
	u64 off, delay;

	now.left_ns = bpf_ktime_get_ns();
	now.ran_ns = field(task, OFF_RAN);
	now.delayed_ns = field(task, OFF_DELAYED);
	now.voluntary = field(task, OFF_VOLUNTARY);
	now.started = field(task, OFF_STARTED);
	then = threads.lookup(&tid);
	if (!then || now.started != then->started) { /* new, or its number was another thread's */
		threads.update(&tid, &now);
		return 0;
	}
	if (now.ran_ns == then->ran_ns) /* watched twice, and counted already */
		return 0;
	now.how = now.voluntary == then->voluntary ? READY : blocked_in();
	off = now.left_ns - then->left_ns;
	off = off > now.ran_ns - then->ran_ns ? off - (now.ran_ns - then->ran_ns) : 0;
	delay = now.delayed_ns - then->delayed_ns;
	if (then->how != UNKNOWN &&
	    !bpf_get_ns_current_pid_tgid(PIDNS_DEV, PIDNS_INO, &id, sizeof(id))) {
		waits = waits_of(id.tgid);
		if (waits && then->how == READY) {
			count(&waits->preempt, delay);
		} else if (waits) {
			count(&waits->wakeup, delay);
			if (then->how == FUTEX)
				count(&waits->futex, off);
		}
	}
	*then = now;
	return 0;
}
