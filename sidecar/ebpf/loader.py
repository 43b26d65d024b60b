"""Starts the loader child and turns what it hands over into maps, or a refusal into a reason.

A child that crashes, hangs or is killed is a refusal like any other: callers log it once and go
on without its probes.
Programs stay attached as long as a descriptor of their link is open: `Loaded.close` detaches, and
so does the end of the agent, however it comes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from array import array
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from sidecar.ebpf.maps import BpfMap
from sidecar.ebpf.memory import headroom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NEEDED_BYTES = 200 << 20  # the child peaks at 125 MB; an OOM kill would take the container
DEFAULT_DEADLINE_SECONDS = 60
_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
_MAX_REPLY = 1 << 17
_MAX_FDS = 253  # SCM_MAX_FD

Kind = Literal["raw_tracepoint", "kprobe", "fentry", "sock_ops", "perf_event"]


class Reason(StrEnum):
    """Why probes are not there; the values are among those of `kitty_collector_up{reason}`."""

    NO_BCC = "no_bcc"
    NO_BTF = "no_btf"
    PERMISSION = "permission"
    LOCKDOWN = "lockdown"
    MEMORY = "memory"
    UNSUPPORTED = "unsupported"
    TIMEOUT = "timeout"
    ERROR = "error"
    SILENT = "silent"  # of a hook: attached, yet nothing came while traffic flowed


TRANSIENT = frozenset({Reason.MEMORY, Reason.TIMEOUT, Reason.ERROR})
"""Reasons that may pass: worth another try later."""


@dataclass(frozen=True, slots=True)
class Attach:
    """One program and the place it is attached to.

    Attributes:
        function: the function in the source; for fentry the kernel's (bcc's `KFUNC_PROBE`).
        kind: the program type. `perf_event` programs are loaded only: the agent attaches them.
        target: tracepoint, kernel function or cgroup v2 directory.
    """

    function: str
    kind: Kind
    target: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to get a signal; the child takes the first of a group that loads and attaches.

    Attributes:
        name: what logs and metrics call it.
        source: file name beside this module.
        attach: its programs.
        maps: names of the maps to hand over.
        defines: macro to value.
        offsets: macro to `struct.member` path (see `btf.Btf.offset`).
        sizes: macro to struct name.
        arities: macro to tracepoint name: its number of arguments on this kernel.
        enumerators: macro to `enum.enumerator`.
        enums: names of kernel enums to hand over.
    """

    name: str
    source: str
    attach: tuple[Attach, ...]
    maps: tuple[str, ...]
    defines: Mapping[str, int] = field(default_factory=dict)
    offsets: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    arities: Mapping[str, str] = field(default_factory=dict)
    enumerators: Mapping[str, str] = field(default_factory=dict)
    enums: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A candidate that was not used, and why."""

    name: str
    reason: Reason
    detail: str


@dataclass(slots=True)
class Loaded:
    """A candidate that is attached; owns its descriptors.

    Attributes:
        name: the candidate's.
        maps: by name.
        programs: descriptor by function name.
        enums: as asked for.
        passed_over: the candidates before it.
        peak_kib: the child's peak resident memory so far.
    """

    name: str
    maps: dict[str, BpfMap]
    programs: dict[str, int]
    links: list[int]
    enums: dict[str, dict[str, int]]
    passed_over: tuple[PassedOver, ...]
    peak_kib: int

    def close(self) -> None:
        """Detaches and lets the maps go."""
        for fd in (*self.links, *self.programs.values()):
            os.close(fd)
        for table in self.maps.values():
            table.close()
        self.links, self.programs, self.maps = [], {}, {}


@dataclass(frozen=True, slots=True)
class Refused:
    """No candidate of a group could be used; `reason` is that of the last one tried."""

    reason: Reason
    detail: str
    passed_over: tuple[PassedOver, ...] = ()


class Loader:
    """Loads groups of candidates, one child at a time.

    Args:
        python: the interpreter that has bcc (`KITTY_BCC_PYTHON`).
        deadline: seconds after which the child is killed.
        sys: root of the sysfs (cgroup limits are read below `fs/cgroup`).
        proc: root of procfs.
        btf: the kernel's BTF file.
        child: the script to run.
    """

    def __init__(
        self,
        *,
        python: str = "/usr/bin/python3",
        deadline: float = DEFAULT_DEADLINE_SECONDS,
        sys: str = "/sys",
        proc: str = "/proc",
        btf: str | None = None,
        child: str = _CHILD,
    ) -> None:
        self._python = python
        self._deadline = deadline
        self._sys = sys
        self._proc = proc
        self._btf = btf or os.path.join(sys, "kernel/btf/vmlinux")
        self._child = child
        self._lock = threading.Lock()

    def load(self, *groups: Sequence[Candidate]) -> list[Loaded | Refused]:
        """Loads the first usable candidate of each group; never raises for what the node lacks.

        Blocks for 0.3-0.6 s, at most for the deadline.
        """
        with self._lock:
            return self._load(groups)

    def _load(self, groups: Sequence[Sequence[Candidate]]) -> list[Loaded | Refused]:
        free = headroom(proc=self._proc, sys=self._sys)
        if free is not None and free < NEEDED_BYTES:
            detail = f"{free >> 20} MiB free in the cgroup, the loader needs {NEEDED_BYTES >> 20}"
            return [Refused(Reason.MEMORY, detail) for _ in groups]
        results: list[Loaded | Refused] = []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said = os.memfd_create("kitty-loader-stderr")
        try:
            try:
                with theirs:
                    child = self._start(theirs.fileno(), said)
            except OSError as error:
                detail = f"{self._python}: {error.strerror}"
                return [Refused(Reason.NO_BCC, detail) for _ in groups]
            trouble = self._collect(ours, child, groups, results)
            if len(results) < len(groups):
                words = os.pread(said, 1 << 16, 0).decode(errors="replace").split("\n")
                last = next((line for line in reversed(words) if line.strip()), "")
                detail = f"{trouble[1]} {last}".strip()
                results += [Refused(trouble[0], detail)] * (len(groups) - len(results))
        finally:
            ours.close()
            os.close(said)
        return results

    def _start(self, channel: int, said: int) -> subprocess.Popen[bytes]:
        seconds = str(max(1, int(self._deadline) + 1))
        return subprocess.Popen(
            [self._python, "-I", self._child, str(channel), seconds],
            pass_fds=(channel,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            # Nothing of the agent's environment: the child must not look like a watched process.
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"},
        )

    def _collect(
        self,
        channel: socket.socket,
        child: subprocess.Popen[bytes],
        groups: Sequence[Sequence[Candidate]],
        results: list[Loaded | Refused],
    ) -> tuple[Reason, str]:
        """Appends a result for each answer; gives what to say about groups without one."""
        channel.settimeout(self._deadline)
        request = {
            "btf": self._btf,
            "groups": [[asdict(candidate) for candidate in group] for group in groups],
        }
        trouble = (Reason.ERROR, "the loader ended early:")
        try:
            channel.send(json.dumps(request).encode())
            while len(results) < len(groups):
                data, fds = _receive(channel)
                if not data:
                    break
                results.append(_result(data, fds))
        except TimeoutError:
            trouble = (Reason.TIMEOUT, f"the loader did not answer in {self._deadline:g} s")
        except (OSError, ValueError) as error:
            trouble = (Reason.ERROR, f"the loader's answer was unusable: {error}")
        if trouble[0] is Reason.TIMEOUT:
            child.kill()
        try:
            status = child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        if status < 0 and trouble[0] is Reason.ERROR:
            trouble = (Reason.ERROR, f"the loader was ended by {signal.Signals(-status).name}")
        return trouble


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    fds = array("i")
    data, ancillary, _, _ = channel.recvmsg(_MAX_REPLY, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, list(fds)


def _result(data: bytes, fds: list[int]) -> Loaded | Refused:
    try:
        reply = _parse(data, len(fds))
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise
    passed_over = tuple(
        PassedOver(name, Reason(reason), detail) for name, reason, detail in reply["passed_over"]
    )
    if reply["name"] is None:
        last = passed_over[-1]
        return Refused(last.reason, f"{last.name}: {last.detail}", passed_over)
    loaded = Loaded(reply["name"], {}, {}, [], reply["enums"], passed_over, reply["peak_kib"])
    for description, fd in zip(reply["fds"], fds, strict=True):
        what, name = description.split(" ")[:2]
        if what == "map":
            loaded.maps[name] = BpfMap(fd)
        elif what == "program":
            loaded.programs[name] = fd
        else:
            loaded.links.append(fd)
    return loaded


def _parse(data: bytes, fds: int) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(data)
    if len(reply.get("fds", [])) != fds:
        raise ValueError("descriptors are missing (limit of open files)")
    return reply
