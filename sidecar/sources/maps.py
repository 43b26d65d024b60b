"""What of a process's memory is its own, and on which NUMA node it lies.

smaps_rollup and numa_maps are dear: the kernel walks the page tables under the lock that the
process itself needs to map memory, and waits where the process holds it. So one process is read
at a time, seldom, the longer it took the more so, and in a thread that nothing waits for.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.sources import numa
from sidecar.sources.errors import ExhaustedError, MalformedError, SourceError
from sidecar.sources.files import read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sidecar.attribution import PodView

LOG = logging.getLogger("kitty.maps")

PAUSE = 1.0
"""Seconds between two processes, at least."""
REST = 200
"""Times as long as a reading took the thread rests after it: half a percent of the time."""
AGE = 30.0
"""Seconds for which a process is not read again."""
NUMA_LIMIT = 8 << 20
"""Bytes of numa_maps that are read; a process with more mappings is judged by its first ones."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One process's memory. None: not known.

    Attributes:
        start: start time in ticks; with the pid it names the process.
        read_at: monotonic seconds.
        proportional: bytes, pages shared with n processes counted as 1/n (Pss).
        misplaced: share on NUMA nodes that none of its CPUs belongs to; of a rank's process only.
        allowed_cpus: CPUs that it may use; of a rank's process only.
    """

    start: int
    read_at: float
    proportional: int | None
    misplaced: float | None
    allowed_cpus: int | None


def parse_proportional(data: bytes) -> int | None:
    """Returns Pss of smaps_rollup in bytes, None where there is none (a kernel thread).

    Sample row: `Pss:                 199 kB`. Source: fs/proc/task_mmu.c.

    Raises:
        MalformedError: the row holds no number.
    """
    for line in data.splitlines():
        if line.startswith(b"Pss:"):
            try:
                return int(line.split()[1]) * 1024
            except (ValueError, IndexError) as e:
                raise MalformedError(f"smaps_rollup: {line[:80]!r}") from e
    return None


class MapTable:
    """Reads the memory of the ranks' processes in turn.

    Args:
        view: returns the pod's processes.
        proc: where /proc is.
        sys: where /sys is.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        view: Callable[[], PodView],
        proc: str = "/proc",
        sys: str = "/sys",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._proc = proc
        self._sys = sys
        self._clock = clock
        self._stop = threading.Event()
        self.processes: Mapping[int, Memory] = {}

    def start(self) -> None:
        """Starts to read, in a thread of its own."""
        threading.Thread(target=self._run, name="maps", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread after the reading in progress; does not wait, as that may hang."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            began = self._clock()
            try:
                self.step()
            except ExhaustedError as e:
                LOG.debug("memory maps: %s", e)
            except Exception:
                LOG.exception("memory maps are not read any more")
                return
            self._stop.wait(REST * (self._clock() - began))

    def step(self) -> bool:
        """Reads the process whose reading is the oldest; returns False when all are recent."""
        view, now = self._view(), self._clock()
        known = {
            pid: memory
            for pid, memory in self.processes.items()
            if pid in view.rank_of and view.processes[pid].start == memory.start
        }
        due = min(
            view.rank_of, key=lambda pid: known[pid].read_at if pid in known else 0, default=0
        )
        if not due or (due in known and now - known[due].read_at < AGE):
            self.processes = known
            return False
        known[due] = self._read(due, view)
        self.processes = known
        return True

    def _read(self, pid: int, view: PodView) -> Memory:
        proportional = misplaced = allowed = None
        try:
            proportional = parse_proportional(read(f"{self._proc}/{pid}/smaps_rollup"))
            if pid in view.rank_of[pid].heads:
                allowed = numa.parse_allowed_cpus(read(f"{self._proc}/{pid}/status"))
                misplaced = self._misplaced(pid, allowed)
        except (OSError, SourceError) as e:
            LOG.debug("process %d: %s", pid, e)
        return Memory(
            start=view.processes[pid].start,
            read_at=self._clock(),
            proportional=proportional,
            misplaced=misplaced,
            allowed_cpus=None if allowed is None else len(allowed),
        )

    def _misplaced(self, pid: int, allowed: frozenset[int] | None) -> float | None:
        nodes = numa.nodes(self._sys)
        if len(nodes) < 2 or allowed is None:
            return None
        memory = numa.parse_numa_maps(read(f"{self._proc}/{pid}/numa_maps", limit=NUMA_LIMIT))
        return numa.misplaced(memory, allowed, nodes)
