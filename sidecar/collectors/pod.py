"""The pod itself: its names, what is watched in it, and the agent's version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

import sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from sidecar.pod import Pod


class PodCollector:
    """Reads the pod's processes first, for all other collectors of a round."""

    name = "pod"
    interval = 1.0

    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    def sample(self) -> None:
        """Reads the processes."""
        self._pod.refresh()

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
