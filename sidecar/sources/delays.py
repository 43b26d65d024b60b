"""How long the threads of processes waited for a CPU or a block device.

The kernel tells it by thread only, and a trainer has hundreds of threads: each call reads some
processes and goes on where the call before it stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sidecar.sources.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sidecar.sources.procfs import ProcFS

CYCLE = 5
"""Calls in which all threads are read once."""
TASKS_A_ROUND = 32, 512
"""Least and most threads read in one call; the process that reaches it is read to its end."""
TASKS_A_PROCESS = 1024
"""Threads of one process that are read; those of a process with more are partly unknown."""


class Delay(NamedTuple):
    """Time spent waiting; None where the kernel does not keep it.

    Attributes:
        run_queue: nanoseconds runnable but waiting for a CPU.
        block: clock ticks waiting for a block device.
    """

    run_queue: int | None
    block: int | None


class DelayTable:
    """Reads the threads of processes in turn and tells what each process's have waited since.

    What a thread waited between its latest reading and its end is not counted.
    """

    def __init__(self, procfs: ProcFS) -> None:
        self._procfs = procfs
        self._threads: dict[tuple[int, int], dict[int, Delay]] = {}
        self._next = 0

    def read(self, processes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Delay]]:
        """Reads some of the processes.

        Args:
            processes: pid and start time of each, in an order that stays the same.

        Yields:
            Pid, and what its threads waited since they were read before.
        """
        for gone in self._threads.keys() - set(processes):
            del self._threads[gone]
        blocks = self._procfs.delay_accounting() is not False
        least, most = TASKS_A_ROUND
        known = sum(len(threads) for threads in self._threads.values())
        left = min(max(least, known // CYCLE + 1), most)
        for _ in range(len(processes)):
            self._next = (self._next + 1) % len(processes)
            process = processes[self._next]
            before = self._threads.get(process, {})
            try:
                now = self._read(process[0], blocks=blocks)
            except OSError:
                continue
            self._threads[process] = now
            yield process[0], _grown(before, now)
            left -= len(now)
            if left <= 0:
                return

    def _read(self, pid: int, *, blocks: bool) -> dict[int, Delay]:
        found = {}
        for tid in self._procfs.tasks(pid)[:TASKS_A_PROCESS]:
            try:
                found[tid] = Delay(
                    self._procfs.run_queue_delay(pid, tid),
                    self._procfs.block_delay(pid, tid) if blocks else None,
                )
            except (OSError, SourceError):
                continue
        return found


def _grown(before: dict[int, Delay], now: dict[int, Delay]) -> Delay:
    new = Delay(0, 0)
    pairs = [(before.get(tid, new), delay) for tid, delay in now.items()]
    return Delay(
        _sum((old.run_queue, delay.run_queue) for old, delay in pairs),
        _sum((old.block, delay.block) for old, delay in pairs),
    )


def _sum(pairs: Iterator[tuple[int | None, int | None]]) -> int | None:
    # A thread id that is used again begins at less than its forerunner had.
    grown = [
        now - (old or 0) if now >= (old or 0) else now for old, now in pairs if now is not None
    ]
    return sum(grown) if grown else None
