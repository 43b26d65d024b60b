"""Everything a scrape gets passes here: isolation of collectors, bounds, and how they fare.

One raising collector must not cost the whole page, so each collector's families are made here,
behind a guard, before anything is served.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client import Metric
    from prometheus_client.samples import Sample

    from sidecar.sampler import Rounds

LOG = logging.getLogger("kitty.guard")

SERIES_A_RANK = 400
SERIES_A_POD = 150
SERIES_A_GPU = 80
"""GPUs count apart: a rank that owns eight of them is not eight times as noisy as others."""
OWNERS = 512
"""Ranks, processes and GPUs with series, in the order in which they come."""


class Guard:
    """All families of a page.

    Args:
        rounds: the collectors with the state of their rounds, in the order they are served.
        job: returns the pod's job, the label that every series carries.
    """

    def __init__(self, rounds: Sequence[Rounds], *, job: Callable[[], str]) -> None:
        self._rounds = tuple(rounds)
        self._job = job
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """Yields each collector's families that it could make, then how the collectors fare."""
        seen: Counter[tuple[str, str]] = Counter()
        names: set[str] = set()
        for rounds in self._rounds:
            for family in self._families(rounds):
                samples = _distinct(family.samples) if family.name not in names else []
                kept = self._bounded(samples, seen)
                self._drop(rounds.collector.name, len(family.samples) - len(kept))
                if kept:
                    names.add(family.name)
                    family.samples = kept
                    yield family
        yield from self._health()

    def _families(self, rounds: Rounds) -> list[Metric]:
        if rounds.reason is not None:
            return []
        name = rounds.collector.name
        try:
            families = list(rounds.collector.collect())
            left_out = getattr(rounds.collector, "left_out", 0)
        except Exception:
            with self._lock:
                self._failures[name] += 1
                first = self._failures[name] == 1
            if first:
                LOG.exception("%s: its values cannot be served", name)
            return []
        self._drop(name, left_out)
        return families

    def _bounded(self, samples: list[Sample], seen: Counter[tuple[str, str]]) -> list[Sample]:
        # All of a rank's samples of a family or none: half a histogram would lie.
        owners = Counter(_owner(sample) for sample in samples)
        full = set()
        for owner, count in owners.items():
            unknown = owner not in seen and len(seen) >= OWNERS
            if unknown or seen[owner] + count > _bound(owner):
                full.add(owner)
            else:
                seen[owner] += count
        if not full:
            return samples
        return [sample for sample in samples if _owner(sample) not in full]

    def _drop(self, name: str, count: int) -> None:
        with self._lock:
            self._dropped[name] += count

    def _health(self) -> Iterator[Metric]:
        job = self._job()
        up = GaugeMetricFamily(
            "kitty_collector_up",
            "Whether the collector's latest round succeeded; reason says why not.",
            labels=["collector", "reason", "job"],
        )
        duration = GaugeMetricFamily(
            "kitty_collector_duration_seconds",
            "Time that the collector's latest round took.",
            labels=["collector", "job"],
        )
        interval = GaugeMetricFamily(
            "kitty_sample_interval_seconds",
            "Time between the collector's rounds now in force; stretched when rounds are dear.",
            labels=["collector", "job"],
        )
        errors = CounterMetricFamily(
            "kitty_collector_errors",
            "Rounds and scrapes in which the collector failed unexpectedly.",
            labels=["collector", "job"],
        )
        dropped = CounterMetricFamily(
            "kitty_series_dropped",
            "Samples left out of pages because a rank, the pod or a collector had too many, or"
            " another one with the same labels.",
            labels=["collector", "job"],
        )
        with self._lock:
            failures, drops = Counter(self._failures), Counter(self._dropped)
        for rounds in self._rounds:
            name, reason = rounds.collector.name, rounds.reason
            up.add_metric([name, reason or "", job], 0 if reason else 1)
            if rounds.duration is not None:
                duration.add_metric([name, job], rounds.duration)
            interval.add_metric([name, job], rounds.interval)
            errors.add_metric([name, job], rounds.errors + failures[name])
            dropped.add_metric([name, job], drops[name])
        yield from (up, duration, interval, errors, dropped)


def _distinct(samples: list[Sample]) -> list[Sample]:
    """Returns the samples without those whose name and labels came before."""
    found: dict[tuple[object, ...], Sample] = {}
    for sample in samples:
        found.setdefault((sample.name, *sample.labels.items()), sample)
    return samples if len(found) == len(samples) else list(found.values())


def _owner(sample: Sample) -> tuple[str, str]:
    """Returns what a sample counts towards: a GPU, a rank, a process without one, or the pod."""
    if "peer" in sample.labels:
        # Launchers' peers, or those of a rank that is unknown, must not crowd out the pod's rows.
        return "rank", sample.labels.get("rank", "")
    for label in ("uuid", "rank", "pid"):
        if sample.labels.get(label):
            return label, sample.labels[label]
    return "", ""


def _bound(owner: tuple[str, str]) -> int:
    return {"uuid": SERIES_A_GPU, "": SERIES_A_POD}.get(owner[0], SERIES_A_RANK)
