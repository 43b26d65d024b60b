"""OOM kills of the pod as its containers' control groups count them.

Source: `oom_kill` of memory.events, Documentation/admin-guide/cgroup-v2.rst of the Linux kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class OomKills:
    """Adds up what the containers' counters grow by; a container's own count ends with it.

    Attributes:
        total: kills since the first reading; None while no counter could be read.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self._latest: dict[str, int] = {}

    def add(self, counts: Mapping[str, int]) -> None:
        """Takes the counters of the containers that there are now, by container."""
        if counts:
            self.total = (self.total or 0) + sum(
                max(0, count - self._latest.get(container, count))
                for container, count in counts.items()
            )
        self._latest = dict(counts)
