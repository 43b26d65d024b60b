"""OOM kills as the cgroups of the pod's containers count them.

Source: Documentation/admin-guide/cgroup-v2.rst of the Linux kernel, `memory.events`:

    low 0
    high 0
    max 12
    oom 1
    oom_kill 1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.sources.files import read

if TYPE_CHECKING:
    from collections.abc import Iterable


class OomKills:
    """Adds up what the containers' counters grow by; a container's own count ends with it.

    Attributes:
        total: kills since the first reading; None while no counter could be read.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self._latest: dict[str, int] = {}

    def refresh(self, directories: Iterable[str]) -> None:
        """Reads the counters of these cgroup v2 directories."""
        latest: dict[str, int] = {}
        for directory in directories:
            count = _oom_kill(f"{directory}/memory.events")
            if count is not None:
                latest[directory] = count
        if latest:
            self.total = (self.total or 0) + sum(
                max(0, count - self._latest.get(directory, count))
                for directory, count in latest.items()
            )
        self._latest = latest


def _oom_kill(path: str) -> int | None:
    try:
        text = read(path)
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.isdigit():
            return int(value)
    return None
