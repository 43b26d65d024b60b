"""The reference's net_tcp_* rows from the kernel's own totals.

They are totals of the network namespace: every watched process of the pod shows the same ones.
What each rank's own connections did is in collectors/tcp.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sidecar.collectors.base import Reason, UnavailableError
from sidecar.sources.errors import SourceError
from sidecar.sources.files import read
from sidecar.sources.snmp import TcpTotals, parse_snmp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from sidecar.attribution import PodView
    from sidecar.pod import Pod
    from sidecar.sources.sockets import SocketTable

LABELS = ("pid", "node", "rank", "job")


@dataclass(frozen=True, slots=True)
class _Row:
    labels: tuple[str, ...]
    totals: TcpTotals
    send_queue: int | None


class NetCollector:
    """Reads /proc/<pid>/net/snmp once a namespace, and the namespace's send queues."""

    name = "net"
    interval = 0.5

    def __init__(self, pod: Pod, sockets: SocketTable | None, *, proc: str = "/proc") -> None:
        self._pod = pod
        self._sockets = sockets
        self._proc = proc
        self._latest: tuple[_Row, ...] = ()
        self._told: PodView | None = None
        self._namespaces: dict[int | str, int] = {}

    def sample(self) -> None:
        """Reads once.

        Raises:
            UnavailableError: the kernel denies it.
        """
        view, node = self._pod.view, self._pod.config.node
        if view is not self._told:
            self._told, self._namespaces = view, {}
        own = self._namespace("self")
        snapshot = self._sockets.snapshot if self._sockets else None
        totals: dict[int, TcpTotals] = {}
        rows = []
        denied = False
        for rank, pid in [(ranked, head) for ranked in view.ranks for head in ranked.heads]:
            try:
                namespace = self._namespace(pid)
                if namespace not in totals:
                    totals[namespace] = parse_snmp(read(f"{self._proc}/{pid}/net/snmp"))
            except PermissionError:
                denied = True
                continue
            except (OSError, SourceError):
                continue
            # Socket dumps see the agent's own namespace only.
            queue = snapshot.send_queue if snapshot and namespace == own else None
            rows.append(_Row((str(pid), node, rank.rank, rank.job), totals[namespace], queue))
        self._latest = tuple(rows)
        if denied and not rows:
            raise UnavailableError(Reason.PERMISSION, "/proc/<pid>/net cannot be read")

    def _namespace(self, pid: int | str) -> int:
        known = self._namespaces.get(pid)
        if known is None:
            try:
                known = self._pod.procfs.namespace(pid, "net")
            except PermissionError:
                # Unprivileged: the containers of a pod share one network namespace.
                known = 0
            self._namespaces[pid] = known
        return known

    def collect(self) -> Iterator[Metric]:
        """Yields retransmits, segments and queues, a series a watched process."""
        rows = self._latest
        retransmits = CounterMetricFamily(
            "net_tcp_retransmits",
            "TCP segments retransmitted in the process's network namespace.",
            labels=LABELS,
        )
        segments = CounterMetricFamily(
            "net_tcp_out_segs",
            "TCP segments sent in the process's network namespace, without retransmitted ones.",
            labels=LABELS,
        )
        queue = GaugeMetricFamily(
            "net_tcp_tx_queue_bytes",
            "Bytes not yet acknowledged in the send queues of the process's network namespace.",
            labels=LABELS,
        )
        for row in rows:
            retransmits.add_metric(row.labels, row.totals.retransmitted_segments)
            segments.add_metric(row.labels, row.totals.out_segments)
            if row.send_queue is not None:
                queue.add_metric(row.labels, row.send_queue)
        yield from (retransmits, segments, queue)
