"""What the kernel's control groups know of a container: CPU quota, memory, pressure.

Formats: Documentation/admin-guide/cgroup-v2.rst, Documentation/admin-guide/cgroup-v1, and
Documentation/accounting/psi.rst. Where a directory is: sources/cgroup_mounts.py.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from sidecar.sources.errors import MalformedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

UNLIMITED = 1 << 62
"""Bytes from which a limit of version 1 is none: it writes the largest number of pages."""
RESOURCES = ("cpu", "memory", "io")
EVENTS = ("high", "max", "oom", "oom_kill")
LIMIT = 1 << 16
"""Bytes of one file that are read."""
DIGITS = 20
"""Of the largest number of 64 bits."""
_PRESSURE = re.compile(rb"^(some|full) .*\btotal=([0-9]{1,20})\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CgroupUsage:
    """One control group. None: not known, or without a limit.

    Attributes:
        cpu_usage: seconds of CPU time.
        cpu_quota: CPUs that it may use.
        periods: quota periods in which it ran.
        throttled_periods: of these, the ones in which it used its quota up.
        throttled: seconds that its threads waited for the next period.
        memory: bytes charged to it, page cache included.
        memory_peak: largest `memory` so far.
        memory_limit: bytes at which it is reclaimed from, and killed in the end.
        working_set: `memory` without the page cache that was not used lately.
        events: memory events by name, a subset of EVENTS.
        pressure: seconds in which some or all of its threads waited, by resource and kind.
    """

    cpu_usage: float | None = None
    cpu_quota: float | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    throttled: float | None = None
    memory: int | None = None
    memory_peak: int | None = None
    memory_limit: int | None = None
    working_set: int | None = None
    events: Mapping[str, int] = field(default_factory=dict)
    pressure: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def headroom(self) -> float | None:
        """Share of the memory limit that the working set leaves, 0 to 1."""
        if self.working_set is None or not self.memory_limit:
            return None
        return max(0.0, 1 - self.working_set / self.memory_limit)


def parse_rows(data: bytes) -> dict[str, int]:
    """Parses a flat keyed file: cpu.stat, memory.stat, memory.events.

    Sample row: `nr_throttled 12`. Rows of another form are ignored.
    """
    found = {}
    for line in data.splitlines():
        name, _, value = line.partition(b" ")
        if value.isdigit() and len(value) <= DIGITS:
            found[name.decode("utf-8", "replace")] = int(value)
    return found


def parse_number(data: bytes) -> int:
    """Parses a file of one number.

    Raises:
        MalformedError: not one.
    """
    try:
        return int(data)
    except ValueError as e:
        raise MalformedError(f"cgroup: {data[:80]!r}") from e


def parse_limit(data: bytes) -> int | None:
    """Parses a limit in bytes; `max` and the huge numbers of version 1 are none.

    Raises:
        MalformedError: neither.
    """
    if data.strip() == b"max":
        return None
    limit = parse_number(data)
    return limit if 0 <= limit < UNLIMITED else None


def parse_cpu_max(data: bytes) -> float | None:
    """Parses cpu.max: `200000 100000`, or `max 100000` without a quota.

    Returns:
        CPUs.

    Raises:
        MalformedError: not that.
    """
    fields = data.split()
    if fields[:1] == [b"max"]:
        return None
    try:
        quota, period = (int(each) for each in fields)
        return quota / period
    except (ValueError, ZeroDivisionError) as e:
        raise MalformedError(f"cpu.max: {data[:80]!r}") from e


def parse_pressure(data: bytes) -> dict[str, float]:
    """Parses a pressure file: seconds by `some` and `full`.

    Sample row: `some avg10=0.00 avg60=0.00 avg300=0.00 total=4826228`, in microseconds.
    """
    return {kind.decode(): int(total) / 1e6 for kind, total in _PRESSURE.findall(data)}


class Directory:
    """The files of one control group, read below an open directory.

    A pod's processes may have mounted whatever they like where a control group is expected:
    only regular files are read, and no link is followed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, name: str) -> bytes | None:
        """Returns a file's content, None where there is no such file or it cannot be read."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return os.read(descriptor, LIMIT)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def parsed(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        """Returns a file's value; None where it cannot be read or is not as documented."""
        data = self.read(name)
        try:
            return None if data is None else parse(data)
        except MalformedError:
            return None

    def rows(self, name: str) -> dict[str, int]:
        """Returns the rows of a flat keyed file, none where it cannot be read."""
        return self.parsed(name, parse_rows) or {}

    def pressure(self) -> dict[tuple[str, str], float]:
        """Returns the seconds of pressure by resource and kind (version 2)."""
        return {
            (resource, kind): seconds
            for resource in RESOURCES
            for kind, seconds in (self.parsed(f"{resource}.pressure", parse_pressure) or {}).items()
        }


def usage_2(group: Directory) -> CgroupUsage | None:
    """Reads a control group of version 2; None for the root, whose figures are the machine's."""
    if group.read("cgroup.events") is None:
        return None
    cpu, memory = group.rows("cpu.stat"), group.rows("memory.stat")
    events = group.rows("memory.events")
    current = group.parsed("memory.current", parse_number)
    return CgroupUsage(
        cpu_usage=_scaled(cpu.get("usage_usec"), 1e6),
        cpu_quota=group.parsed("cpu.max", parse_cpu_max),
        periods=cpu.get("nr_periods"),
        throttled_periods=cpu.get("nr_throttled"),
        throttled=_scaled(cpu.get("throttled_usec"), 1e6),
        memory=current,
        memory_peak=group.parsed("memory.peak", parse_number),
        memory_limit=group.parsed("memory.max", parse_limit),
        working_set=_working_set(current, memory.get("inactive_file")),
        events={name: events[name] for name in EVENTS if name in events},
        pressure=group.pressure(),
    )


def cpu_usage_1(cpu: Directory, cpuacct: Directory | None) -> CgroupUsage | None:
    """Reads the CPU part of a control group of version 1; None for the root."""
    if _is_root_1(cpu):
        return None
    rows = cpu.rows("cpu.stat")
    quota = cpu.parsed("cpu.cfs_quota_us", parse_number)
    period = cpu.parsed("cpu.cfs_period_us", parse_number)
    used = None
    if cpuacct is not None and not _is_root_1(cpuacct):
        used = cpuacct.parsed("cpuacct.usage", parse_number)
    return CgroupUsage(
        cpu_usage=_scaled(used, 1e9),
        cpu_quota=quota / period if quota and period and quota > 0 else None,
        periods=rows.get("nr_periods"),
        throttled_periods=rows.get("nr_throttled"),
        throttled=_scaled(rows.get("throttled_time"), 1e9),
    )


def memory_usage_1(group: Directory) -> CgroupUsage | None:
    """Reads the memory part of a control group of version 1; None for the root."""
    if _is_root_1(group):
        return None
    current = group.parsed("memory.usage_in_bytes", parse_number)
    events = {
        "max": group.parsed("memory.failcnt", parse_number),
        "oom_kill": group.rows("memory.oom_control").get("oom_kill"),
    }
    return CgroupUsage(
        memory=current,
        memory_peak=group.parsed("memory.max_usage_in_bytes", parse_number),
        memory_limit=group.parsed("memory.limit_in_bytes", parse_limit),
        working_set=_working_set(current, group.rows("memory.stat").get("total_inactive_file")),
        events={name: count for name, count in events.items() if count is not None},
    )


def _is_root_1(group: Directory) -> bool:
    return group.read("cgroup.sane_behavior") is not None


def _working_set(current: int | None, inactive: int | None) -> int | None:
    return None if current is None or inactive is None else max(0, current - inactive)


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else value / unit
