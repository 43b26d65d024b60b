"""What each rank's own TCP connections did: the kitty_tcp_* families.

Counts come from the kernel's struct tcp_info of every socket that a process of the rank holds;
connections of launchers, and those that nobody was seen to hold, are under the empty rank.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sidecar.sources.sockets import OTHER
from sidecar.sources.tcp_counters import COUNTERS_SINCE, TcpCounters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from sidecar.pod import Pod
    from sidecar.sources.sockets import RankSockets, SocketTable

LABELS = ("rank", "node", "job")

COUNTERS = {
    "retransmitted_segments": "Segments that the rank's connections sent again.",
    "retransmitted_bytes": "Bytes that the rank's connections sent again.",
    "sent_segments": "Segments with data that the rank's connections sent, repeated ones too.",
    "delivered_bytes": "Bytes sent by the rank's connections that peers acknowledged.",
    "received_bytes": "Bytes that the rank's connections received.",
}
PEER_COUNTERS = {
    "delivered_bytes": "Bytes sent by the rank to the peer address and acknowledged.",
    "received_bytes": "Bytes that the rank received from the peer address.",
    "retransmitted_segments": "Segments that the rank sent again to the peer address.",
    "sent_segments": "Segments with data that the rank sent to the peer address.",
}
LIMITS = {"receiver_limited": "receiver", "buffer_limited": "send_buffer"}


class TcpCollector:
    """Reads the sockets for itself and for every collector after it in a round."""

    name = "tcp"
    interval = 0.5

    def __init__(self, pod: Pod, sockets: SocketTable) -> None:
        self._pod = pod
        self._sockets = sockets
        self._sampled = 0.0

    def sample(self) -> None:
        """Reads the namespace's sockets."""
        self._sockets.refresh()
        self._sampled = time.monotonic()

    def retransmitted(self) -> dict[str, tuple[float, float]]:
        """Returns the segments that each rank sent again so far, and when they were counted."""
        snapshot = self._sockets.snapshot
        if snapshot is None:
            return {}
        return {
            rank: (_value(ranked.totals, "retransmitted_segments"), self._sampled)
            for rank, ranked in snapshot.ranks.items()
            if rank
        }

    def segments(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Returns by rank and peer address: segments sent, and sent again."""
        snapshot = self._sockets.snapshot
        if snapshot is None:
            return {}
        return {
            rank: {
                peer: (
                    _value(traffic.totals, "sent_segments"),
                    _value(traffic.totals, "retransmitted_segments"),
                )
                for peer, traffic in ranked.peers.items()
                if peer != OTHER
            }
            for rank, ranked in snapshot.ranks.items()
        }

    def collect(self) -> Iterator[Metric]:
        """Yields the rank's counters and gauges, then its matrix of peers."""
        snapshot, view = self._sockets.snapshot, self._pod.view
        if snapshot is None or not view.watched:
            return
        jobs = {"": view.job, **{rank.rank: rank.job for rank in view.ranks}}
        rows = [
            ((name, self._pod.config.node, jobs[name]), ranked)
            for name, ranked in sorted(snapshot.ranks.items())
            if name in jobs
        ]
        known = {name for name, length in COUNTERS_SINCE.items() if snapshot.info_length >= length}
        yield from _counters(rows, known)
        yield from _seconds(rows, known)
        yield from _gauges(rows)
        yield from _closings(rows)
        overruns = CounterMetricFamily(
            "kitty_tcp_closing_overruns",
            "Times that more connections closed between two readings than the kernel keeps for it;"
            " those among them that no reading saw open are not counted anywhere.",
            labels=["node", "job"],
        )
        overruns.add_metric([self._pod.config.node, view.job], snapshot.overruns)
        yield overruns
        yield from _peers(rows, known)


_Rows = list[tuple[tuple[str, str, str], "RankSockets"]]


def _value(totals: TcpCounters, name: str) -> int:
    return totals[TcpCounters._fields.index(name)]


def _counters(rows: _Rows, known: set[str]) -> Iterator[Metric]:
    for name, text in COUNTERS.items():
        if name in known:
            family = CounterMetricFamily(f"kitty_tcp_{name}", text, labels=LABELS)
            for labels, ranked in rows:
                family.add_metric(labels, _value(ranked.totals, name))
            yield family


def _seconds(rows: _Rows, known: set[str]) -> Iterator[Metric]:
    if "busy" in known:
        busy = CounterMetricFamily(
            "kitty_tcp_busy_seconds",
            "Time that the rank's connections had data to send, summed over connections.",
            labels=LABELS,
        )
        for labels, ranked in rows:
            busy.add_metric(labels, _value(ranked.totals, "busy") / 1e6)
        yield busy
    limited = CounterMetricFamily(
        "kitty_tcp_limited_seconds",
        "Part of the busy time in which the peer's window or the own send buffer held data back.",
        labels=[*LABELS, "by"],
    )
    for field, by in LIMITS.items():
        if field in known:
            for labels, ranked in rows:
                limited.add_metric([*labels, by], _value(ranked.totals, field) / 1e6)
    yield limited


def _gauges(rows: _Rows) -> Iterator[Metric]:
    transmit = GaugeMetricFamily(
        "kitty_tcp_tx_queue_bytes",
        "Bytes that the rank's connections sent and peers have not acknowledged.",
        labels=LABELS,
    )
    receive = GaugeMetricFamily(
        "kitty_tcp_rx_queue_bytes",
        "Bytes received that the rank's processes have not read.",
        labels=LABELS,
    )
    rtt = GaugeMetricFamily(
        "kitty_tcp_srtt_seconds",
        "Smoothed round-trip time of the rank's open connections (RFC 6298), mean and largest.",
        labels=[*LABELS, "stat"],
    )
    connections = GaugeMetricFamily(
        "kitty_tcp_connections",
        "Sockets of the rank by state; listening ones included, TIME-WAIT not.",
        labels=[*LABELS, "state"],
    )
    for labels, ranked in rows:
        transmit.add_metric(labels, ranked.send_queue)
        receive.add_metric(labels, ranked.receive_queue)
        for stat, value in (
            ("mean", ranked.smoothed_rtt_mean),
            ("max", ranked.smoothed_rtt_max),
        ):
            if value is not None:
                rtt.add_metric([*labels, stat], value)
        for state, count in sorted(ranked.states.items()):
            connections.add_metric([*labels, state], count)
    yield from (transmit, receive, rtt, connections)


def _closings(rows: _Rows) -> Iterator[Metric]:
    closed = CounterMetricFamily(
        "kitty_tcp_closed_connections",
        "Connections that ended: counted to their end, or only up to the reading before it.",
        labels=[*LABELS, "counted"],
    )
    for labels, ranked in rows:
        closed.add_metric([*labels, "to_the_end"], ranked.closed_read)
        closed.add_metric([*labels, "to_the_reading_before"], ranked.closed_unread)
    yield closed


def _peers(rows: _Rows, known: set[str]) -> Iterator[Metric]:
    for name, text in PEER_COUNTERS.items():
        if name in known:
            family = CounterMetricFamily(f"kitty_tcp_peer_{name}", text, labels=[*LABELS, "peer"])
            for labels, ranked in rows:
                for peer, traffic in sorted(ranked.peers.items()):
                    family.add_metric([*labels, peer], _value(traffic.totals, name))
            yield family
    rtt = GaugeMetricFamily(
        "kitty_tcp_peer_srtt_seconds",
        "Smoothed round-trip time of the rank's open connections with the peer address, mean.",
        labels=[*LABELS, "peer"],
    )
    for labels, ranked in rows:
        for peer, traffic in sorted(ranked.peers.items()):
            if traffic.smoothed_rtt is not None:
                rtt.add_metric([*labels, peer], traffic.smoothed_rtt)
    yield rtt
