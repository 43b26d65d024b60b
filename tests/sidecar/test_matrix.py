"""The pod's row of the matrix: sums over ranks that only grow, and a bound on peers."""

from __future__ import annotations

from sidecar.collectors.matrix import PEERS, MatrixCollector
from sidecar.config import Config
from sidecar.pod import Pod
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS

PAIRS = dict[str, dict[str, tuple[float, float]]]


class Matrix:
    """The collector over figures that a test sets."""

    def __init__(self) -> None:
        self.round_trips: PAIRS = {}
        self.segments: PAIRS = {}
        procfs = ProcFS()
        self.collector = MatrixCollector(
            Pod(procfs, ProcessTable(procfs), Config()),
            round_trips=lambda: self.round_trips,
            segments=lambda: self.segments,
        )

    def sample(self) -> dict[str, dict[str, float]]:
        """Samples once; values by peer and the end of the name."""
        self.collector.sample()
        found: dict[str, dict[str, float]] = {}
        for family in self.collector.collect():
            for sample in family.samples:
                row = found.setdefault(sample.labels["peer"], {})
                row[sample.name.removeprefix("kitty_pod_peer_")] = sample.value
        return found


def test_ranks_are_summed_up() -> None:
    matrix = Matrix()
    matrix.round_trips = {"0": {"a": (10, 0.1)}, "1": {"a": (5, 0.2)}, "": {"a": (1, 0.1)}}
    matrix.segments = {"0": {"a": (100, 2), "b": (7, 0)}, "1": {"a": (50, 1)}}
    found = matrix.sample()
    assert found["a"]["rtt_seconds_count"] == 16
    assert round(found["a"]["rtt_seconds_sum"], 6) == 0.4
    assert found["a"]["sent_segments_total"] == 150
    assert found["a"]["retransmitted_segments_total"] == 3
    assert found["b"] == {"sent_segments_total": 7, "retransmitted_segments_total": 0}


def test_a_rank_that_ends_or_starts_again_takes_nothing_away() -> None:
    matrix = Matrix()
    matrix.segments = {"0": {"a": (100, 2)}, "1": {"a": (50, 1)}}
    matrix.sample()
    matrix.segments = {"0": {"a": (110, 2)}}
    assert matrix.sample()["a"]["sent_segments_total"] == 160
    matrix.segments = {"0": {"a": (120, 2)}, "1": {"a": (3, 0)}}
    assert matrix.sample()["a"]["sent_segments_total"] == 173
    matrix.segments = {"0": {"a": (4, 0)}, "1": {"a": (3, 0)}}
    assert matrix.sample()["a"]["sent_segments_total"] == 177


def test_peers_that_are_gone_have_no_series() -> None:
    matrix = Matrix()
    matrix.segments = {"0": {"a": (100, 2), "b": (1, 0)}}
    matrix.sample()
    matrix.segments = {"0": {"b": (1, 0)}}
    assert matrix.sample().keys() == {"b"}


def test_the_busiest_peers_are_kept_and_the_others_counted() -> None:
    matrix = Matrix()
    matrix.segments = {"0": {f"p{n:03}": (1000 + n, 0) for n in range(PEERS + 10)}}
    assert matrix.sample().keys() == {f"p{n:03}" for n in range(10, PEERS + 10)}
    assert matrix.collector.left_out == 40
    grown = {
        peer: (sent + 100 * (peer == "p000"), again)
        for peer, (sent, again) in matrix.segments["0"].items()
    }
    matrix.segments = {"0": grown}
    assert "p000" not in matrix.sample(), "a little more does not move who has series"
    matrix.segments = {"0": grown | {"p000": (9000, 0)}}
    assert "p000" in matrix.sample()
