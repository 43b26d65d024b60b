"""How much memory the agent's cgroup, or the machine, has left.

Source: Documentation/admin-guide/cgroup-v2.rst (`memory.max`, `memory.current`, `memory.stat`),
cgroup-v1/memory.rst and Documentation/filesystems/proc.rst (`MemAvailable`) of the Linux kernel.
"""

from __future__ import annotations

import os

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number
# Per version: folder below fs/cgroup, limit, usage, reclaimable part of memory.stat.
_V2 = ("", "memory.max", "memory.current", "inactive_file")
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def headroom(*, proc: str = "/proc", sys: str = "/sys") -> int | None:
    """Bytes that can still be allocated without an OOM kill; None where nothing says.

    The least of what the machine and each visible level of the own cgroup have left, page
    cache that can be dropped included.
    """
    figures = [_available(proc)]
    for version in (_V2, _V1):
        folder = os.path.join(sys, "fs/cgroup", version[0])
        path = _own_path(proc, controller=version[0]).strip("/")
        # In a container the own cgroup is mounted as the root, whatever the path says.
        while path and not os.path.isdir(os.path.join(folder, path)):
            path = os.path.dirname(path)
        while True:
            figures.append(_left(os.path.join(folder, path), version))
            if not path:
                break
            path = os.path.dirname(path)
    known = [figure for figure in figures if figure is not None]
    return min(known) if known else None


def _left(folder: str, version: tuple[str, str, str, str]) -> int | None:
    _, limit_file, usage_file, reclaimable = version
    limit = _number(os.path.join(folder, limit_file))
    usage = _number(os.path.join(folder, usage_file))
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    cached = _field(os.path.join(folder, "memory.stat"), reclaimable) or 0
    return max(0, limit - usage + cached)


def _available(proc: str) -> int | None:
    kib = _field(os.path.join(proc, "meminfo"), "MemAvailable:")
    return None if kib is None else kib << 10


def _own_path(proc: str, *, controller: str) -> str:
    for line in _text(os.path.join(proc, "self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    return ""


def _field(path: str, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
