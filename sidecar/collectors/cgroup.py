"""What the control groups of the pod and its containers know: CPU quota, memory, pressure.

The containers' names are unknown from inside: a container is named by the start of its id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sidecar.collectors.base import Reason, UnavailableError
from sidecar.sources.cgroup_mounts import pod_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from sidecar.pod import Pod
    from sidecar.sources.cgroup import CgroupUsage
    from sidecar.sources.cgroup_mounts import CgroupFS

LABELS = ("scope", "container", "rank", "node", "job")
CONTAINERS = 8
"""Containers that are read, those with the oldest processes first."""
_ID = re.compile(r"[0-9a-f]{12,}")

COUNTERS = {
    "cpu_usage": ("kitty_cgroup_cpu_usage_seconds", "CPU time used."),
    "periods": ("kitty_cgroup_cpu_periods", "Periods of the CPU quota in which it ran."),
    "throttled_periods": (
        "kitty_cgroup_cpu_throttled_periods",
        "Periods in which the CPU quota was used up.",
    ),
    "throttled": (
        "kitty_cgroup_cpu_throttled_seconds",
        "Time that CPUs' run queues waited for the next period of the quota.",
    ),
}
GAUGES = {
    "cpu_quota": ("kitty_cgroup_cpu_quota_cores", "CPUs that the quota allows."),
    "memory": ("kitty_cgroup_memory_current_bytes", "Memory charged, page cache included."),
    "memory_peak": ("kitty_cgroup_memory_peak_bytes", "Largest memory charged so far."),
    "memory_limit": ("kitty_cgroup_memory_max_bytes", "Memory limit."),
    "working_set": (
        "kitty_cgroup_memory_working_set_bytes",
        "Memory charged without page cache that was not used lately.",
    ),
    "headroom": (
        "kitty_memory_headroom_ratio",
        "Share of the memory limit that the working set leaves, 0 to 1.",
    ),
}


@dataclass(frozen=True, slots=True)
class _Row:
    labels: tuple[str, ...]
    usage: CgroupUsage


class CgroupCollector:
    """Reads the control group of each watched container, and the pod's where it is in sight."""

    name = "cgroup"
    interval = 1.0

    def __init__(self, pod: Pod, cgroups: CgroupFS) -> None:
        self._pod = pod
        self._cgroups = cgroups
        self._latest: tuple[_Row, ...] = ()
        self.left_out = 0
        """Samples of containers beyond the bound, events and pressure not reckoned."""

    def sample(self) -> None:
        """Reads once.

        Raises:
            UnavailableError: there are watched processes, and no control group of them is in sight.
        """
        containers = self._containers()
        self._latest = tuple(self._rows(containers))
        if not containers or self._latest:
            return
        if self._cgroups.denied:
            raise UnavailableError(
                Reason.PERMISSION, "/proc/<pid>/root is denied: SYS_PTRACE would allow it"
            )
        raise UnavailableError(Reason.MISSING, "no mount shows the containers' control groups")

    def _containers(self) -> dict[str, list[int]]:
        view = self._pod.view
        containers: dict[str, list[int]] = {}
        for pid in sorted(view.watched, key=lambda pid: (view.processes[pid].start, pid)):
            containers.setdefault(view.processes[pid].container, []).append(pid)
        self.left_out = len(list(containers)[CONTAINERS:]) * (len(COUNTERS) + len(GAUGES))
        return dict(list(containers.items())[:CONTAINERS])

    def _rows(self, containers: dict[str, list[int]]) -> Iterator[_Row]:
        config, view = self._pod.config, self._pod.view
        whole: CgroupUsage | None = None
        names: set[str] = set()
        for container, pids in containers.items():
            try:
                paths = self._pod.procfs.cgroup(pids[0])
            except OSError:
                continue
            ranks = {view.rank_of[pid].rank for pid in pids if pid in view.rank_of}
            rank = ranks.pop() if len(ranks) == 1 else ""
            usage = self._cgroups.usage(pids[0], paths)
            if usage is not None:
                name = short_name(container)
                if name in names:  # groups that a container made below its own
                    name = container[-128:]
                names.add(name)
                yield _Row(("container", name, rank, config.node, view.job), usage)
            pod_paths = {c: pod_path(path, config.pod_uid) for c, path in paths.items()}
            whole = whole or self._cgroups.usage(
                pids[0], {c: path for c, path in pod_paths.items() if path is not None}
            )
        if whole is not None:
            yield _Row(("pod", "", "", config.node, view.job), whole)

    def collect(self) -> Iterator[Metric]:
        """Yields a series a container, and one for the pod under an empty container."""
        rows = self._latest
        for attribute, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for row in rows:
                value = getattr(row.usage, attribute)
                if value is not None:
                    counter.add_metric(row.labels, value)
            yield counter
        for attribute, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for row in rows:
                value = getattr(row.usage, attribute)
                if value is not None:
                    gauge.add_metric(row.labels, value)
            yield gauge
        events = CounterMetricFamily(
            "kitty_cgroup_memory_events",
            "Times that memory was reclaimed above `high`, hit the limit (`max`), ran out (`oom`),"
            " and processes killed for it (`oom_kill`).",
            labels=[*LABELS, "event"],
        )
        pressure = CounterMetricFamily(
            "kitty_cgroup_pressure_seconds",
            "Time in which some or all threads waited for the resource (PSI).",
            labels=[*LABELS, "resource", "kind"],
        )
        for row in rows:
            for event, count in row.usage.events.items():
                events.add_metric([*row.labels, event], count)
            for (resource, kind), seconds in row.usage.pressure.items():
                pressure.add_metric([*row.labels, resource, kind], seconds)
        yield from (events, pressure)


def short_name(path: str) -> str:
    """Returns a container's name on labels: 12 digits of its id, else the last of its path."""
    last = path.rstrip("/").rsplit("/", 1)[-1]
    found = _ID.search(last)
    return found[0][:12] if found else last[:64] or "/"
