"""Futex waits, preemption and wake-up latency of watched processes, as in-kernel histograms.

The program runs on context switches of threads that the agent opens a perf event for, and of
threads and processes they start later. Every other process of the node pays nothing: an empty
program on the `sched_switch` tracepoint, eight times, already costs one 14% of its switches.

Sources: kernel/sched/core.c and kernel/sched/stats.h of the Linux kernel (`nvcsw`, `sched_info`),
perf_event_open(2) (`inherit`).
"""

from __future__ import annotations

import logging
import os
import platform
import resource
from typing import TYPE_CHECKING, NamedTuple

from sidecar.ebpf import lanes, syscall
from sidecar.ebpf.loader import Attach, Candidate, Loaded

if TYPE_CHECKING:
    from collections.abc import Collection

_log = logging.getLogger(__name__)

_BUCKETS = 12
BUCKET_EDGES_SECONDS: tuple[float, ...] = tuple((4096 << 2 * i) / 1e9 for i in range(_BUCKETS - 1))
"""Upper edge of each bucket but the last, which has none."""

MAX_THREADS = 4096
_HISTOGRAM = 1 + _BUCKETS  # sum, counts
# x86: arch/x86/entry/syscalls/syscall_64.tbl; others: include/uapi/asm-generic/unistd.h.
_FUTEX = {"x86_64": 202}.get(platform.machine(), 98)
_FUTEX_WAITV, _FUTEX_WAIT = 449, 455


class Waits(NamedTuple):
    """One histogram: `counts` by bucket (see `BUCKET_EDGES_SECONDS`), and the sum in seconds."""

    sum_seconds: float
    counts: tuple[int, ...]


class ProcessWaits(NamedTuple):
    """What threads waited for."""

    futex: Waits
    preempt: Waits
    wakeup: Waits

    @classmethod
    def unpack(cls, vector: int) -> ProcessWaits:
        """From what `WaitProbe.read` returns and callers may have added up (see `lanes`)."""
        values = lanes.unpack(vector, 3 * _HISTOGRAM)
        return cls(
            *(
                Waits(values[at] / 1e9, values[at + 1 : at + _HISTOGRAM])
                for at in range(0, 3 * _HISTOGRAM, _HISTOGRAM)
            )
        )


def candidate(*, proc: str = "/proc") -> Candidate:
    """The program, for the PID namespace that the caller runs in."""
    namespace = os.stat(os.path.join(proc, "self/ns/pid"))
    device = os.major(namespace.st_dev) << 20 | os.minor(namespace.st_dev)
    return Candidate(
        name="waits",
        source="waits.bpf.c",
        attach=(Attach("on_leave", "perf_event"),),
        maps=("threads", "processes"),
        defines={
            "PIDNS_DEV": device,
            "PIDNS_INO": namespace.st_ino,
            "NR_FUTEX": _FUTEX,
            "NR_FUTEX_WAITV": _FUTEX_WAITV,
            "NR_FUTEX_WAIT": _FUTEX_WAIT,
        },
        offsets={
            "OFF_RAN": "task_struct.se.sum_exec_runtime",
            "OFF_DELAYED": "task_struct.sched_info.run_delay",
            "OFF_VOLUNTARY": "task_struct.nvcsw",
            "OFF_STARTED": "task_struct.start_time",
            "OFF_SYSCALL": "pt_regs.orig_ax|pt_regs.syscallno",
        },
    )


class WaitProbe:
    """Watches processes and reads their histograms.

    Not thread-safe.

    Args:
        loaded: what the loader handed over; owned from here on.
        proc: root of procfs.
    """

    def __init__(self, loaded: Loaded, *, proc: str = "/proc") -> None:
        self._loaded = loaded
        self._processes = loaded.maps["processes"]
        self._ledger = lanes.Ledger()
        self._proc = proc
        self._events: dict[int, list[int]] = {}
        self._complained = False
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor a thread

    def watch(self, pids: Collection[int]) -> None:
        """Makes these processes, and no others, the watched ones.

        Threads that start later are followed from their first moment. A process started by a
        watched one is followed as well, under its own number.

        Args:
            pids: thread group ids in the agent's PID namespace.
        """
        orphaned = False
        for gone in self._events.keys() - set(pids):
            for event in self._events.pop(gone):
                os.close(event)
                orphaned = True  # what its threads started is not followed any more
            key = gone.to_bytes(4, "little")
            self._processes.delete(key)
            self._ledger.forget(key)
        for pid in pids:
            if pid not in self._events and self._followed(pid) and not orphaned:
                self._events[pid] = []
            elif pid not in self._events or (orphaned and not self._events[pid]):
                self._events[pid] = self._open(pid)

    def read(self) -> list[tuple[int, int]]:
        """What was added since the last read: process id and vector (`ProcessWaits.unpack`).

        Processes that a watched one started are listed too, under their own ids.
        """
        self._ledger.begin()
        grown = []
        entries = list(self._processes.items())
        for key, value in entries:
            growth = self._ledger.grown(key, value)
            if growth:
                grown.append((int.from_bytes(key, "little"), growth))
        self._ledger.end([key for key, _ in entries])
        for key, _ in entries:
            pid = int.from_bytes(key, "little")
            if pid not in self._events and not os.path.exists(os.path.join(self._proc, str(pid))):
                self._processes.delete(key)  # its number may be another process's soon
                self._ledger.forget(key)
        return grown

    def close(self) -> None:
        """Lets all processes go."""
        self.watch(())
        self._loaded.close()

    def _followed(self, pid: int) -> bool:
        """Whether the process is followed already, as the child of a watched one."""
        return self._processes.get(pid.to_bytes(4, "little")) is not None

    def _open(self, pid: int) -> list[int]:
        events: list[int] = []
        seen: set[int] = set()
        # A second look finds threads that started during the first.
        for _ in range(2):
            try:
                tids = {int(tid) for tid in os.listdir(os.path.join(self._proc, f"{pid}/task"))}
            except OSError:
                break
            for tid in tids - seen:
                if sum(map(len, self._events.values())) + len(events) >= MAX_THREADS:
                    self._complain(f"more than {MAX_THREADS} threads")
                    break
                try:
                    events.append(syscall.context_switches(self._loaded.programs["on_leave"], tid))
                except ProcessLookupError:
                    continue
                except OSError as error:
                    self._complain(error.strerror or str(error))
                    break
            seen |= tids
        return events

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("eBPF: waits of some threads are not seen: %s", what)
