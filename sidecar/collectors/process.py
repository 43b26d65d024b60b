"""The reference's proc_* rows of each rank's process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sidecar.sources.errors import SourceError
from sidecar.sources.files import names
from sidecar.sources.procfs import TICKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from sidecar.pod import Pod
    from sidecar.sources.descriptors import DescriptorTable

LABELS = ("pid", "node", "rank", "job")
STATES = "RSDTZ"

COUNTERS = {
    "proc_voluntary_ctx_switches": "Times that the process gave up its CPU to wait.",
    "proc_nonvoluntary_ctx_switches": "Times that the process's CPU was taken from it.",
    "proc_cpu_usage_seconds": "CPU time of the process, user and system, all its threads.",
    "proc_io_read_bytes": "Bytes that the process had read from storage.",
    "proc_io_write_bytes": "Bytes that the process had written to storage.",
}
GAUGES = {
    "proc_threads": "Threads of the process.",
    "proc_vm_rss": "Resident memory of the process in bytes.",
    "proc_fd_count": "Open descriptors of the process.",
    "proc_socket_count": "Open sockets of the process.",
}


@dataclass(frozen=True, slots=True)
class _Row:
    labels: tuple[str, ...]
    state: str
    values: dict[str, float]


class ProcessCollector:
    """Reads stat, status, io and fd of the processes that have per-pid series."""

    name = "process"
    interval = 0.5

    def __init__(self, pod: Pod, descriptors: DescriptorTable, *, proc: str = "/proc") -> None:
        self._pod = pod
        self._descriptors = descriptors
        self._proc = proc
        self._latest: tuple[_Row, ...] = ()
        self._folders_have_sizes = _size(f"{proc}/self/fd") > 0

    def sample(self) -> None:
        """Reads once; a file that is denied leaves its rows out."""
        node = self._pod.config.node
        rows = (
            self._read(pid, (str(pid), node, rank.rank, rank.job))
            for rank in self._pod.view.ranks
            for pid in rank.heads
        )
        self._latest = tuple(row for row in rows if row is not None)

    def _read(self, pid: int, labels: tuple[str, ...]) -> _Row | None:
        try:
            stat, status = self._pod.procfs.stat(pid), self._pod.procfs.status(pid)
        except (OSError, SourceError):
            return None
        if stat.start_ticks != self._pod.view.processes[pid].start:
            return None  # the pid is another process's by now
        values: dict[str, float | None] = {
            "proc_cpu_usage_seconds": (stat.user_ticks + stat.system_ticks) / TICKS,
            "proc_threads": stat.threads,
            "proc_vm_rss": status.rss,
            "proc_voluntary_ctx_switches": status.voluntary_switches,
            "proc_nonvoluntary_ctx_switches": status.involuntary_switches,
        }
        try:
            io = self._pod.procfs.io(pid)
            values["proc_io_read_bytes"] = io.read_bytes
            values["proc_io_write_bytes"] = io.write_bytes
            values["proc_fd_count"] = self._open_files(pid)
        except (OSError, SourceError):
            pass
        if "proc_fd_count" in values:
            held = self._descriptors.counted(pid, values["proc_fd_count"])
            values["proc_socket_count"] = len(held.sockets) if held else None
        known = {name: value for name, value in values.items() if value is not None}
        return _Row(labels, folded_state(stat.state), known)

    def _open_files(self, pid: int) -> int:
        folder = f"{self._proc}/{pid}/fd"
        return os.stat(folder).st_size if self._folders_have_sizes else len(names(folder))

    def collect(self) -> Iterator[Metric]:
        """Yields the rows of the reference, a series a watched process."""
        rows = self._latest
        state = GaugeMetricFamily(
            "proc_state",
            "1 for the process's state, 0 for the others: R running, S sleeping, D waiting for"
            " a device, T stopped, Z ended.",
            labels=[*LABELS, "state"],
        )
        for row in rows:
            for letter in STATES:
                state.add_metric([*row.labels, letter], float(letter == row.state))
        yield state
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for row in rows:
                if name in row.values:
                    counter.add_metric(row.labels, row.values[name])
            yield counter
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for row in rows:
                if name in row.values:
                    gauge.add_metric(row.labels, row.values[name])
            yield gauge


def _size(folder: str) -> int:
    """Returns a folder's size: of fd the number of descriptors since Linux 6.2, 0 before."""
    try:
        return os.stat(folder).st_size
    except OSError:
        return 0


def folded_state(letter: str) -> str:
    """Folds the kernel's further states (fs/proc/array.c, task_state_array) into the five."""
    return {"t": "T", "I": "S", "X": "Z", "P": "T", "K": "D", "W": "D"}.get(letter, letter)
