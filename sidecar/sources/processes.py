"""The processes of the pod: which there are, and what their environments say of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.config import label_text, rank_text
from sidecar.sources.errors import MalformedError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sidecar.sources.procfs import ProcFS, Stat

RANK_VARIABLES = (
    "RANK",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "JAX_PROCESS_ID",
    "SLURM_PROCID",
)
"""Where a launcher tells a process its rank, first that is there."""
NAMES = tuple(
    name.encode()
    for name in (
        "KITTY_WATCH",
        "JOB_NAME",
        "TORCHELASTIC_RUN_ID",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "LOCAL_RANK",
        "NVIDIA_VISIBLE_DEVICES",
        *RANK_VARIABLES,
    )
)
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the machine's own PID namespace (include/linux/proc_ns.h, PROC_PID_INIT_INO)."""
SLICES = 20
"""Rounds in which every process known to be another pod's is looked at again."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the pod, as of its latest exec.

    Attributes:
        start: start time in clock ticks since boot; with the pid it names the process for good.
        container: cgroup path, the same for all processes of a container.
        environ_readable: False where the kernel denied it, and the variables are unknown.
        watch: True for KITTY_WATCH=1, False for any other value, None where it is not set.
        rank: of its own environment; None where it has none.
        launched: 1 for a task of srun, 2 for a worker of torchrun, else 0. Of equal ranks the
            larger one is meant: an agent may have its worker's, a batch script that of a task.
        jobs: JOB_NAME, TORCHELASTIC_RUN_ID, SLURM_JOB_ID as far as they are set.
        visible_devices: NVIDIA_VISIBLE_DEVICES, None where it is not set.
    """

    pid: int
    ppid: int
    start: int
    container: str
    environ_readable: bool = True
    watch: bool | None = None
    rank: str | None = None
    launched: int = 0
    jobs: tuple[tuple[str, str], ...] = ()
    visible_devices: str | None = None


def uid_marks(pod_uid: str) -> tuple[str, str]:
    """Returns what one component of the path of a pod's cgroup holds, one of the two.

    The cgroupfs driver writes the uid as it is, the systemd driver with underscores.
    """
    return f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}"


def of_pod(container: str, pod_uid: str) -> bool:
    """Tells whether a cgroup path is that of one of the pod's containers.

    In a private cgroup namespace, whose top is the agent's own container, nothing above is named:
    the pod's other containers are then `/../x`, and those of other pods are further away.
    """
    parts = container.split("/")
    if parts[1:2] == [".."]:
        # Where the namespace's top is the pod, what is beside it are other pods.
        return len(parts) > 2 and not parts[2].startswith(("..", "pod", "kubepods"))
    return any(mark in container for mark in uid_marks(pod_uid))


class ProcessTable:
    """Keeps the pod's processes, reading of each only what can have changed.

    An environment is read once an exec, foreign processes (hostPID) are told apart by their
    cgroup and looked at again now and then only.

    Args:
        procfs: where to read.
        pod_uid: the pod's uid; with hostPID the mark of its cgroups.
        own_pid: the agent's own process, never part of the pod's.

    Attributes:
        stats: the stat of every process of the latest scan, by pid.
    """

    def __init__(self, procfs: ProcFS, *, pod_uid: str = "", own_pid: int | None = None) -> None:
        self._procfs = procfs
        self._own = os.getpid() if own_pid is None else own_pid
        self._pod_uid = pod_uid
        self._known: dict[int, tuple[tuple[int, ...], Process]] = {}
        self._foreign: set[int] = set()
        self._round = 0
        self.stats: Mapping[int, Stat] = {}
        self.own_container = self._container(self._own)
        self.scoped = bool(pod_uid) and self._host_pid()

    def scan(self) -> tuple[Process, ...]:
        """Reads /proc once.

        Returns:
            The pod's processes without the agent and its children, by pid.

        Raises:
            SourceError: /proc itself cannot be listed.
        """
        try:
            pids = self._procfs.pids()
        except OSError as e:
            raise SourceError(f"{self._procfs.root}: {e.strerror}") from e
        self._round += 1
        self._foreign.intersection_update(pids)
        found: dict[int, tuple[tuple[int, ...], Process]] = {}
        stats: dict[int, Stat] = {}
        for pid in sorted(pids):
            if pid in self._foreign and (
                pid % SLICES != self._round % SLICES
                or not of_pod(self._container(pid), self._pod_uid)
            ):
                continue
            try:
                stat = self._procfs.stat(pid)
            except (OSError, MalformedError):
                continue
            entry = self._look(pid, stat)
            if entry is not None:
                found[pid], stats[pid] = entry, stat
        self._known, self.stats = found, stats
        return tuple(self._without_own(process for _, process in found.values()))

    def _look(self, pid: int, stat: Stat) -> tuple[tuple[int, ...], Process] | None:
        key = (stat.start_ticks, stat.ppid, *stat.image)
        known = self._known.get(pid)
        if known is not None and known[0] == key:
            return known
        container = self._container(pid)
        if self.scoped and not of_pod(container, self._pod_uid):
            self._foreign.add(pid)
            return None
        self._foreign.discard(pid)
        if stat.state == "Z" and known is not None and known[0][0] == stat.start_ticks:
            return known
        return key, self._read(pid, stat.ppid, stat.start_ticks, container)

    def _read(self, pid: int, ppid: int, start: int, container: str) -> Process:
        try:
            env = self._procfs.environ(pid, NAMES)
        except OSError:
            return Process(
                pid=pid, ppid=ppid, start=start, container=container, environ_readable=False
            )
        return Process(
            pid=pid,
            ppid=ppid,
            start=start,
            container=container,
            watch=env["KITTY_WATCH"] == "1" if "KITTY_WATCH" in env else None,
            rank=_rank(env),
            launched=_launched(env),
            jobs=_jobs(env),
            visible_devices=env.get("NVIDIA_VISIBLE_DEVICES"),
        )

    def _container(self, pid: int | str) -> str:
        try:
            paths = self._procfs.cgroup(pid)
        except OSError:
            return ""
        for controller in ("memory", "cpu", "pids", ""):
            if controller in paths:
                return paths[controller]
        return ""

    def _host_pid(self) -> bool:
        try:
            return self._procfs.namespace("self", "pid") == INITIAL_PID_NAMESPACE
        except OSError:
            return False

    def _without_own(self, processes: Iterable[Process]) -> Iterator[Process]:
        own = {self._own}
        for process in processes:
            if process.pid in own or process.ppid in own:
                own.add(process.pid)
            else:
                yield process


def _rank(env: Mapping[str, str]) -> str | None:
    for name in RANK_VARIABLES:
        if name in env:
            try:
                return rank_text(env[name])
            except ValueError:
                continue
    return None


def _launched(env: Mapping[str, str]) -> int:
    if "LOCAL_RANK" in env and "TORCHELASTIC_RUN_ID" in env:
        return 2
    return 1 if "SLURM_STEP_ID" in env else 0


def _jobs(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    jobs = []
    for name in ("JOB_NAME", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        text = env.get(name, "")
        try:
            if label_text(text) and not (name == "TORCHELASTIC_RUN_ID" and text == "none"):
                jobs.append((name, text))
        except ValueError:
            continue
    return tuple(jobs)
