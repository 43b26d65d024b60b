"""The reference's sys_* rows from files: the machine's CPU and memory, the pod's /dev/shm."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

from sidecar.sources.deadline import DeadlineRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from sidecar.pod import Pod
    from sidecar.sources.system import CpuTimes, SystemFS

ROWS = {
    "sys_cpu_utilization": "Share of the machine's CPU time that was not idle, 0 to 1.",
    "sys_memory_available_bytes": "Memory that the machine can give without swapping.",
    "sys_shm_total_bytes": "Size of the watched process's /dev/shm.",
    "sys_shm_used_bytes": "Bytes in use in the watched process's /dev/shm.",
}


DEADLINE = 0.25
"""Seconds in which a /dev/shm must answer: what is mounted there is the trainer's choice, and a
network file system may hang for ever."""


class SystemCollector:
    """Reads /proc/stat, /proc/meminfo and the watched process's /dev/shm."""

    name = "system"
    interval = 0.5

    def __init__(self, pod: Pod, system: SystemFS, *, proc: str = "/proc") -> None:
        self._pod = pod
        self._system = system
        self._proc = proc
        self._before: CpuTimes | None = None
        self._latest: dict[str, float] = {}
        self._runner = DeadlineRunner("shm")
        self._shm: dict[str, float] = {}

    def sample(self) -> None:
        """Reads once; the utilization is that of the time since the round before."""
        values: dict[str, float] = {}
        now, before = self._system.cpu_times(), self._before
        self._before = now
        if before is not None and now.total > before.total:
            idle = max(0, now.idle - before.idle)
            values["sys_cpu_utilization"] = 1 - min(1.0, idle / (now.total - before.total))
        available = self._system.available_memory()
        if available is not None:
            values["sys_memory_available_bytes"] = available
        heads = [pid for rank in self._pod.view.ranks for pid in rank.heads]
        if self._runner.run("shm", partial(self._read_shm, heads), deadline=DEADLINE):
            values.update(self._shm)
        self._latest = values

    def _read_shm(self, heads: list[int]) -> None:
        self._shm = {}
        for pid in heads:
            try:
                shm = os.statvfs(f"{self._proc}/{pid}/root/dev/shm")
            except OSError:
                continue
            self._shm = {
                "sys_shm_total_bytes": shm.f_blocks * shm.f_frsize,
                "sys_shm_used_bytes": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            }
            return

    def collect(self) -> Iterator[Metric]:
        """Yields the rows that could be read."""
        latest = self._latest
        for name, text in ROWS.items():
            if name in latest:
                family = GaugeMetricFamily(name, text, labels=["node", "job"])
                family.add_metric([self._pod.config.node, self._pod.view.job], latest[name])
                yield family
