"""What each rank's tree of processes used, those that ended included.

A data-loader worker that ends must not make a counter of its rank fall, and one that lived
shorter than a round should count too. The kernel adds what a child used to its parent's record
when the parent waits for it (kernel/exit.c, wait_task_zombie), so the sum over the living tells
nearly all; what is kept here are those that nobody of the tree waited for.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sidecar.sources.errors import MalformedError
from sidecar.sources.procfs import Io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sidecar.attribution import PodView, Rank
    from sidecar.sources.delays import DelayTable
    from sidecar.sources.procfs import ProcFS, Stat

PATIENCE = 2
"""Rounds in which a process that ended may turn up in its parent's record: the parent was read
a moment before the child, and need not wait for it at once."""


class Counts(NamedTuple):
    """What a process used, with those of its children that it waited for.

    Attributes:
        ticks: CPU time in clock ticks.
        minor_faults: page faults without a read.
        major_faults: page faults that waited for storage.
        requested_bytes: asked of read(2) and its kin, from any kind of file.
        read_bytes: fetched from storage.
        written_bytes: sent to storage.
    """

    ticks: int
    minor_faults: int
    major_faults: int
    requested_bytes: int
    read_bytes: int
    written_bytes: int


NONE = Counts(0, 0, 0, 0, 0, 0)
NO_IO = Io(rchar=0, read_bytes=0, write_bytes=0)


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """What one rank's tree used. None: not known here.

    Attributes:
        counts: only ever grow.
        io_known: whether the bytes of all processes could be read.
        last_read: Unix time at which the tree was last seen to have read from storage.
        run_queue_delay: nanoseconds that threads waited for a CPU.
        block_delay: clock ticks that threads waited for a block device.
        threads: of all processes.
        rss_pages: resident memory; pages shared by processes count for each.
        workers: processes below the rank's own, by state letter.
    """

    counts: Counts
    io_known: bool
    last_read: float | None
    run_queue_delay: int | None
    block_delay: int | None
    threads: int
    rss_pages: int
    workers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Record:
    """One process as of its latest reading."""

    pid: int
    start: int
    ppid: int
    rank: str
    counts: Counts
    waited_faults: int
    """Minor faults of children waited for. Every process takes some: they tell a wait."""


@dataclass(slots=True)
class _Ledger:
    counts: Counts = NONE
    left: Counts = NONE
    """Of processes that ended and that nobody of the tree waited for."""
    begun: bool = False
    last_read: float | None = None
    run_queue_delay: int | None = None
    block_delay: int | None = None


@dataclass(slots=True)
class _Gauges:
    threads: int = 0
    rss_pages: int = 0
    workers: Counter[str] = field(default_factory=Counter)
    io_known: bool = True


class TreeTable:
    """Sums up the ranks' processes and keeps what ended ones had counted.

    Args:
        procfs: where to read.
        delays: the waiting of threads.
        view: returns the pod's processes.
        stats: returns the stat of each as of the same reading.
        clock: Unix time.
    """

    def __init__(
        self,
        procfs: ProcFS,
        delays: DelayTable,
        *,
        view: Callable[[], PodView],
        stats: Callable[[], Mapping[int, Stat]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._procfs = procfs
        self._delays = delays
        self._view = view
        self._stats = stats
        self._clock = clock
        self._records: dict[int, _Record] = {}
        self._ended: list[tuple[_Record, int]] = []
        self._waited_before: dict[int, int] = {}
        self._ledgers: dict[str, _Ledger] = {}
        self._round = 0
        self.ranks: Mapping[str, TreeUsage] = {}

    def refresh(self) -> None:
        """Reads once; `ranks` is then new, by rank text."""
        self._round += 1
        view, stats = self._view(), self._stats()
        ledgers = {rank.rank: self._ledgers.get(rank.rank) or _Ledger() for rank in view.ranks}
        records: dict[int, _Record] = {}
        gauges = {rank.rank: self._read(rank, stats, records) for rank in view.ranks}
        self._settle(records, ledgers)
        self._add(records, ledgers)
        self._records, self._ledgers = records, ledgers
        self._count_delays()
        self.ranks = {name: _usage(ledgers[name], g) for name, g in gauges.items()}

    def _read(self, rank: Rank, stats: Mapping[int, Stat], records: dict[int, _Record]) -> _Gauges:
        gauges = _Gauges()
        present = [(stats[pid].start_ticks, pid) for pid in rank.members if pid in stats]
        # Parents first: a child that is still there afterwards is not in its parent's record.
        for _, pid in sorted(present):
            stat = self._after_parent(pid, stats[pid])
            if stat is None:
                continue
            try:
                io = self._procfs.io(pid)
            except (PermissionError, MalformedError):
                gauges.io_known, io = False, NO_IO
            except OSError:
                continue  # gone, and its parent's record may have it already
            gauges.threads += stat.threads
            gauges.rss_pages += stat.rss_pages
            if pid not in rank.heads:
                gauges.workers[stat.state] += 1
            records[pid] = _record(stat, io, pid=pid, rank=rank.rank)
        return gauges

    def _after_parent(self, pid: int, stat: Stat) -> Stat | None:
        # All were read in the order of their pids, which begin again at the largest.
        if pid > stat.ppid:
            return stat
        try:
            again = self._procfs.stat(pid)
        except (OSError, MalformedError):
            return None
        return again if again.start_ticks == stat.start_ticks else None

    def _settle(self, records: Mapping[int, _Record], ledgers: Mapping[str, _Ledger]) -> None:
        """Finds for each process that ended whether its parent's record has it now."""
        gone = {pid: r for pid, r in self._records.items() if not _same(r, records.get(pid))}
        self._ended.extend((record, self._round) for record in gone.values())
        known = {**self._records, **{record.pid: record for record, _ in self._ended}}
        by_parent: dict[int | None, list[tuple[_Record, int]]] = {}
        for ended in self._ended:
            above = next((pid for pid in _above(ended[0], known) if pid in records), None)
            by_parent.setdefault(above, []).append(ended)
        waited_before: dict[int, int] = {}
        self._ended = []
        for parent, below in by_parent.items():
            base = waited = 0
            if parent is not None:
                before = self._records.get(parent, records[parent]).waited_faults
                base = self._waited_before.get(parent, before)
                waited = records[parent].waited_faults - base
            # One that nobody waits for must not hide that the parent has the others.
            for record, since in sorted(below, key=lambda ended: -ended[0].counts.minor_faults):
                faults = record.counts.minor_faults
                if 0 < faults <= waited:
                    waited -= faults
                    base += faults
                elif parent is not None and self._round - since < PATIENCE:
                    waited_before[parent] = base
                    self._ended.append((record, since))
                elif record.rank in ledgers:
                    ledger = ledgers[record.rank]
                    ledger.left = _plus(ledger.left, record.counts)
            if parent is not None and parent in waited_before:
                waited_before[parent] = base
        self._waited_before = waited_before

    def _add(self, records: Mapping[int, _Record], ledgers: Mapping[str, _Ledger]) -> None:
        sums = {name: ledger.left for name, ledger in ledgers.items()}
        for record in records.values():
            sums[record.rank] = _plus(sums[record.rank], record.counts)
        for name, ledger in ledgers.items():
            grown = Counts._make(map(max, ledger.counts, sums[name]))
            if ledger.begun and grown.read_bytes > ledger.counts.read_bytes:
                ledger.last_read = self._clock()
            ledger.counts, ledger.begun = grown, True

    def _count_delays(self) -> None:
        processes = [(pid, record.start) for pid, record in self._records.items()]
        for pid, delay in self._delays.read(processes):
            ledger = self._ledgers[self._records[pid].rank]
            ledger.run_queue_delay = _known_sum(ledger.run_queue_delay, delay.run_queue)
            ledger.block_delay = _known_sum(ledger.block_delay, delay.block)


def _usage(ledger: _Ledger, gauges: _Gauges) -> TreeUsage:
    return TreeUsage(
        counts=ledger.counts,
        io_known=gauges.io_known,
        last_read=ledger.last_read,
        run_queue_delay=ledger.run_queue_delay,
        block_delay=ledger.block_delay,
        threads=gauges.threads,
        rss_pages=gauges.rss_pages,
        workers=gauges.workers,
    )


def _record(stat: Stat, io: Io, *, pid: int, rank: str) -> _Record:
    return _Record(
        pid=pid,
        start=stat.start_ticks,
        ppid=stat.ppid,
        rank=rank,
        counts=Counts(
            ticks=stat.user_ticks + stat.system_ticks + stat.child_ticks,
            minor_faults=stat.minor_faults + stat.child_minor_faults,
            major_faults=stat.major_faults + stat.child_major_faults,
            requested_bytes=io.rchar,
            read_bytes=io.read_bytes,
            written_bytes=io.write_bytes,
        ),
        waited_faults=stat.child_minor_faults,
    )


def _same(before: _Record, now: _Record | None) -> bool:
    return now is not None and now.start == before.start


def _above(record: _Record, known: Mapping[int, _Record]) -> Iterator[int]:
    passed: set[int] = set()
    above: _Record | None = record
    while above is not None and above.ppid not in passed:
        yield above.ppid
        passed.add(above.ppid)
        above = known.get(above.ppid)


def _plus(a: Counts, b: Counts) -> Counts:
    return Counts._make(x + y for x, y in zip(a, b, strict=True))


def _known_sum(total: int | None, grown: int | None) -> int | None:
    return total if grown is None else (total or 0) + grown
