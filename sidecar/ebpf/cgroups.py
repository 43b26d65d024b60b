"""Finds the cgroup v2 directories of processes, as seen from a container.

Source: cgroup_namespaces(7), proc_pid_mountinfo(5). A path in `/proc/<pid>/cgroup` is relative to
the reader's cgroup namespace and may lie outside of what the reader has mounted.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MARK = "cgroup.procs"
_V2_ONLY = "cgroup.controllers"


def directories(pids: Iterable[int], *, proc: str = "/proc") -> tuple[str, ...]:
    """The cgroup v2 directories that processes are in, each once; empty where none is visible.

    Where the agent's own mount does not show a process's directory, the one that the process's
    container has mounted is used: it is the container's own.
    """
    mounts = _mounts(proc)
    found: dict[tuple[int, int], str] = {}
    for pid in pids:
        for path in _candidates(pid, mounts, proc):
            try:
                stat = os.stat(path)
            except OSError:
                continue
            if os.path.exists(f"{path}/{_MARK}") and os.path.exists(f"{path}/{_V2_ONLY}"):
                found.setdefault((stat.st_dev, stat.st_ino), path)
                break
    return tuple(found.values())


def _candidates(pid: int, mounts: list[str], proc: str) -> Iterator[str]:
    path = _path(pid, proc)
    if path is not None and ".." not in path.split("/"):
        for mount in mounts:
            yield os.path.join(mount, path.lstrip("/")).rstrip("/")
    yield f"{proc}/{pid}/root/sys/fs/cgroup"


def _path(pid: int, proc: str) -> str | None:
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if line.startswith("0::"):
                    return line[3:].rstrip("\n")
    except OSError:
        pass
    return None


def _mounts(proc: str) -> list[str]:
    try:
        with open(f"{proc}/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split(" ") for line in file]
    except OSError:
        return []
    # Fields: ids and device, root, mount point, options, "-", filesystem type.
    return [
        words[4] for words in lines if "-" in words and words[words.index("-") + 1] == "cgroup2"
    ]
