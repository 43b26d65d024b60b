"""The outlier is decided as the text of lab.signals says, also where the plain figures mislead."""

from collections.abc import Mapping

import pytest

from lab.scrape import Page, Window
from lab.signals import SIGNALS, compare, lowest_by_rank

ADDRESSES = {f"10.0.0.{rank}": rank for rank in range(4)}
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
SENT = "kitty_tcp_peer_sent_segments_total"
AGAIN = "kitty_tcp_peer_retransmitted_segments_total"
SRTT = "kitty_tcp_peer_srtt_seconds"


def ring(srtt_ms: Mapping[tuple[int, int], float], again: Mapping[tuple[int, int], int]) -> Window:
    """Two scrapes of a ring of four, 1,000 segments apart."""
    rounds = []
    for turn in range(2):
        pages = {}
        for rank, peer in RING:
            labels = {"rank": str(rank), "peer": f"10.0.0.{peer}"}
            back = {"rank": str(rank), "peer": f"10.0.0.{(rank - 1) % 4}"}  # only acknowledges
            pages[rank] = Page(
                float(turn),
                {
                    SENT: [(labels, 1000.0 * turn), (back, 1.0)],
                    AGAIN: [(labels, float(again.get((rank, peer), 0)) * turn), (back, 0.0)],
                    SRTT: [(labels, srtt_ms.get((rank, peer), 1.0) / 1000), (back, 0.5)],
                },
            )
        rounds.append(pages)
    return Window(rounds, ADDRESSES)


def per_rank(name: str, figures: Mapping[int, tuple[float, float]], **labels: str) -> Window:
    """Two scrapes, 10 s apart, of a family with one series a rank."""
    return Window(
        [
            {
                rank: Page(10.0 * turn, {name: [(labels, pair[turn])]})
                for rank, pair in figures.items()
            }
            for turn in range(2)
        ],
        ADDRESSES,
    )


CALM = ring({}, {})


def measured(window: Window, rtt_ms: float, *, count: int) -> Window:
    """The same with round trips measured, in the second scrape, from each rank to the next."""
    rounds = []
    for turn, pages in enumerate(window.rounds):
        more = {}
        for rank, page in pages.items():
            labels = {"rank": str(rank), "peer": f"10.0.0.{(rank + 1) % 4}"}
            figures = {
                "kitty_tcp_peer_rtt_seconds_count": [(labels, float(count * turn))],
                "kitty_tcp_peer_rtt_seconds_sum": [(labels, turn * count * rtt_ms / 1000)],
            }
            more[rank] = Page(page.time, {**page.series, **figures})
        rounds.append(more)
    return Window(rounds, window.ranks)


@pytest.mark.parametrize(("count", "shown_ms"), [(5, 50.0), (4, 20.0)])
def test_round_trips_that_were_measured_go_before_smoothed_ones(
    count: int, shown_ms: float
) -> None:
    window = measured(ring(dict.fromkeys(RING, 20.0), {}), 50.0, count=count)
    cells = SIGNALS["rtt"].cells(window)
    assert cells == {pair: pytest.approx(shown_ms) for pair in RING}


def test_a_bad_link_names_its_pod_and_not_the_one_that_sends_to_it() -> None:
    hot = ring({(1, 2): 77, (2, 3): 104, (0, 1): 1.3, (3, 0): 1.5}, {})
    found = compare(SIGNALS["rtt"], CALM, hot)
    assert found.outlier == 2
    assert found.during[2] == pytest.approx(77)
    assert found.peers_median(2) == pytest.approx(1.3)


def test_one_hot_path_names_nobody() -> None:
    assert compare(SIGNALS["rtt"], CALM, ring({(1, 2): 80}, {})).outlier is None


def test_a_job_wide_shift_names_nobody() -> None:
    hot = ring({pair: 60.0 + pair[0] for pair in RING}, {})
    assert compare(SIGNALS["rtt"], CALM, hot).outlier is None


def test_what_was_so_before_names_nobody() -> None:
    hot = ring({(1, 2): 77, (2, 3): 104}, {})
    assert compare(SIGNALS["rtt"], hot, hot).outlier is None


def test_retransmits_are_a_share_of_what_was_sent() -> None:
    found = compare(SIGNALS["retransmits"], CALM, ring({}, {(1, 2): 30, (2, 3): 28, (0, 1): 1}))
    assert found.outlier == 2
    assert found.during[2] == pytest.approx(2.8)


def test_a_link_without_traffic_says_nothing() -> None:
    quiet = Window([CALM.rounds[0], CALM.rounds[0]], ADDRESSES)
    found = compare(SIGNALS["rtt"], CALM, quiet)
    assert found.during == {}
    assert found.outlier is None


def test_peers_outside_of_the_job_do_not_count() -> None:
    labels = {"peer": "192.0.2.1"}
    pages = [{0: Page(t, {SENT: [(labels, 500 * t)], SRTT: [(labels, 9.0)]})} for t in (0.0, 1.0)]
    assert SIGNALS["rtt"].cells(Window(pages, ADDRESSES)) == {}


def test_rates_are_per_second_and_a_restarted_counter_is_no_negative_rate() -> None:
    name = "kitty_rank_run_queue_delay_seconds_total"
    calm = per_rank(name, dict.fromkeys(range(4), (5.0, 5.1)))
    busy = per_rank(name, {0: (5.1, 5.2), 1: (5.1, 5.2), 2: (5.1, 9.1), 3: (5.1, 0.0)})
    found = compare(SIGNALS["run queue"], calm, busy)
    assert found.outlier == 2
    assert found.during == pytest.approx({0: 10.0, 1: 10.0, 2: 400.0, 3: 0.0})


def test_a_stopped_rank() -> None:
    still = dict.fromkeys(range(4), (0.0, 0.0))
    calm = per_rank("proc_state", still, state="T")
    found = compare(
        SIGNALS["stopped"], calm, per_rank("proc_state", still | {3: (1.0, 1.0)}, state="T")
    )
    assert (found.outlier, found.during[3]) == (3, 100.0)


def test_two_ranks_cannot_be_told_apart() -> None:
    calm = per_rank("net_tcp_tx_queue_bytes", {0: (0.0, 0.0), 1: (0.0, 0.0)})
    hot = per_rank("net_tcp_tx_queue_bytes", {0: (0.0, 0.0), 1: (1e6, 1e6)})
    assert compare(SIGNALS["tx queue"], calm, hot).outlier is None


def test_an_unknown_figure_is_absent() -> None:
    empty = Window([], ADDRESSES)
    for signal in SIGNALS.values():
        assert signal.cells(empty) == {}
        assert compare(signal, empty, empty).outlier is None


def test_a_rank_of_one_pair_has_no_figure() -> None:
    assert lowest_by_rank({(0, 1): 9.0, (1, 2): 1.0}) == {1: 1.0}
    assert lowest_by_rank({(0,): 9.0, (1,): 1.0}) == {0: 9.0, 1: 1.0}
