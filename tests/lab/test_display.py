"""What the table and the summary say of given scrapes."""

from collections.abc import Mapping

import pytest

from lab.display import (
    Column,
    evidence,
    process_state,
    retransmit_ratio,
    rtt_ms,
    rtt_source,
    verdict,
)
from lab.faults import KINDS
from lab.scrape import Page, Window
from lab.signals import Comparison
from lab.story import Finding

NO_OUTLIER = Comparison(before={}, during={}, excess={}, outlier=None)


def window(*values: Mapping[str, float], **labels: str) -> Window:
    """Scrapes of one rank: each maps sample names to values."""
    pages = [
        {0: Page(float(turn), {name: [(labels, value)] for name, value in each.items()})}
        for turn, each in enumerate(values)
    ]
    return Window(pages, {"10.0.0.1": 0})


def finding(**comparisons: Comparison) -> Finding:
    return Finding(
        kind=KINDS["latency"],
        rank=2,
        strength=50,
        started=0,
        stopped=1,
        comparisons={"rtt": NO_OUTLIER} | comparisons,
        step_before=None,
        step_during=None,
    )


def test_the_raw_round_trip_is_shown_where_it_is_served() -> None:
    raw = window({"net_tcp_rtt_us": 50_000, "kitty_tcp_srtt_seconds": 0.02}, stat="max")
    smoothed = window({"kitty_tcp_srtt_seconds": 0.02}, stat="max")
    assert (rtt_source(raw), rtt_ms(raw, 0)) == ("net_tcp_rtt_us", 50)
    assert (rtt_source(smoothed), rtt_ms(smoothed, 0)) == ("kitty_tcp_srtt_seconds", 20)
    assert rtt_ms(window({}), 0) is None


def test_no_segments_are_no_ratio() -> None:
    names = ("kitty_tcp_sent_segments_total", "kitty_tcp_retransmitted_segments_total")
    some = window(dict.fromkeys(names, 0.0), {names[0]: 200.0, names[1]: 3.0})
    assert retransmit_ratio(some, 0) == pytest.approx(1.5)
    assert retransmit_ratio(window(dict.fromkeys(names, 5.0), dict.fromkeys(names, 5.0)), 0) is None


def test_the_state_is_the_newest() -> None:
    assert process_state(window({"proc_state": 1.0}, state="T"), 0) == "T"
    assert process_state(window({}), 0) == "-"


def test_a_cell_is_marked_when_it_stands_out_and_a_dash_when_unknown() -> None:
    column = Column("RTT ms", {0: 1.0, 1: 1.2, 2: 50.0}, 5)
    assert [column.cell(rank).style for rank in range(4)] == ["", "", "bold red", "dim"]
    assert [column.cell(rank).plain for rank in range(4)] == ["1.0", "1.2", "50.0", "-"]


def test_the_verdict_admits_what_was_not_shown() -> None:
    assert verdict(finding()) == "NOT shown: no figures for rtt"
    calm = Comparison(before={}, during={1: 1.0}, excess={1: 0.0}, outlier=None)
    assert verdict(finding(rtt=calm)) == "NOT shown: rtt names no rank"
    wrong = Comparison(before={}, during={1: 9.0}, excess={1: 9.0}, outlier=1)
    assert verdict(finding(rtt=wrong)) == "NOT shown: rtt names 1"


def test_the_evidence_has_the_numbers() -> None:
    right = Comparison(
        before={2: 2.0}, during={0: 1.0, 1: 3.0, 2: 52.0, 3: 2.0}, excess={2: 50.0}, outlier=2
    )
    assert verdict(finding(rtt=right)) == "shown, as it must be, by rtt"
    assert evidence("rtt", finding(rtt=right)) == (
        "rtt: rank 2 52 ms, median of its peers 2 ms, before the fault 2 ms"
    )
