"""Parsers of the files of one process: /proc/<pid>/{stat,status,io,schedstat,environ,cgroup}.

Formats: proc(5) and the kernel's Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from sidecar.sources.errors import MalformedError
from sidecar.sources.files import names, read, read_record

if TYPE_CHECKING:
    from collections.abc import Iterable

TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks a second: the unit of the times in stat."""
ENVIRON_LIMIT = 8 << 20
"""Bytes of an environment that are searched: execve(2) allows a quarter of the stack limit."""


class Stat(NamedTuple):
    """One line of /proc/<pid>/stat.

    Sample: `4021 (pt main (1)) S 1 4021 ... 31 0 0 20 0 12 0 5123 ...`. Source: fs/proc/array.c,
    do_task_stat. Times in clock ticks, sizes in pages.
    """

    pid: int
    comm: str
    state: str
    ppid: int
    minor_faults: int
    child_minor_faults: int
    major_faults: int
    child_major_faults: int
    user_ticks: int
    system_ticks: int
    child_ticks: int
    """User and system time of children that ended and were waited for, and of theirs."""
    threads: int
    start_ticks: int
    rss_pages: int
    block_delay_ticks: int
    image: tuple[int, int]
    """Where arguments and environment begin: changes at every exec. Zero without permission."""


_STAT_FIELDS = itemgetter(1, 7, 8, 9, 10, 11, 12, 13, 14, 17, 19, 21, 39, 45, 47)


def parse_stat(data: bytes) -> Stat:
    """Parses stat; the name may hold spaces, parentheses and newlines.

    Raises:
        MalformedError: not a stat line.
    """
    opening, closing = data.find(b"("), data.rfind(b")")
    fields = data[closing + 2 :].split()
    try:
        numbers = [int(field) for field in _STAT_FIELDS(fields)]
        ppid, minor, child_minor, major, child_major, user, system, *rest = numbers
        child_user, child_system, threads, start, rss, block_delay, arguments, environment = rest
        return Stat(
            pid=int(data[:opening]),
            comm=data[opening + 1 : closing].decode("utf-8", "replace"),
            state=chr(fields[0][0]),
            ppid=ppid,
            minor_faults=minor,
            child_minor_faults=child_minor,
            major_faults=major,
            child_major_faults=child_major,
            user_ticks=user,
            system_ticks=system,
            child_ticks=child_user + child_system,
            threads=threads,
            start_ticks=start,
            rss_pages=rss,
            block_delay_ticks=block_delay,
            image=(arguments, environment),
        )
    except (ValueError, IndexError) as e:
        raise MalformedError(f"stat: {data[:80]!r}") from e


@dataclass(frozen=True, slots=True)
class Status:
    """The rows of /proc/<pid>/status that kitty serves.

    Source: fs/proc/array.c, proc_pid_status. `rss` in bytes, None for a kernel thread or zombie.
    """

    rss: int | None
    voluntary_switches: int | None
    involuntary_switches: int | None


def parse_status(data: bytes) -> Status:
    """Parses status; unknown rows are ignored.

    Raises:
        MalformedError: a row that is known holds no number.
    """
    rss = _row(data, b"\nVmRSS:")
    return Status(
        rss=None if rss is None else rss * 1024,
        voluntary_switches=_row(data, b"\nvoluntary_ctxt_switches:"),
        involuntary_switches=_row(data, b"\nnonvoluntary_ctxt_switches:"),
    )


@dataclass(frozen=True, slots=True)
class Io:
    """/proc/<pid>/io: bytes that really went to or came from storage.

    Source: fs/proc/base.c, do_io_accounting. `rchar` counts reads of any kind, page cache and
    pipes included.
    """

    rchar: int
    read_bytes: int
    write_bytes: int


def parse_io(data: bytes) -> Io:
    """Parses io.

    Raises:
        MalformedError: a row is missing or holds no number.
    """
    rows = [
        _row(b"\n" + data, b"\n%s:" % name) for name in (b"rchar", b"read_bytes", b"write_bytes")
    ]
    rchar, read_bytes, write_bytes = rows
    if rchar is None or read_bytes is None or write_bytes is None:
        raise MalformedError(f"io: {data[:80]!r}")
    return Io(rchar=rchar, read_bytes=read_bytes, write_bytes=write_bytes)


def parse_run_queue_delay(data: bytes) -> int | None:
    """Parses schedstat of a task.

    Sample: `15300123 2200 17`: time on a CPU, time runnable but waiting for one, turns on a CPU.
    Source: Documentation/scheduler/sched-stats.rst.

    Returns:
        Nanoseconds runnable but waiting for a CPU; None where the kernel does not keep them and
        writes zeros.

    Raises:
        MalformedError: not three numbers.
    """
    try:
        _, waiting, turns = (int(field) for field in data.split())
    except ValueError as e:
        raise MalformedError(f"schedstat: {data[:80]!r}") from e
    return waiting if turns else None


def parse_environ(data: bytes, names: Iterable[bytes]) -> dict[str, str]:
    """Picks variables out of /proc/<pid>/environ, frozen at the last exec.

    The first of two equal names counts, as getenv(3) has it. A value that is not UTF-8 is left
    out: nobody can have meant it.
    """
    wanted = {name + b"=": name.decode() for name in names}
    found: dict[str, str] = {}
    haystack = b"\0" + data
    for prefix, name in wanted.items():
        at = haystack.find(b"\0" + prefix)
        if at < 0:
            continue
        begin = at + 1 + len(prefix)
        end = haystack.find(b"\0", begin)
        try:
            found[name] = haystack[begin : end if end >= 0 else None].decode()
        except UnicodeDecodeError:
            continue
    return found


def parse_cgroup(data: bytes) -> dict[str, str]:
    """Parses /proc/<pid>/cgroup.

    Sample: `4:cpu,cpuacct:/kubepods/pod7/c1` (version 1), `0::/kubepods.slice/...` (version 2).
    Source: cgroups(7).

    Returns:
        Path by controller; the unified hierarchy under the empty name. Lines of any other form
        are ignored.
    """
    paths: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[0].isdigit() and parts[2].startswith("/"):
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


class ProcFS:
    """The files of single processes below one /proc.

    Every method raises OSError when the process is gone or access is denied, MalformedError
    when the kernel wrote something else than documented, and ExhaustedError when the agent has no
    descriptor left.
    """

    def __init__(self, root: str = "/proc") -> None:
        self.root = root

    def pids(self) -> list[int]:
        """Returns all process ids of the PID namespace."""
        return _numbers(self.root)

    def stat(self, pid: int) -> Stat:
        """Returns the process's stat."""
        return parse_stat(read_record(f"{self.root}/{pid}/stat"))

    def status(self, pid: int) -> Status:
        """Returns the process's status."""
        return parse_status(read_record(f"{self.root}/{pid}/status"))

    def io(self, pid: int) -> Io:
        """Returns the process's storage counters; needs the right to trace it."""
        return parse_io(read_record(f"{self.root}/{pid}/io"))

    def tasks(self, pid: int) -> list[int]:
        """Returns the ids of the process's threads."""
        return _numbers(f"{self.root}/{pid}/task")

    def run_queue_delay(self, pid: int, tid: int) -> int | None:
        """Returns the nanoseconds that the thread waited for a CPU, None where not kept."""
        return parse_run_queue_delay(read_record(f"{self.root}/{pid}/task/{tid}/schedstat"))

    def block_delay(self, pid: int, tid: int) -> int:
        """Returns the clock ticks that the thread waited for a block device."""
        return parse_stat(read_record(f"{self.root}/{pid}/task/{tid}/stat")).block_delay_ticks

    def delay_accounting(self) -> bool | None:
        """Returns whether the kernel keeps block_delay; None where it is too old to say."""
        try:
            return read(f"{self.root}/sys/kernel/task_delayacct").strip() == b"1"
        except OSError:
            return None

    def environ(self, pid: int, names: Iterable[bytes]) -> dict[str, str]:
        """Returns some of the process's variables; needs the right to trace it."""
        return parse_environ(read(f"{self.root}/{pid}/environ", limit=ENVIRON_LIMIT), names)

    def cgroup(self, pid: int | str) -> dict[str, str]:
        """Returns the process's cgroup paths by controller."""
        return parse_cgroup(read_record(f"{self.root}/{pid}/cgroup"))

    def namespace(self, pid: int | str, kind: str) -> int:
        """Returns the inode of a namespace (net, pid, mnt, ...); needs the right to trace it."""
        return os.stat(f"{self.root}/{pid}/ns/{kind}").st_ino


def _numbers(folder: str) -> list[int]:
    return [*map(int, filter(str.isdecimal, names(folder)))]


def _row(data: bytes, name: bytes) -> int | None:
    at = data.find(name)
    if at < 0:
        return None
    fields = data[at + len(name) : at + len(name) + 40].split(maxsplit=1)
    try:
        return int(fields[0])
    except (ValueError, IndexError) as e:
        raise MalformedError(f"{name.decode().strip()} {data[at : at + 60]!r}") from e
