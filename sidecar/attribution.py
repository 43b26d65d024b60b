"""Which rank each process of the pod belongs to.

Launchers and data-loader workers inherit the variables of the processes around them, so a
variable alone says little; the tree of processes decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sidecar.config import Config
    from sidecar.sources.processes import Process


@dataclass(frozen=True, slots=True)
class Rank:
    """The processes that count towards one rank of the pod.

    Attributes:
        rank: decimal text; empty where no rank is known.
        job: the job that its processes name.
        heads: the processes that have per-pid series: the rank's topmost watched process, or,
            where no process of the pod carries a rank, each container's.
        members: all processes of the rank's trees, heads included.
    """

    rank: str
    job: str
    heads: tuple[int, ...]
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PodView:
    """The pod as of one reading of its processes.

    Attributes:
        job: the pod's own job.
        ranks: in the order of their numbers.
        processes: every process of the pod but the agent's, by pid.
        watched: pids of the processes that training runs in, launchers included.
        rank_of: the rank of each process that belongs to one.
    """

    job: str = ""
    ranks: tuple[Rank, ...] = ()
    processes: Mapping[int, Process] = field(default_factory=dict)
    watched: frozenset[int] = frozenset()
    rank_of: Mapping[int, Rank] = field(default_factory=dict)


def attribute(processes: Iterable[Process], config: Config, *, own_container: str = "") -> PodView:
    """Tells ranks, launchers and their trees apart.

    Args:
        processes: the pod's, without the agent.
        config: for the pod's own job and rank.
        own_container: the agent's cgroup path; two processes of one container count together
            only where containers can be told apart from the agent's.
    """
    table = {process.pid: process for process in processes}
    watched = _watched(table, own_container)
    tops = _tops_by_rank(table, watched)
    carried = bool(tops)
    if not carried and watched:
        tops = {config.rank: _tops_by_container(table, watched)}
    members = _members(tops, table)
    if not carried and watched:
        members[config.rank] = sorted(watched.union(members[config.rank]))
    job = _pod_job(table, watched, config)
    ranks = tuple(
        Rank(
            rank=rank,
            job=_process_job(table[pids[0]], config) or job,
            # Of several trees of one rank (a helper beside the trainer) the oldest is the rank's.
            heads=tuple(pids[:1] if carried else pids),
            members=tuple(members[rank]),
        )
        for rank, pids in sorted(tops.items(), key=lambda item: int(item[0] or -1))
    )
    return PodView(
        job=job,
        ranks=ranks,
        processes=table,
        watched=frozenset(watched),
        rank_of={pid: rank for rank in ranks for pid in rank.members},
    )


def _watched(table: Mapping[int, Process], own_container: str) -> set[int]:
    said = {pid for pid, process in table.items() if process.watch}
    others = _containers_processes(table, own_container)
    if others and not said and not any(table[pid].environ_readable for pid in others):
        return others
    # sshd, srun and others start ranks with a clean environment: what runs below a watched
    # process, or in a watched container, is watched unless it says otherwise.
    containers = {table[pid].container for pid in said} - {own_container, ""}
    return {
        pid
        for pid, process in table.items()
        if pid in said
        or (
            process.watch is None and (process.container in containers or _inherits(process, table))
        )
    }


def _inherits(process: Process, table: Mapping[int, Process]) -> bool:
    for above in _ancestors(process, table):
        if above.watch is not None:
            return above.watch
    return False


def _containers_processes(table: Mapping[int, Process], own_container: str) -> set[int]:
    # All but the pause process and the agent's container: where none of these can be read, it is
    # what trains.
    return {
        pid
        for pid, process in table.items()
        if pid != 1 and (process.container != own_container or not own_container)
    }


def _ancestors(process: Process, table: Mapping[int, Process]) -> Iterator[Process]:
    """Yields parent, grandparent and so on; ends also where a reused pid closes a circle."""
    passed = {process.pid}
    above = table.get(process.ppid)
    while above is not None and above.pid not in passed:
        yield above
        passed.add(above.pid)
        above = table.get(above.ppid)


def _topmost(pids: set[int], table: Mapping[int, Process]) -> list[int]:
    """Returns those without one of their kind above them, oldest first; never none of some."""
    oldest_first = sorted(pids, key=lambda pid: (table[pid].start, pid))
    tops = [
        pid
        for pid in oldest_first
        if not any(above.pid in pids for above in _ancestors(table[pid], table))
    ]
    return tops or oldest_first[:1]


def _tops_by_rank(table: Mapping[int, Process], watched: set[int]) -> dict[str, list[int]]:
    carriers = {pid for pid in watched if table[pid].rank is not None}
    launchers = set()
    for pid in carriers:
        process = table[pid]
        for above in _ancestors(process, table):
            if (above.rank, above.launched) != (process.rank, process.launched):
                launchers.add(above.pid)
    by_rank: dict[str, set[int]] = {}
    for pid in carriers - launchers:
        by_rank.setdefault(table[pid].rank or "", set()).add(pid)
    return {rank: _topmost(_meant(pids, table), table) for rank, pids in by_rank.items()}


def _meant(pids: set[int], table: Mapping[int, Process]) -> set[int]:
    # srun's tasks are not below the batch script, which has the number of the first of them.
    launched = max(table[pid].launched for pid in pids)
    return {pid for pid in pids if table[pid].launched == launched}


def _tops_by_container(table: Mapping[int, Process], watched: set[int]) -> list[int]:
    tops: dict[str, int] = {}
    for pid in _topmost(watched, table):
        tops.setdefault(table[pid].container, pid)
    return list(tops.values())


def _members(tops: Mapping[str, list[int]], table: Mapping[int, Process]) -> dict[str, list[int]]:
    rank_of = {pid: rank for rank, pids in tops.items() for pid in pids}
    members: dict[str, list[int]] = {rank: [] for rank in tops}
    for pid, process in sorted(table.items()):
        rank = rank_of.get(pid)
        if rank is None:
            rank = next(
                (rank_of[a.pid] for a in _ancestors(process, table) if a.pid in rank_of), None
            )
        if rank is not None:
            members[rank].append(pid)
    return members


def _process_job(process: Process, config: Config) -> str:
    if config.pod and config.job:
        return config.job
    jobs = dict(process.jobs)
    if not config.pod and "JOB_NAME" in jobs:
        return jobs["JOB_NAME"]
    return jobs.get("TORCHELASTIC_RUN_ID") or jobs.get("SLURM_JOB_ID") or config.job


def _pod_job(table: Mapping[int, Process], watched: set[int], config: Config) -> str:
    for pid in sorted(watched, key=lambda pid: (table[pid].start, pid)):
        job = _process_job(table[pid], config)
        if job:
            return job
    return config.job
