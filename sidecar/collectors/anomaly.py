"""Sudden change against a rank's own recent past: kitty_anomaly.

A fault that is over before the next scrape leaves little in averages. The collectors read some
figures ten times a second; each is compared here with its own last half minute, and what stands
out stays visible long enough for a scrape every 30 s.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from sidecar.pod import Pod

HOLD = 35.0
"""Seconds that a change stays visible after it was last seen."""
PAST = 120
"""Values that make the recent past."""
LEAST_PAST = 20
"""Values without which there is no past to compare with."""
RENEWED = 2.0
"""Seconds after which median and deviation of the past are worked out anew."""
DEVIATIONS = 8.0
"""How many scaled median deviations above the median stand out."""
IN_A_ROW = 2


class Figure(NamedTuple):
    """What is watched.

    Attributes:
        read: returns the latest value by rank, with the time at which it was taken; a value whose
            time is that of the one before is not counted twice.
        least: the least excess that matters, in the value's unit.
        span: seconds over which a counter's growth a second is taken; 0 for a gauge.
    """

    read: Callable[[], Mapping[str, tuple[float, float]]]
    least: float
    span: float = 0.0


@dataclass(slots=True)
class Past:
    """One signal of one rank: its recent past, and what stood out of it."""

    least: float
    values: deque[float] = field(default_factory=lambda: deque(maxlen=PAST))
    limit: float = float("inf")
    renewed: float = float("-inf")
    above: int = 0
    began: float = 0.0
    since: float | None = None
    seen: float = float("-inf")

    def add(self, value: float, now: float, wall: float) -> None:
        """Compares a value with those before it.

        Args:
            value: the new one.
            now: seconds, monotonic.
            wall: Unix time.
        """
        if len(self.values) >= LEAST_PAST and now - self.renewed >= RENEWED and not self.above:
            self._renew(now)
        if value > self.limit:
            self.above += 1
            if self.above == 1:
                self.began = wall
            if self.above >= IN_A_ROW:
                if now - self.seen > HOLD:
                    self.since = self.began
                self.seen = now
        else:
            self.above = 0
        self.values.append(value)
        if self.above >= PAST // 2:
            self._renew(now)  # what lasts that long is the past by now
            self.above = 0

    def _renew(self, now: float) -> None:
        ordered = sorted(self.values)
        median = ordered[len(ordered) // 2]
        deviation = statistics.median(abs(value - median) for value in ordered)
        self.limit = median + max(DEVIATIONS * 1.4826 * deviation, median, self.least)
        self.renewed = now

    def active(self, now: float) -> bool:
        """Whether something stood out within the last `HOLD` seconds."""
        return now - self.seen <= HOLD


class AnomalyCollector:
    """Watches figures that other collectors have read already.

    Args:
        pod: the pod's processes.
        figures: what to watch, by the value of the label `signal`.
        clock: seconds, monotonic.
        wall: Unix time.
    """

    name = "anomaly"
    interval = 0.1

    def __init__(
        self,
        pod: Pod,
        figures: Mapping[str, Figure],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._pod = pod
        self._figures = figures
        self._clock = clock
        self._wall = wall
        self._pasts: dict[tuple[str, str], Past] = {}
        self._before: dict[tuple[str, str], tuple[float, float]] = {}

    def sample(self) -> None:
        """Looks at the latest values."""
        now, wall = self._clock(), self._wall()
        ranks = {rank.rank for rank in self._pod.view.ranks}
        for gone in [key for key in self._before if key[1] not in ranks]:
            del self._before[gone]
            self._pasts.pop(gone, None)
        for signal, figure in self._figures.items():
            for rank, (value, when) in figure.read().items():
                if rank in ranks:
                    self._take(signal, rank, (value, when), now, wall)

    def _take(
        self, signal: str, rank: str, latest: tuple[float, float], now: float, wall: float
    ) -> None:
        figure, key = self._figures[signal], (signal, rank)
        value, when = latest
        before = self._before.get(key)
        if before is None:
            self._before[key] = latest
            return
        elapsed = when - before[1]
        if elapsed <= 0 or elapsed < figure.span - 0.05:
            return
        self._before[key] = latest
        if figure.span:
            if value < before[0]:
                return  # counted from the beginning again
            value = (value - before[0]) / elapsed
        past = self._pasts.get(key)
        if past is None:
            past = self._pasts[key] = Past(figure.least)
        past.add(value, now, wall)

    def collect(self) -> Iterator[Metric]:
        """Yields whether each signal of a rank stood out lately, and since when."""
        node, now = self._pod.config.node, self._clock()
        labels = ["rank", "node", "job", "signal"]
        active = GaugeMetricFamily(
            "kitty_anomaly",
            "1 when the signal of the rank was far above its own last half minute, and for 35 s"
            " after that.",
            labels=labels,
        )
        since = GaugeMetricFamily(
            "kitty_anomaly_since_timestamp_seconds",
            "Unix time, by the node's clock, at which the signal was last found to leave its past.",
            labels=labels,
        )
        jobs = {rank.rank: rank.job for rank in self._pod.view.ranks}
        for (signal, rank), past in tuple(self._pasts.items()):
            if rank in jobs and past.limit != float("inf"):
                row = [rank, node, jobs[rank], signal]
                active.add_metric(row, float(past.active(now)))
                if past.since is not None:
                    since.add_metric(row, past.since)
        yield from (active, since)
