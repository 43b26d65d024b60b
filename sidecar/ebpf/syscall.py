"""The system calls that Python lacks: bpf(2) and perf_event_open(2).

Sources: bpf(2), perf_event_open(2), include/uapi/linux/bpf.h and include/uapi/linux/perf_event.h
of the Linux kernel; the numbers are those of arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct

_BPF, _PERF_EVENT_OPEN = {"x86_64": (321, 298), "aarch64": (280, 241)}.get(
    platform.machine(), (-1, -1)
)
_libc = ctypes.CDLL(None, use_errno=True)

BPF_MAP_LOOKUP_ELEM = 1
BPF_MAP_UPDATE_ELEM = 2
BPF_MAP_DELETE_ELEM = 3
BPF_MAP_GET_NEXT_KEY = 4
BPF_OBJ_GET_INFO_BY_FD = 15
BPF_RAW_TRACEPOINT_OPEN = 17
BPF_MAP_LOOKUP_BATCH = 24
BPF_LINK_CREATE = 28
BPF_CGROUP_SOCK_OPS = 3  # enum bpf_attach_type

PERF_TYPE_SOFTWARE = 1
PERF_COUNT_SW_CONTEXT_SWITCHES = 3
_PERF_FLAG_FD_CLOEXEC = 8
_PERF_EVENT_IOC_ENABLE = 0x2400
_PERF_EVENT_IOC_SET_BPF = 0x40042408
_DISABLED, _INHERIT = 1, 2  # bit field of struct perf_event_attr
_PERF_ATTR = struct.Struct("<IIQQQQQIIQQ")  # up to config2
_PERF_ATTR_SIZE = 112  # PERF_ATTR_SIZE_VER5: accepted by every kernel since 4.1

Buffer = ctypes.Array[ctypes.c_char]


def bpf(command: int, attr: Buffer) -> int:
    """Returns what the system call returned; raises OSError with its errno."""
    result: int = _libc.syscall(_BPF, command, attr, len(attr))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def address(buffer: Buffer) -> int:
    """Where a buffer lies, as struct bpf_attr wants it (a u64)."""
    return ctypes.addressof(buffer)


def raw_tracepoint(program: int, name: str) -> int:
    """Attaches a program to a raw tracepoint.

    Returns:
        The descriptor that keeps it attached; closing the last copy detaches.
    """
    text = ctypes.create_string_buffer(name.encode())
    attr = struct.pack("<QI4x", address(text), program)
    return bpf(BPF_RAW_TRACEPOINT_OPEN, ctypes.create_string_buffer(attr, len(attr)))


def cgroup_link(program: int, directory: int, attach_type: int) -> int:
    """Attaches a program to a cgroup v2 directory by a link: gone with its last descriptor."""
    attr = struct.pack("<IIII", program, directory, attach_type, 0).ljust(48, b"\0")
    return bpf(BPF_LINK_CREATE, ctypes.create_string_buffer(attr, len(attr)))


def kprobe(program: int, function: str, pmu: int) -> int:
    """Attaches a program to a kernel function's entry by the kprobe PMU (no tracefs needed).

    Args:
        program: descriptor of a kprobe program.
        function: the kernel symbol.
        pmu: the number in `/sys/bus/event_source/devices/kprobe/type`.
    """
    symbol = ctypes.create_string_buffer(function.encode())
    attr = _PERF_ATTR.pack(
        pmu, _PERF_ATTR_SIZE, 0, 0, 0, 0, _DISABLED, 0, 0, address(symbol), 0
    ).ljust(_PERF_ATTR_SIZE, b"\0")
    return _perf_event(attr, -1, 0, program)


def context_switches(program: int, tid: int) -> int:
    """Runs a perf-event program whenever a thread, or one it starts from now on, leaves its CPU.

    Threads that are not watched pay nothing for it, unlike with the `sched_switch` tracepoint.

    Args:
        program: descriptor of a perf-event program.
        tid: thread id in the caller's PID namespace.
    """
    attr = _PERF_ATTR.pack(
        PERF_TYPE_SOFTWARE,
        _PERF_ATTR_SIZE,
        PERF_COUNT_SW_CONTEXT_SWITCHES,
        1,
        0,
        0,
        _DISABLED | _INHERIT,
        0,
        0,
        0,
        0,
    ).ljust(_PERF_ATTR_SIZE, b"\0")
    return _perf_event(attr, tid, -1, program)


def _perf_event(attr: bytes, pid: int, cpu: int, program: int) -> int:
    buffer = ctypes.create_string_buffer(attr, len(attr))
    event: int = _libc.syscall(_PERF_EVENT_OPEN, buffer, pid, cpu, -1, _PERF_FLAG_FD_CLOEXEC)
    if event < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        fcntl.ioctl(event, _PERF_EVENT_IOC_SET_BPF, program)
        fcntl.ioctl(event, _PERF_EVENT_IOC_ENABLE, 0)
    except OSError:
        os.close(event)
        raise
    return event
