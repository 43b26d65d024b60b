"""Parsers of files of the machine: /proc/stat, /proc/meminfo.

Formats: proc(5).
"""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.sources.errors import MalformedError
from sidecar.sources.files import read

FIRST_LINE = 512
"""Bytes that hold the first line of /proc/stat, which grows with the machine."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """The machine's CPU time since boot in clock ticks, idle and in total."""

    idle: int
    total: int


def parse_cpu_times(data: bytes) -> CpuTimes:
    """Parses the first line of /proc/stat.

    Sample: `cpu  10132153 290696 3084719 46828483 16683 0 25195 0 175628 0`: user, nice, system,
    idle, iowait, irq, softirq, steal, guest, guest_nice. The guests' time is in user already.

    Raises:
        MalformedError: not that line.
    """
    fields = data.split(b"\n", 1)[0].split()
    try:
        times = [int(field) for field in fields[1:9]]
    except ValueError as e:
        raise MalformedError(f"/proc/stat: {data[:80]!r}") from e
    if fields[:1] != [b"cpu"] or len(times) < 4:
        raise MalformedError(f"/proc/stat: {data[:80]!r}")
    return CpuTimes(idle=sum(times[3:5]), total=sum(times))


def parse_available_memory(data: bytes) -> int | None:
    """Returns MemAvailable of /proc/meminfo in bytes, None where the kernel has no such row.

    Raises:
        MalformedError: the row holds no number.
    """
    for line in data.splitlines():
        if line.startswith(b"MemAvailable:"):
            try:
                return int(line.split()[1]) * 1024
            except (ValueError, IndexError) as e:
                raise MalformedError(f"/proc/meminfo: {line!r}") from e
    return None


class SystemFS:
    """The machine's files below one /proc."""

    def __init__(self, root: str = "/proc") -> None:
        self._root = root

    def cpu_times(self) -> CpuTimes:
        """Returns the machine's CPU times; raises OSError or MalformedError."""
        return parse_cpu_times(read(f"{self._root}/stat", limit=FIRST_LINE))

    def available_memory(self) -> int | None:
        """Returns bytes available without swapping; raises OSError or MalformedError."""
        return parse_available_memory(read(f"{self._root}/meminfo"))
