"""What each rank's whole tree of processes did: the kitty_rank_* families.

The reference's proc_* rows are those of the rank's process alone; data-loader workers and other
helpers do a good part of a rank's work, and of its waiting.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sidecar.collectors.process import STATES, folded_state
from sidecar.sources.procfs import TICKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from sidecar.attribution import Rank
    from sidecar.pod import Pod
    from sidecar.sources.maps import MapTable
    from sidecar.sources.trees import TreeTable, TreeUsage

LABELS = ("rank", "node", "job")
PAGE = os.sysconf("SC_PAGE_SIZE")
LONGEST = 6.0
"""Seconds: what one look at the workers' states can stand for."""

COUNTERS = {
    "kitty_rank_cpu_seconds": "CPU time of the rank's processes, ended ones included.",
    "kitty_rank_io_read_bytes": "Bytes that the rank's processes had read from storage.",
    "kitty_rank_io_write_bytes": "Bytes that the rank's processes had written to storage.",
    "kitty_rank_io_requested_read_bytes": "Bytes that the rank's processes got from files of any"
    " kind: from storage, the page cache, network file systems, pipes.",
    "kitty_rank_io_wait_seconds": "Time that threads of the rank waited for a block device.",
    "kitty_rank_worker_device_wait_seconds": "Time that processes below the rank's own were seen to"
    " wait for a device (state D), summed over processes; looked at every second.",
    "kitty_rank_run_queue_delay_seconds": "Time that threads of the rank could run but waited for"
    " a CPU, summed over threads.",
}
GAUGES = {
    "kitty_rank_threads": "Threads of the rank's processes.",
    "kitty_rank_resident_memory_bytes": "Resident memory of the rank's processes; a page that"
    " several share counts for each.",
    "kitty_rank_proportional_memory_bytes": "Resident memory of the rank's processes; a page that"
    " several share counts once. Each process is read every 30 s at the soonest.",
    "kitty_rank_last_read_timestamp_seconds": "Unix time at which the rank was last seen to have"
    " read from storage.",
    "kitty_rank_misplaced_memory_ratio": "Share of the memory of the rank's process on NUMA nodes"
    " that none of its CPUs belongs to, 0 to 1.",
    "kitty_rank_allowed_cpus": "CPUs that the rank's process may use.",
}


@dataclass(frozen=True, slots=True)
class _Row:
    labels: tuple[str, ...]
    minor_faults: int
    major_faults: int
    workers: Mapping[str, int]
    values: dict[str, float]


class RankCollector:
    """Sums up stat, io and the threads' schedstat of the processes of each rank."""

    name = "rank"
    interval = 1.0

    def __init__(
        self,
        pod: Pod,
        trees: TreeTable,
        maps: MapTable,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pod = pod
        self._trees = trees
        self._maps = maps
        self._clock = clock
        self._looked: float | None = None
        self._waited: dict[str, float] = {}
        self._latest: tuple[_Row, ...] = ()

    def sample(self) -> None:
        """Reads once; a file that is denied leaves its rows out."""
        self._trees.refresh()
        now = self._clock()
        span = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        self._waited = {
            rank: self._waited.get(rank, 0.0)
            + (usage.workers.get("D", 0) * span if span <= LONGEST else 0.0)
            for rank, usage in self._trees.ranks.items()
        }
        self._latest = tuple(
            self._row(rank, self._trees.ranks[rank.rank])
            for rank in self._pod.view.ranks
            if rank.rank in self._trees.ranks
        )

    def _row(self, rank: Rank, usage: TreeUsage) -> _Row:
        counts = usage.counts
        values: dict[str, float | None] = {
            "kitty_rank_cpu_seconds": counts.ticks / TICKS,
            "kitty_rank_worker_device_wait_seconds": self._waited[rank.rank],
            "kitty_rank_threads": usage.threads,
            "kitty_rank_resident_memory_bytes": usage.rss_pages * PAGE,
            **self._memory(rank),
        }
        if usage.io_known:
            values["kitty_rank_io_read_bytes"] = counts.read_bytes
            values["kitty_rank_io_write_bytes"] = counts.written_bytes
            values["kitty_rank_io_requested_read_bytes"] = counts.requested_bytes
            values["kitty_rank_last_read_timestamp_seconds"] = usage.last_read
        if usage.run_queue_delay is not None:
            values["kitty_rank_run_queue_delay_seconds"] = usage.run_queue_delay / 1e9
        if usage.block_delay is not None:
            values["kitty_rank_io_wait_seconds"] = usage.block_delay / TICKS
        workers = dict.fromkeys(STATES, 0)
        for letter, count in usage.workers.items():
            state = folded_state(letter)
            workers[state] = workers.get(state, 0) + count
        return _Row(
            labels=(rank.rank, self._pod.config.node, rank.job),
            minor_faults=counts.minor_faults,
            major_faults=counts.major_faults,
            workers=workers,
            values={k: v for k, v in values.items() if v is not None},
        )

    def _memory(self, rank: Rank) -> dict[str, float | None]:
        known, stats = self._maps.processes, self._pod.stats
        shares = [
            known[pid].proportional if pid in known else None
            for pid in rank.members
            if pid in stats and stats[pid].state != "Z"
        ]
        head = known.get(rank.heads[0]) if rank.heads else None
        return {
            # A sum without one of the processes would look like memory that was given back.
            "kitty_rank_proportional_memory_bytes": None
            if None in shares
            else sum(share or 0 for share in shares),
            "kitty_rank_misplaced_memory_ratio": head.misplaced if head else None,
            "kitty_rank_allowed_cpus": head.allowed_cpus if head else None,
        }

    def collect(self) -> Iterator[Metric]:
        """Yields the sums over each rank's tree."""
        rows = self._latest
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for row in rows:
                if name in row.values:
                    counter.add_metric(row.labels, row.values[name])
            yield counter
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for row in rows:
                if name in row.values:
                    gauge.add_metric(row.labels, row.values[name])
            yield gauge
        faults = CounterMetricFamily(
            "kitty_rank_page_faults",
            "Page faults of the rank's processes: minor, or major ones that waited for storage.",
            labels=[*LABELS, "kind"],
        )
        workers = GaugeMetricFamily(
            "kitty_rank_workers",
            "Processes below the rank's own, such as data-loader workers, by state.",
            labels=[*LABELS, "state"],
        )
        for row in rows:
            faults.add_metric([*row.labels, "minor"], row.minor_faults)
            faults.add_metric([*row.labels, "major"], row.major_faults)
            for state, count in row.workers.items():
                workers.add_metric([*row.labels, state], count)
        yield from (faults, workers)
