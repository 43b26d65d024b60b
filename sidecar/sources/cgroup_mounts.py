"""Finds the directory of a process's control group.

/proc/<pid>/cgroup names a path, and where that is depends on who looks: in a private cgroup
namespace the agent's own mount ends at its own container, and the trainer's group is `/../x`.
The trainer's mount then has it. Both the paths and the roots of mounts are told as the reader's
namespace sees them (cgroup_namespaces(7)), so that one rule serves all: a mount holds the paths
below its root.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from sidecar.sources.cgroup import (
    CgroupUsage,
    Directory,
    cpu_usage_1,
    memory_usage_1,
    usage_2,
)
from sidecar.sources.files import read
from sidecar.sources.processes import uid_marks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

UNIFIED = ""
"""The version 2 hierarchy's name among the controllers of /proc/<pid>/cgroup."""
PLACES = 128
"""Directories whose places are remembered."""
_ESCAPE = re.compile(r"\\([0-7]{3})")
_OPEN = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted hierarchy.

    Attributes:
        mount_id: the kernel's number, the same in every view.
        root: the control group at its top, as the reader's cgroup namespace sees it.
        point: where it is mounted.
        controllers: of version 1; UNIFIED alone for version 2.
    """

    mount_id: int
    root: str
    point: str
    controllers: frozenset[str]


def parse_mounts(data: bytes) -> list[Mount]:
    """Picks the control groups out of /proc/<pid>/mountinfo.

    Sample: `35 31 0:32 /kubepods/c1 /sys/fs/cgroup/memory ro shared:9 - cgroup cgroup rw,memory`.
    Source: proc(5). Lines of another form are ignored.
    """
    mounts = []
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(kind) < 3 or not _decimal(fields[0]):
            continue
        if kind[0] == "cgroup2":
            controllers = frozenset({UNIFIED})
        elif kind[0] == "cgroup":
            controllers = frozenset(kind[2].split(","))
        else:
            continue
        mounts.append(Mount(int(fields[0]), _plain(fields[3]), _plain(fields[4]), controllers))
    return mounts


def below(path: str, root: str) -> str | None:
    """Returns the path relative to the root of a mount, None where it is not below it."""
    if root == "/":
        rest = path
    elif path == root or path.startswith(root + "/"):
        rest = path[len(root) :]
    else:
        return None
    return None if ".." in rest.split("/") else rest.strip("/")


def pod_path(path: str, pod_uid: str) -> str | None:
    """Returns the part of a container's path that is its pod's, None where the path ends above.

    Only a path that names the pod's uid is trusted: what is above is other pods' too.
    """
    parts = path.split("/")
    for index in range(len(parts), 0, -1):
        if pod_uid and any(mark in parts[index - 1] for mark in uid_marks(pod_uid)):
            return "/".join(parts[:index])
    return None


@dataclass(frozen=True, slots=True)
class _Place:
    view: str
    folder: str
    mount_id: int


class CgroupFS:
    """Reads the control groups of processes below one /proc.

    Attributes:
        denied: whether some process's view of the mounts was not allowed.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._places: dict[tuple[str, str], _Place] = {}
        self.denied = False

    def usage(self, pid: int, paths: Mapping[str, str]) -> CgroupUsage | None:
        """Reads one control group.

        Args:
            pid: a process in it or below it, whose view of the mounts serves where the own does
                not.
            paths: its path by controller, as ProcFS.cgroup returns them.

        Returns:
            None where no mount has it, or where it is the root of the hierarchy.
        """
        with self._open(pid, paths, UNIFIED) as unified:
            whole = usage_2(unified) if unified else None
        if not paths.keys() & {"cpu", "memory"}:
            return whole
        with self._open(pid, paths, "cpu") as cpu, self._open(pid, paths, "cpuacct") as cpuacct:
            first = cpu_usage_1(cpu, cpuacct) if cpu else None
        with self._open(pid, paths, "memory") as memory:
            second = memory_usage_1(memory) if memory else None
        if first is None and second is None:
            return whole
        first, second = first or CgroupUsage(), second or CgroupUsage()
        return CgroupUsage(
            cpu_usage=first.cpu_usage,
            cpu_quota=first.cpu_quota,
            periods=first.periods,
            throttled_periods=first.throttled_periods,
            throttled=first.throttled,
            memory=second.memory,
            memory_peak=second.memory_peak,
            memory_limit=second.memory_limit,
            working_set=second.working_set,
            events=second.events,
            pressure=whole.pressure if whole else {},
        )

    def unified(self, pid: int, paths: Mapping[str, str]) -> str | None:
        """Returns where a version 2 directory is for this process; arguments as in `usage`."""
        with self._open(pid, paths, UNIFIED) as group:
            if group is None:
                return None
            place = self._places[UNIFIED, paths[UNIFIED]]
        return f"{place.view.rstrip('/')}/{place.folder.strip('/')}"

    @contextmanager
    def _open(
        self, pid: int, paths: Mapping[str, str], controller: str
    ) -> Iterator[Directory | None]:
        path = paths.get(controller)
        descriptor = None if path is None else self._descriptor(pid, controller, path)
        if descriptor is None:
            yield None
            return
        try:
            yield Directory(descriptor)
        finally:
            os.close(descriptor)

    def _descriptor(self, pid: int, controller: str, path: str) -> int | None:
        known = self._places.pop((controller, path), None)
        for place in chain([known] if known else [], self._candidates(pid, controller, path)):
            descriptor = self._enter(place)
            if descriptor is not None:
                if len(self._places) >= PLACES:
                    self._places.clear()
                self._places[controller, path] = place
                return descriptor
        return None

    def _candidates(self, pid: int, controller: str, path: str) -> Iterator[_Place]:
        for viewer, view in (("self", "/"), (str(pid), f"{self._proc}/{pid}/root")):
            try:
                mounts = parse_mounts(read(f"{self._proc}/{viewer}/mountinfo"))
            except PermissionError:
                self.denied = True
                continue
            except OSError:
                continue
            for mount in reversed(mounts):
                rest = below(path, mount.root) if controller in mount.controllers else None
                if rest is not None:
                    yield _Place(view, f"{mount.point}/{rest}", mount.mount_id)

    def _enter(self, place: _Place) -> int | None:
        """Opens the directory if it is on the very mount that the kernel named."""
        descriptor = None
        try:
            descriptor = os.open(place.view, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            for part in place.folder.split("/"):
                if part:
                    outer = descriptor
                    descriptor = os.open(part, _OPEN, dir_fd=outer)
                    os.close(outer)
            if _mount_id(descriptor) == place.mount_id:
                return descriptor
        except PermissionError:
            self.denied = True
        except (OSError, ValueError):  # gone; or a path that no system call takes
            pass
        if descriptor is not None:
            os.close(descriptor)
        return None


def _mount_id(descriptor: int) -> int:
    for line in read(f"/proc/self/fdinfo/{descriptor}").splitlines():
        if line.startswith(b"mnt_id:"):
            return int(line.split()[1])
    return -1


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10
