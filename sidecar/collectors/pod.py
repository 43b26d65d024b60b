"""The pod itself: its names, what is watched in it, and the agent's version."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

import sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from sidecar.pod import Pod

LOG = logging.getLogger("kitty.pod")


class PodCollector:
    """Reads the pod's processes first, for all other collectors of a round."""

    name = "pod"
    interval = 1.0

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._denied: set[int] = set()
        self._told = False

    def sample(self) -> None:
        """Reads the processes."""
        self._pod.refresh()
        denied = {
            pid
            for pid, process in self._pod.view.processes.items()
            # The first is the pod's own, nobody's trainer; ended ones have no environment.
            if not process.environ_readable and pid != 1 and self._pod.stats[pid].state not in "ZX"
        }
        # One round alone proves nothing: a process that is about to end is denied too.
        lasting = denied & self._denied
        if lasting and not self._told:
            LOG.warning(
                "the environment of process %d (%d in all) is denied, so that its rank is unknown:"
                " its user, or SYS_PTRACE, would allow it",
                min(lasting),
                len(lasting),
            )
            self._told = True
        self._denied = denied

    def collect(self) -> Iterator[Metric]:
        """Yields kitty_pod_info, one series a rank, kitty_watched_processes, kitty_build_info."""
        config, view = self._pod.config, self._pod.view
        info = GaugeMetricFamily(
            "kitty_pod_info",
            "The pod that the sidecar watches, and the ranks in it.",
            labels=["pod", "namespace", "uid", "pod_ip", "node", "job", "rank"],
        )
        names = [config.pod, config.namespace, config.pod_uid, config.pod_ip, config.node]
        ranks = [(rank.job, rank.rank) for rank in view.ranks] or [(view.job, config.rank)]
        for job, rank in ranks:
            info.add_metric([*names, job, rank], 1)
        yield info
        watched = GaugeMetricFamily(
            "kitty_watched_processes",
            "Processes of the pod that training runs in, launchers and workers included.",
            labels=["node", "job"],
        )
        watched.add_metric([config.node, view.job], len(view.watched))
        yield watched
        yield InfoMetricFamily(
            "kitty_build",
            "The sidecar's version.",
            value={"version": sidecar.__version__, "job": view.job},
        )
