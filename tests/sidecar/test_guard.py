from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from sidecar.exposition import text
from sidecar.guard import OWNERS, SERIES_A_GPU, SERIES_A_POD, SERIES_A_RANK, Guard
from sidecar.sampler import Rounds


class Fixed:
    """A collector that serves given families."""

    interval = 0.5

    def __init__(self, name: str, *families: Metric | Exception) -> None:
        self.name = name
        self.families = families

    def sample(self) -> None:
        pass

    def collect(self) -> Iterator[Metric]:
        for family in self.families:
            if isinstance(family, Exception):
                raise family
            yield family


def gauge(name: str, count: int = 1, **labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, "text", labels=[*labels, "n"])
    for n in range(count):
        family.add_metric([*labels.values(), str(n)], n)
    return family


def page(*collectors: Fixed, run: bool = True) -> str:
    rounds = [Rounds(collector) for collector in collectors]
    if run:
        for one in rounds:
            one.run()
    return text(Guard(rounds, job=lambda: "llm").collect())


def test_a_raising_collector_leaves_the_others_and_is_counted() -> None:
    served = page(Fixed("bad", gauge("a_gauge"), KeyError("bug")), Fixed("good", gauge("b_gauge")))
    assert "a_gauge" not in served, "half a collector's families would look like the whole"
    assert 'b_gauge{n="0"} 0.0' in served
    assert 'kitty_collector_errors_total{collector="bad",job="llm"} 1.0' in served
    assert 'kitty_collector_errors_total{collector="good",job="llm"} 0.0' in served


def test_nothing_is_served_of_a_collector_that_is_down() -> None:
    served = page(Fixed("late", gauge("a_gauge")), run=False)
    assert "a_gauge" not in served
    assert 'kitty_collector_up{collector="late",job="llm",reason="starting"} 0.0' in served


def test_up_has_no_reason() -> None:
    assert 'kitty_collector_up{collector="c",job="llm",reason=""} 1.0' in page(Fixed("c"))


@pytest.mark.parametrize(
    ("labels", "bound"),
    [
        ({"rank": "3"}, SERIES_A_RANK),
        ({"pid": "7"}, SERIES_A_RANK),
        ({"rank": "", "peer": "10.0.0.1"}, SERIES_A_RANK),
        ({"rank": "3", "uuid": "GPU-1"}, SERIES_A_GPU),
        ({}, SERIES_A_POD),
    ],
)
def test_series_are_bounded_and_the_dropped_ones_counted(
    labels: dict[str, str], bound: int
) -> None:
    served = page(Fixed("c", gauge("full", bound, **labels), gauge("over", 5, **labels)))
    assert served.count("\nfull{") == bound
    assert "over{" not in served
    assert 'kitty_series_dropped_total{collector="c",job="llm"} 5.0' in served


def test_one_rank_that_has_too_many_leaves_the_others() -> None:
    served = page(
        Fixed("a", gauge("full", SERIES_A_RANK, rank="0")),
        Fixed("b", gauge("next", 1, rank="0")),
        Fixed("c", gauge("other", 1, rank="1")),
    )
    assert "next{" not in served
    assert 'other{n="0",rank="1"}' in served


def test_a_histogram_is_dropped_whole() -> None:
    histogram = HistogramMetricFamily("h_seconds", "text", labels=["rank"])
    histogram.add_metric(["0"], [("1", 1), ("+Inf", 2)], 3)
    served = page(Fixed("c", gauge("full", SERIES_A_RANK - 2, rank="0"), histogram))
    assert "h_seconds" not in served


def test_a_hostile_label_is_escaped() -> None:
    served = page(Fixed("c", gauge("a_gauge", 1, comm='x"} 1\nforged 2\\')))
    assert "\nforged" not in served
    assert r'comm="x\"} 1\nforged 2\\"' in served


def test_what_a_collector_left_out_itself_is_counted_too() -> None:
    bounded = Fixed("c", gauge("a_gauge"))
    bounded.left_out = 7  # type: ignore[attr-defined] # only collectors with a bound have it
    assert 'kitty_series_dropped_total{collector="c",job="llm"} 7.0' in page(bounded)


def test_a_sample_with_the_labels_of_another_is_left_out() -> None:
    """Prometheus refuses the second one, with a warning at every scrape."""
    twice = gauge("a_gauge", 2, x="y")
    twice.add_metric(["y", "0"], 9)
    served = page(Fixed("c", twice))
    assert [line for line in served.splitlines() if line.startswith("a_gauge")] == [
        'a_gauge{n="0",x="y"} 0.0',
        'a_gauge{n="1",x="y"} 1.0',
    ]
    assert 'kitty_series_dropped_total{collector="c",job="llm"} 1.0' in served


def test_a_family_is_served_once() -> None:
    served = page(Fixed("a", gauge("a_gauge", 1)), Fixed("b", gauge("a_gauge", 2)))
    assert served.count("# TYPE a_gauge") == 1
    assert 'kitty_series_dropped_total{collector="b",job="llm"} 2.0' in served


def test_ranks_without_end_are_bounded() -> None:
    family = GaugeMetricFamily("a_gauge", "text", labels=["rank"])
    for rank in range(OWNERS + 30):
        family.add_metric([str(rank)], 1)
    served = page(Fixed("c", family))
    assert served.count("\na_gauge{") == OWNERS
    assert 'kitty_series_dropped_total{collector="c",job="llm"} 30.0' in served
