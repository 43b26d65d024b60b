"""The page's text against what prometheus_client itself writes."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from sidecar.exposition import answer, text

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""What Prometheus 3 asks for."""


class Served(Collector):
    def __init__(self, *families: Metric) -> None:
        self.families = families

    def collect(self) -> Iterator[Metric]:
        yield from self.families


def registry(*families: Metric) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(Served(*families))
    return made


@given(st.text(), st.text(), st.floats() | st.integers(-(1 << 64), 1 << 64))
def test_families_of_every_type_are_written_as_the_library_does(
    label: str, documentation: str, value: float
) -> None:
    labels = ["b", "a"]
    gauge = GaugeMetricFamily("a_gauge", documentation, labels=labels)
    counter = CounterMetricFamily("a_counter", documentation, labels=labels)
    for family in (gauge, counter):
        family.add_metric([label, "x"], value)
        family.add_metric(["", label], 1)
    histogram = HistogramMetricFamily("a_histogram_seconds", documentation, labels=labels)
    histogram.add_metric([label, "x"], [("0.5", 1), ("+Inf", 3)], value)
    summary = SummaryMetricFamily("a_summary", documentation, labels=labels)
    summary.add_metric([label, "x"], count_value=2, sum_value=value)
    info = InfoMetricFamily("a_thing", documentation, value={"v": label})
    bare = GaugeMetricFamily("bare", documentation, value=value)
    families = (gauge, counter, histogram, summary, info, bare)
    made = registry(*families)
    assert text(families).encode() == generate_latest(made)
    assert text(families, openmetrics=True).encode() == openmetrics.generate_latest(made)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e6, 1234567, 1 << 63, 0.1])
def test_numbers(value: float) -> None:
    family = GaugeMetricFamily("a_gauge", "text", value=value)
    assert text([family]).encode() == generate_latest(registry(family))


def test_prometheus_gets_openmetrics_and_others_the_plain_text() -> None:
    families = [CounterMetricFamily("a_counter", "text", value=1)]
    body, headers = answer(families, accept=PROMETHEUS, accept_encoding="gzip")
    assert gzip.decompress(body).decode() == text(families, openmetrics=True)
    assert dict(headers)["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert dict(headers)["Content-Length"] == str(len(body))
    body, headers = answer(families, accept="", accept_encoding="")
    assert body.decode() == text(families)
    assert dict(headers)["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "Content-Encoding" not in dict(headers)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("text/plain;version=abc", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.x", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=2.0.0", "application/openmetrics-text; version=1.0"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0"),
        (";;=,,;", "text/plain; version=0.0.4"),
    ],
)
def test_no_accept_header_costs_the_page_or_is_promised_another_format(
    accept: str, kind: str
) -> None:
    families = [CounterMetricFamily("a_counter", "text", value=1)]
    body, headers = answer(families, accept=accept, accept_encoding="")
    assert dict(headers)["Content-Type"].startswith(kind)
    assert body.decode() == text(families, openmetrics=kind.startswith("application/openmetrics"))


def test_a_label_that_is_no_utf8_costs_no_page() -> None:
    family = GaugeMetricFamily("a_gauge", "text", labels=["device"])
    family.add_metric([b"a\xffb".decode("utf-8", "surrogateescape")], 1)
    family.add_metric(["eth0"], 2)
    body, _ = answer([family], accept="", accept_encoding="")
    assert body.decode().splitlines()[2:] == [
        'a_gauge{device="a?b"} 1.0',
        'a_gauge{device="eth0"} 2.0',
    ]
