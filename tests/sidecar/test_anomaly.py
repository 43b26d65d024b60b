"""Sudden change against a rank's own past, and how long it stays visible."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from sidecar.collectors.anomaly import HOLD, LEAST_PAST, PAST, AnomalyCollector, Figure, Past
from sidecar.config import Config
from sidecar.pod import Pod
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS
from tests.sidecar.fixture import Fixture
from tests.sidecar.sandbox import Sandbox

EPOCH = 1_000_000.0


def feed(past: Past, values: list[float], start: float = 0.0) -> float:
    """Adds values 0.1 s apart; returns the time after them."""
    now = start
    for value in values:
        past.add(value, now, EPOCH + now)
        now += 0.1
    return now


def calm(length: int = 100) -> list[float]:
    """Round trips between 0.9 and 1.1 ms."""
    return [0.001 + 0.0001 * (n % 3 - 1) for n in range(length)]


def test_a_jump_is_seen_and_since_is_its_first_value() -> None:
    past = Past(0.005)
    now = feed(past, calm())
    assert not past.active(now)
    feed(past, [0.05, 0.05], now)
    assert past.active(now)
    assert past.since == pytest.approx(EPOCH + now)


def test_it_stays_for_a_scrape_every_30_s_and_goes() -> None:
    past = Past(0.005)
    now = feed(past, [*calm(), 0.05, 0.05, 0.05])
    now = feed(past, calm(300), now)
    assert past.active(now)
    assert past.active(now - 0.2 + HOLD - 30.0)
    assert not past.active(now + 10.0)
    assert past.since is not None, "when it was last seen stays known"


def test_one_value_alone_is_none() -> None:
    past = Past(0.005)
    assert not past.active(feed(past, [*calm(), 0.05, *calm(10), 0.05, 0.001]))


def test_nothing_is_said_without_a_past() -> None:
    past = Past(0.005)
    assert not past.active(feed(past, [0.001] * (LEAST_PAST - 1) + [0.05, 0.05]))


def test_less_than_the_least_excess_is_none() -> None:
    past = Past(0.005)
    assert not past.active(feed(past, [*calm(), *[0.0055] * 10]))


def test_a_past_that_is_restless_needs_more() -> None:
    past = Past(0.005)
    restless = [0.001 * (1 + 7 * (n * 37 % 11)) for n in range(100)]
    assert not past.active(feed(past, [*restless, 0.09, 0.09]))
    assert past.active(feed(past, [0.6, 0.6], 11.0))


def test_what_lasts_becomes_the_past() -> None:
    past = Past(0.005)
    now = feed(past, [*calm(), *[0.05] * (2 * PAST)])
    now = feed(past, [0.05] * 20, now + HOLD)
    assert not past.active(now)
    feed(past, [0.5, 0.5], now)
    assert past.active(now)


def test_a_counter_is_watched_by_its_growth(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path / "machine")
    fixture.process(10, ppid=1, environ={"KITTY_WATCH": "1", "RANK": "3"})
    procfs = ProcFS(str(fixture.proc))
    pod = Pod(procfs, ProcessTable(procfs, own_pid=2), Config())
    pod.refresh()
    now, total = 0.0, 0.0

    def clock() -> float:
        return now

    figure = Figure(lambda: {"3": (total, now), "9": (total, now)}, least=10, span=0.5)
    collector = AnomalyCollector(pod, {"retransmits": figure}, clock=clock, wall=clock)
    for step in range(715):
        total += 0.0 if 500 <= step < 520 else 20.0 if step == 600 else 40.0 if step > 690 else 0.1
        if step == 550:
            total = 0.0  # the rank began anew
        now += 0.1
        collector.sample()
        if step == 690:
            assert values(collector) == {"kitty_anomaly": 0.0}
    assert values(collector)["kitty_anomaly"] == 1.0
    assert 68 < values(collector)["kitty_anomaly_since_timestamp_seconds"] <= 70


def values(collector: AnomalyCollector) -> dict[str, float]:
    """By name, of rank 3: no other is in the pod."""
    samples = [sample for family in collector.collect() for sample in family.samples]
    assert {sample.labels["rank"] for sample in samples} == {"3"}
    return {sample.name: sample.value for sample in samples}


def test_a_pause_between_two_scrapes_is_seen_twenty_seconds_later(sandbox: Sandbox) -> None:
    trainer = sandbox.start("sleep", "120", env={"KITTY_WATCH": "1", "RANK": "4"})
    sandbox.sidecar(KITTY_COLLECTORS="pod,waiting,anomaly")
    sandbox.until(
        lambda: sandbox.scrape().values("kitty_anomaly", signal="stopped") == [0.0], seconds=30
    )
    before = time.time()
    sandbox.signal(trainer, signal.SIGSTOP)
    time.sleep(2.0)
    sandbox.signal(trainer, signal.SIGCONT)
    time.sleep(20)
    page = sandbox.scrape()
    assert page.value("kitty_anomaly", signal="stopped", rank="4") == 1.0
    since = page.value("kitty_anomaly_since_timestamp_seconds", signal="stopped", rank="4")
    assert before - 1.0 < since < before + 2.0
    assert 1.5 < page.value("kitty_rank_wait_seconds_total", on="stopped", rank="4") < 2.5
