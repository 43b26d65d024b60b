"""What each rank's process waits for, looked at ten times a second: kitty_rank_wait_seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily

from sidecar.sources.waiting import DEVICE, PIPE, STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from sidecar.attribution import Rank
    from sidecar.pod import Pod
    from sidecar.sources.waiting import WaitReader

LONGEST = 1.0
"""Seconds: what one look can stand for; the time of a longer gap is nobody's."""


class WaitingCollector:
    """Looks at the first process of each rank.

    Args:
        pod: the pod's processes.
        reader: looks at one.
        clock: seconds, monotonic.
    """

    name = "waiting"
    interval = 0.1

    def __init__(
        self, pod: Pod, reader: WaitReader, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pod = pod
        self._reader = reader
        self._clock = clock
        self._looked: float | None = None
        self._ranks: tuple[Rank, ...] = ()
        self._waited: dict[str, dict[str, float]] = {}

    def sample(self) -> None:
        """Looks once."""
        now = self._clock()
        span = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        ranks = self._pod.view.ranks
        if ranks is not self._ranks:
            self._ranks = ranks
            self._reader.keep(rank.heads[0] for rank in ranks if rank.heads)
            kept = {rank.rank: self._waited.get(rank.rank, {}) for rank in ranks}
            self._waited = kept
        for rank in ranks:
            if rank.heads:
                self._look(rank, span if span <= LONGEST else 0.0)

    def _look(self, rank: Rank, span: float) -> None:
        pid, waited = rank.heads[0], self._waited[rank.rank]
        try:
            found = self._reader.look(pid)
        except (OSError, ValueError):
            return  # gone
        known = (STOPPED, DEVICE, PIPE) if self._reader.sees_calls(pid) else (STOPPED, DEVICE)
        for name in known:
            waited[name] = waited.get(name, 0.0) + (span if found == name else 0.0)

    def stopped(self) -> dict[str, tuple[float, float]]:
        """Returns the seconds in which each rank was seen stopped so far, as of when."""
        looked = self._looked or 0.0
        return {
            name: (waited[STOPPED], looked)
            for name, waited in tuple(self._waited.items())
            if STOPPED in waited
        }

    def collect(self) -> Iterator[Metric]:
        """Yields the time seen waiting, by what for."""
        family = CounterMetricFamily(
            "kitty_rank_wait_seconds",
            "Time in which the rank's process was seen stopped, waiting for a device or for a pipe,"
            " as those do that wait for a data loader; looked at every 100 ms.",
            labels=["rank", "node", "job", "on"],
        )
        waits = self._waited
        for rank in self._pod.view.ranks:
            for name, seconds in tuple(waits.get(rank.rank, {}).items()):
                family.add_metric([rank.rank, self._pod.config.node, rank.job, name], seconds)
        yield family
