"""What the processes of the pod hold open: /proc/<pid>/fd."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.sources.files import names

if TYPE_CHECKING:
    from collections.abc import Iterable

SOCKET_PREFIX = "socket:["


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The open files of one process.

    Attributes:
        count: descriptors.
        sockets: inodes of sockets of any family.
        devices: paths below /dev/ other than terminals, such as /dev/nvidia0.
    """

    count: int
    sockets: frozenset[int]
    devices: frozenset[str]


def descriptors(pid: int, root: str = "/proc") -> Descriptors:
    """Reads a process's descriptors; one that closes meanwhile is left out.

    Raises:
        OSError: the process is gone, or may not be traced.
        ExhaustedError: the agent has no descriptor left.
    """
    folder = f"{root}/{pid}/fd"
    found = names(folder)
    sockets, devices = set(), set()
    for name in found:
        try:
            target = os.readlink(f"{folder}/{name}")
        except PermissionError:
            # Root may list the folder of a process that it may not trace.
            raise
        except OSError:
            continue
        if target.startswith(SOCKET_PREFIX):
            sockets.add(int(target[len(SOCKET_PREFIX) : -1]))
        elif target.startswith("/dev/") and not target.startswith("/dev/pts/"):
            devices.add(target)
    return Descriptors(count=len(found), sockets=frozenset(sockets), devices=frozenset(devices))


class DescriptorTable:
    """The descriptors of many processes as of their latest walk."""

    def __init__(self, root: str = "/proc") -> None:
        self._root = root
        self._latest: dict[int, Descriptors] = {}
        self.denied = False

    def walk(self, pids: Iterable[int]) -> None:
        """Reads all of them anew; processes that are gone are forgotten."""
        latest = {}
        self.denied = False
        for pid in pids:
            try:
                latest[pid] = descriptors(pid, self._root)
            except PermissionError:
                self.denied = True
            except OSError:
                continue
        self._latest = latest

    def counted(self, pid: int, count: float | None) -> Descriptors | None:
        """Returns what the process holds, read anew where it is not so many descriptors."""
        held = self._latest.get(pid)
        if held is not None and held.count != count:
            try:
                held = self._latest[pid] = descriptors(pid, self._root)
            except OSError:
                return None
        return held

    def get(self, pid: int) -> Descriptors | None:
        """Returns what the process held at the latest walk."""
        return self._latest.get(pid)
