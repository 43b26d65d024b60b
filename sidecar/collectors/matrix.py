"""What the pod's ranks together exchanged with each peer address: kitty_pod_peer_*.

A network is between pods. The rules compare pods with pods, and the ranks of a pod mostly have the
same peers: summed up here, that is an eighth of the series where a pod has eight ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from sidecar.pod import Pod

    ByRank = Mapping[str, Mapping[str, tuple[float, float]]]

PEERS = 24
"""Peers of a pod that have series: the busiest."""
FADING = 0.9
"""What is left a round later of what a peer counts as busy with."""


class Exchange(NamedTuple):
    """What was exchanged with a peer.

    Attributes:
        round_trips: samples.
        seconds: their sum.
        sent: segments with data, repeated ones too.
        retransmitted: segments sent again.
    """

    round_trips: int = 0
    seconds: float = 0.0
    sent: int = 0
    retransmitted: int = 0


NONE = Exchange()


class MatrixCollector:
    """Sums up over ranks, those that ended included.

    Args:
        pod: the pod's processes.
        round_trips: returns by rank and peer address: samples, and their sum in seconds.
        segments: returns by rank and peer address: segments sent, and sent again.
    """

    name = "matrix"
    interval = 0.5

    def __init__(
        self,
        pod: Pod,
        *,
        round_trips: Callable[[], ByRank],
        segments: Callable[[], ByRank],
    ) -> None:
        self._pod = pod
        self._round_trips = round_trips
        self._segments = segments
        self._before: dict[tuple[str, str], Exchange] = {}
        self._sums: dict[str, Exchange] = {}
        self._busy: dict[str, float] = {}
        self._shown: frozenset[str] = frozenset()
        self.left_out = 0

    def sample(self) -> None:
        """Adds what grew since the round before."""
        latest: dict[tuple[str, str], Exchange] = {}
        for rank, peers in self._segments().items():
            for peer, (sent, again) in peers.items():
                latest[rank, peer] = Exchange(sent=int(sent), retransmitted=int(again))
        for rank, peers in self._round_trips().items():
            for peer, (count, seconds) in peers.items():
                known = latest.get((rank, peer), NONE)
                latest[rank, peer] = known._replace(round_trips=int(count), seconds=seconds)
        busy = {peer: volume * FADING for peer, volume in self._busy.items() if volume > 0.01}
        for (rank, peer), now in latest.items():
            grown = _growth(now, self._before.get((rank, peer), NONE))
            busy[peer] = busy.get(peer, 0.0) + grown.sent + grown.round_trips
            sums = self._sums.get(peer, NONE)
            self._sums[peer] = Exchange._make(a + b for a, b in zip(sums, grown, strict=True))
        self._before = latest
        self._busy = busy
        self._choose({peer for _, peer in latest})

    def _choose(self, present: set[str]) -> None:
        for gone in self._sums.keys() - present:
            del self._sums[gone]
        if len(present) <= PEERS:
            self._shown = frozenset(present)
        else:
            # Whoever has series keeps them unless another is twice as busy: gaps are costly.
            busy = {
                peer: self._busy.get(peer, 0.0) * (2 if peer in self._shown else 1)
                for peer in present
            }
            self._shown = frozenset(sorted(busy, key=lambda peer: (-busy[peer], peer))[:PEERS])
        self.left_out = 4 * (len(present) - len(self._shown))

    def collect(self) -> Iterator[Metric]:
        """Yields the pod's row of the matrix."""
        node, job, sums = self._pod.config.node, self._pod.view.job, dict(self._sums)
        labels = ["node", "job", "peer"]
        rtt = SummaryMetricFamily(
            "kitty_pod_peer_rtt_seconds",
            "Round-trip times between the pod's ranks and the peer address, every sample.",
            labels=labels,
        )
        sent = CounterMetricFamily(
            "kitty_pod_peer_sent_segments",
            "Segments that the pod's ranks sent to the peer address, repeated ones too.",
            labels=labels,
        )
        again = CounterMetricFamily(
            "kitty_pod_peer_retransmitted_segments",
            "Segments that the pod's ranks sent again to the peer address.",
            labels=labels,
        )
        for peer in sorted(self._shown & sums.keys()):
            row, exchanged = [node, job, peer], sums[peer]
            if exchanged.round_trips:
                rtt.add_metric(row, exchanged.round_trips, exchanged.seconds)
            sent.add_metric(row, exchanged.sent)
            again.add_metric(row, exchanged.retransmitted)
        yield from (rtt, sent, again)


def _growth(now: Exchange, before: Exchange) -> Exchange:
    if any(a < b for a, b in zip(now, before, strict=True)):
        return now  # counted from the beginning again
    return Exchange._make(a - b for a, b in zip(now, before, strict=True))
