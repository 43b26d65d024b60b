"""The largest report that there can be, and figures as they are written."""

import math
import random

import pytest

from kitty.history import POINTS, STEPS, Finding, History, step_for, stretches
from kitty.job import Rank, Snapshot
from kitty.jobs import JobState
from kitty.page import page
from kitty.plot import y_range
from kitty.signals import SIGNALS
from kitty.text import clean, duration, figure
from kitty.verdict import Verdict

END = 1_796_000_000.0


def worst_history() -> History:
    """As many lines, points, verdicts as are ever drawn, and long names."""
    dice = random.Random(7)
    times = [END - 15 * number for number in range(POINTS, -1, -1)]
    places = [(f"pod-{number}-" + 50 * "x", str(number)) for number in range(16)]
    findings = [
        Finding(
            begin=END - 5 * number,
            end=END - 5 * number + 4,
            lasting=False,
            verdict=Verdict(
                namespace="ns",
                job="j",
                kind=dice.choice(["cpu", "paused", "network-loss"]),
                rank=str(number % 16),
                pod=places[number % 16][0],
                node="node",
                confidence=0.9,
            ),
        )
        for number in range(3000)
    ]
    state = JobState(
        namespace="ns",
        name="j",
        pods=16,
        ranks=16,
        verdicts=[finding.verdict for finding in findings],
        blind=(),
        withheld=(),
        seen=END,
        present=True,
    )
    now = Snapshot(state=state, at=END, ranks=(), medians={}, unseen=(), sudden=())
    return History(
        now=now,
        start=times[0],
        end=END,
        step=15,
        nodes=dict.fromkeys(places, "node"),
        lines={
            name: {place: [(when, dice.random() * 1e9) for when in times] for place in places}
            for name in SIGNALS
        },
        bands={},
        medians={},
        named=places[:8],
        findings=findings,
        alarms=(),
        last_seen=END,
        missing=(),
    )


def test_largest_report_is_bounded() -> None:
    text = page(worst_history(), warnings=())
    assert 500_000 < len(text.encode()) < 3 << 20


def test_no_ranks_at_all() -> None:
    history = worst_history()
    state = history.now.state
    empty = History(
        **{
            **vars(history),
            "lines": {},
            "nodes": {},
            "named": (),
            "findings": (),
            "now": Snapshot(
                state=JobState(**{**vars(state), "verdicts": ()}),
                at=END,
                ranks=[Rank(rank="", pod="p", node="")],
                medians={},
                unseen=(),
                sudden=(),
            ),
        }
    )
    assert "No figures in this time." in page(empty, warnings=["<b>"])
    assert "&lt;b&gt;" in page(empty, warnings=["<b>"])


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.052, "s", "52 ms"),
        (0.0009999, "s", "1 ms"),
        (0.9996, "s", "1 s"),
        (4e-7, "s", "0.4 us"),
        (4000, "s", "4000 s"),
        (0, "s", "0 s"),
        (0.8, "s/s", "800 ms/s"),
        (0.0312, "ratio", "3.12%"),
        (1, "ratio", "100%"),
        (123456, "bytes", "123 kB"),
        (0.4, "bytes", "0.4 B"),
        (1.98e9, "Hz", "1.98 GHz"),
        (520, "W", "520 W"),
        (1.5, "cores", "1.5 cores"),
        (0.25, "processes", "0.25"),
        (12345, "", "12300"),
        (1e-9, "", "1.0e-09"),
        (-0.5, "s", "-500 ms"),
        (math.nan, "s", "-"),
        (math.inf, "ratio", "-"),
    ],
)
def test_figures(value: float, unit: str, written: str) -> None:
    assert figure(value, unit) == written


def test_durations() -> None:
    told = [duration(seconds) for seconds in (0, 59.6, 3600, 3661, 90061, -5)]
    assert told == ["0 s", "1 min", "1 h", "1 h 1 min", "1 d 1 h", "0 s"]


def test_clean_keeps_letters_and_shows_the_rest() -> None:
    assert clean("rangée-排名") == "rangée-排名"
    assert clean("a\x1b[2J\u202eb\x00") == r"a\x1b[2J\u202eb\x00"


def test_no_step_asks_for_too_much() -> None:
    for span in (60, 3600, 86400, 30 * 86400):
        assert span / step_for(span) <= POINTS
    assert step_for(3600) == 15
    assert list(STEPS) == sorted(STEPS)


def test_gaps_are_gaps() -> None:
    points = [(0.0, 1.0), (5.0, 1.0), (20.0, 1.0)]
    assert [len(stretch) for stretch in stretches(points, 5)] == [2, 1]


@pytest.mark.parametrize(
    "values",
    [[], [0.0], [5.0], [0.0, 1e-12], [1e12, 1.0001e12], [-3.0, 4.0], [-2.0, -2.0], [7.0] * 3],
)
def test_axis_holds_every_value(values: list[float]) -> None:
    low, high, ticks = y_range(values)
    assert low < high
    assert all(low <= value <= high for value in values)
    assert 2 <= len(ticks) <= 8
    assert len({figure(tick, "W") for tick in ticks}) == len(ticks)
