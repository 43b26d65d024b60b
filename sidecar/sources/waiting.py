"""What a process waits for at a moment: its state, and the system call that it is in.

/proc/<pid>/syscall (fs/proc/base.c, proc_pid_syscall) tells the call and its arguments, to whoever
may trace the process: `0 0x5 0x7f... 0x10000 0x0 0x0 0x0 0x7ffe... 0x7f...` is read(5, ...).
Numbers are those of arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import os
import platform
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

STOPPED, DEVICE, PIPE, OTHER = "stopped", "device", "pipe", "other"

_READS, _POLLS = {
    "x86_64": (frozenset({0, 19}), frozenset({7, 271})),  # read, readv; poll, ppoll
    "aarch64": (frozenset({63, 65}), frozenset({73})),
}.get(platform.machine(), (frozenset[int](), frozenset[int]()))
_POLLFD = struct.Struct("=ihh")
_FEW = 4
"""Descriptors: whoever polls more than that is an event loop, not one that waits for a loader."""
_STATES = {"T": STOPPED, "t": STOPPED, "D": DEVICE}


class _Open:
    """The two files of a process; they go on meaning it when its number is another's."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.stat = os.open(f"{folder}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.syscall: int | None = os.open(f"{folder}/syscall", os.O_RDONLY | os.O_CLOEXEC)
            os.pread(self.syscall, 256, 0)
        except OSError:
            self.syscall = None

    def close(self) -> None:
        os.close(self.stat)
        if self.syscall is not None:
            os.close(self.syscall)


class WaitReader:
    """Looks at processes; keeps their files open.

    Args:
        proc: root of procfs.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._open: dict[int, _Open] = {}

    def keep(self, pids: Iterable[int]) -> None:
        """Closes the files of all processes but these."""
        for pid in self._open.keys() - set(pids):
            self._open.pop(pid).close()

    def sees_calls(self, pid: int) -> bool:
        """Whether what a process waits for is known, beyond its state."""
        return pid in self._open and self._open[pid].syscall is not None

    def look(self, pid: int) -> str | None:
        """Returns STOPPED, DEVICE, PIPE, or OTHER; None for one that runs or is about to.

        Raises:
            OSError: the process is gone.
        """
        files = self._open.get(pid)
        if files is None:
            files = self._open[pid] = _Open(f"{self._proc}/{pid}")
        try:
            line = os.pread(files.stat, 128, 0)
        except OSError:
            self._open.pop(pid).close()
            raise
        state = chr(line[line.rindex(b")") + 2])
        if state != "S":
            return _STATES.get(state)
        return PIPE if files.syscall is not None and self._waits_for_pipe(files) else OTHER

    def _waits_for_pipe(self, files: _Open) -> bool:
        assert files.syscall is not None
        try:
            words = os.pread(files.syscall, 256, 0).split()
            if len(words) < 3 or not words[0].isdigit():
                return False  # it runs by now
            number, first, second = int(words[0]), int(words[1], 16), int(words[2], 16)
            if number in _READS:
                return _is_pipe(files.folder, first)
            if number in _POLLS and 0 < second <= _FEW:
                return all(_is_pipe(files.folder, fd) for fd in _polled(files, first, second))
        except OSError:
            pass
        return False


def _polled(files: _Open, address: int, count: int) -> list[int]:
    memory = os.open(f"{files.folder}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        table = os.pread(memory, count * _POLLFD.size, address)
    finally:
        os.close(memory)
    return [fd for fd, _, _ in _POLLFD.iter_unpack(table) if fd >= 0]


def _is_pipe(folder: str, descriptor: int) -> bool:
    return os.readlink(f"{folder}/fd/{descriptor}").startswith("pipe:")
