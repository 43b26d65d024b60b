"""Which GPUs are the pod's, and which rank's.

Nothing of another pod may be served, and no single source tells: each below is right in some
clusters and wrong in others, so they are asked in the order of what they prove.

- `processes`: the driver lists a process of the pod on the GPU. Drivers before 535.113 list the
  machine's pids, later ones those of the caller's PID namespace; which of both is seen from the
  pids themselves.
- `environment`: a watched process's NVIDIA_VISIBLE_DEVICES names the GPU. `all`, `none`, `void`
  and an unset variable say nothing: images set the first, CDI any of the others.
- `descriptors`: a process of the pod holds /dev/nvidiaN. A privileged container can open the
  whole node's, so there it proves nothing; and a process that is listed on one GPU has opened
  the others only to look at them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.sources.descriptors import descriptors
from sidecar.sources.files import read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sidecar.attribution import PodView, Rank
    from sidecar.sources.gpu import Gpu, GpuProcess

CAP_SYS_RAWIO = 17
"""A capability that a container has only where it is privileged (capabilities(7))."""
WALK_EVERY = 10.0
"""Seconds between two walks of the same process's descriptors, once it is old enough."""
STRANGERS = 3
"""Rounds in a row with pids that nobody has here, after which the lists count the machine's."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Device nodes that one process may use.

    Attributes:
        paths: those of GPUs that it holds; None where the kernel denies to look.
        privileged: its container may open any device of the machine.
    """

    paths: frozenset[str] | None
    privileged: bool = False


@dataclass(frozen=True, slots=True)
class _Walk:
    """What one walk found, when the process was first looked at, when the next one is due."""

    devices: Devices
    first: float
    due: float


@dataclass(frozen=True, slots=True)
class Owner:
    """Why a GPU is the pod's.

    Attributes:
        by: the source that said so: processes, environment or descriptors.
        pids: the pod's processes that the driver lists on it.
        rank: the one rank that uses it, None where there are several or none is known.
        pid: the one process that does, the rank's head where that is among them.
    """

    by: str
    pids: tuple[int, ...] = ()
    rank: Rank | None = None
    pid: int | None = None


class DeviceTable:
    """The device nodes that processes hold, walked again now and then only.

    Args:
        root: where /proc is.
        clock: monotonic seconds.
    """

    def __init__(self, root: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._known: dict[tuple[int, int], _Walk] = {}

    def walk(self, view: PodView, listed: set[int], nodes: frozenset[str]) -> dict[int, Devices]:
        """Returns which of `nodes` the pod's watched and `listed` processes hold."""
        now = self._clock()
        known: dict[tuple[int, int], _Walk] = {}
        for pid in sorted((view.watched | view.rank_of.keys() | listed) & view.processes.keys()):
            key = (pid, view.processes[pid].start)
            walk = self._known.get(key)
            if walk is None or now >= walk.due or (pid in listed and not walk.devices.paths):
                walk = self._again(walk, pid, nodes, now)
            known[key] = walk
        self._known = known
        return {pid: walk.devices for (pid, _), walk in known.items()}

    def _again(self, before: _Walk | None, pid: int, nodes: frozenset[str], now: float) -> _Walk:
        devices = self._look(pid, nodes)
        first = before.first if before else now
        # A young process is about to open its GPU; one that is old and has none will not.
        pause = WALK_EVERY if devices.paths else min(WALK_EVERY, max(1.0, now - first))
        return _Walk(devices, first=first, due=now + pause)

    def alive(self, pid: int) -> bool:
        """Returns whether the agent's PID namespace has such a process."""
        return os.path.exists(f"{self._root}/{pid}")

    def _look(self, pid: int, nodes: frozenset[str]) -> Devices:
        try:
            held = descriptors(pid, self._root).devices
            status = read(f"{self._root}/{pid}/status")
        except PermissionError:
            return Devices(None)
        except OSError:
            return Devices(frozenset())
        return Devices(held & nodes, privileged=_privileged(status))


def _privileged(status: bytes) -> bool:
    """Tells by the bounding set in /proc/<pid>/status: `CapBnd: 000001ffffffffff`."""
    at = status.find(b"\nCapBnd:")
    if at < 0:
        return False
    return bool(int(status[at + 8 : at + 40].split()[0], 16) >> CAP_SYS_RAWIO & 1)


class Numbering:
    """Decides whether the driver's lists hold pids of the agent's own PID namespace.

    A translated list leaves other processes out, so pids that nobody has here show the machine's
    numbers. A process that lived for a moment only looks the same, for a few rounds.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._strange = 0
        self._trusted = False

    def ours(self, pids: set[int], alive: Callable[[int], bool]) -> bool:
        """Takes the pids of all lists of a round; returns whether to believe them."""
        here = {pid for pid in pids if alive(pid)}
        strangers = pids - here - self._seen
        self._seen = here | (self._seen & pids)
        if not strangers or len(strangers) <= len(self._seen):
            self._strange = 0
            self._trusted = self._trusted or bool(here)
            return True
        self._strange += 1
        if self._strange >= STRANGERS:
            self._trusted = False
        return self._trusted


def attribute_gpus(
    gpus: Sequence[Gpu],
    listed: Mapping[str, Sequence[GpuProcess] | None],
    view: PodView,
    held: Mapping[int, Devices],
) -> dict[str, Owner]:
    """Tells the pod's GPUs from the others.

    Args:
        gpus: all of the node.
        listed: the driver's lists, by uuid; None where there is none to believe.
        view: the pod's processes.
        held: their device nodes.

    Returns:
        The pod's, by uuid.
    """
    tellable = any(gpu.nodes for gpu in gpus)
    lists = {
        uuid: _listed(rows or (), view, held if tellable else {}) for uuid, rows in listed.items()
    }
    busy = {pid for pids in lists.values() for pid in pids}
    named = _named(gpus, view)
    owners = {}
    for gpu in gpus:
        pids = lists.get(gpu.uuid, ())
        holders = [pid for pid, devices in held.items() if gpu.nodes & (devices.paths or set())]
        if pids:
            rank, pid = _user(pids, view)
            owners[gpu.uuid] = Owner("processes", pids, rank, pid)
        elif gpu.uuid in named:
            users = [pid for pid in holders if pid not in busy]
            owners[gpu.uuid] = Owner("environment", (), *_holder(users, view))
        elif proven := [
            pid
            for pid in holders
            if pid not in busy and not _words(view, pid) and not held[pid].privileged
        ]:
            owners[gpu.uuid] = Owner("descriptors", (), *_holder(proven, view))
    return owners


def _listed(
    rows: Sequence[GpuProcess], view: PodView, held: Mapping[int, Devices]
) -> tuple[int, ...]:
    """Returns the pod's pids of a list; one that holds no GPU is another's by chance the same."""
    pids = {row.pid for row in rows if row.pid in view.processes}
    return tuple(sorted(p for p in pids if p not in held or held[p].paths != frozenset()))


def _named(gpus: Sequence[Gpu], view: PodView) -> set[str]:
    """Returns the uuids that watched processes' environments name."""
    words = {word for pid in view.watched for word in _words(view, pid)}
    return {gpu.uuid for gpu in gpus if gpu.names & words}


def _words(view: PodView, pid: int) -> set[str]:
    """Returns the GPUs that a process's NVIDIA_VISIBLE_DEVICES names, in lower case."""
    text = view.processes[pid].visible_devices or ""
    words = {word.strip().lower() for word in text.split(",")} - {"", "all", "none", "void"}
    # A folder: the device plugin's "volume-mounts" strategy keeps the list elsewhere.
    return set() if text.startswith("/") else words


def _user(pids: Sequence[int], view: PodView) -> tuple[Rank | None, int | None]:
    ranks = {view.rank_of[pid].rank: view.rank_of[pid] for pid in pids if pid in view.rank_of}
    outside = [pid for pid in pids if pid not in view.rank_of]
    rank = next(iter(ranks.values())) if len(ranks) == 1 and not outside else None
    head = next((pid for pid in pids if rank is not None and pid in rank.heads), None)
    if head is None and len(pids) == 1:
        head = pids[0]
    return rank, head


def _holder(pids: Sequence[int], view: PodView) -> tuple[Rank | None, int | None]:
    """Returns rank and process that alone hold the device; in a pod of one rank all are its."""
    ranked = [pid for pid in pids if pid in view.rank_of]
    if ranked:
        return _user(ranked, view)
    return (view.ranks[0] if len(view.ranks) == 1 else None), None
