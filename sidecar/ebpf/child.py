"""The loader child: compiles, loads and attaches programs, hands their descriptors over, ends.

Started by `loader.py` as `<system Python> -I child.py <socket> <deadline>`, because bcc belongs to
the system's Python and costs about 115 MB that the agent must not keep. It needs the standard
library and bcc only.

It reads one JSON request from the socket (see `loader.Candidate`) and answers with one message for
each group, in order: JSON, with the descriptors of maps, programs and links attached
(SCM_RIGHTS).
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

# -I keeps the script's own folder off the path; appended, it can shadow nothing.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.dirname(os.path.dirname(_HERE)))

from sidecar.ebpf import syscall  # noqa: E402 # needs the path above
from sidecar.ebpf.btf import Btf, BtfError  # noqa: E402 # same

_MAX_REQUEST = 1 << 17
_KPROBE_PMU = "/sys/bus/event_source/devices/kprobe/type"
_LOCKDOWN = "/sys/kernel/security/lockdown"
_NET_ADMIN = 12
_CAPABILITIES = {_NET_ADMIN: "NET_ADMIN", 38: "PERFMON", 39: "BPF"}
_SYS_ADMIN = 21
_NO_HELPER = ("unknown func", "cannot use helper")  # what the verifier says
# enum bpf_prog_type, include/uapi/linux/bpf.h
_PROGRAM_TYPES = {
    "kprobe": 2,
    "perf_event": 7,
    "sock_ops": 13,
    "raw_tracepoint": 17,
    "fentry": 26,
}


class Refusal(Exception):  # noqa: N818 # not an error of ours: the node says no
    """Why a candidate cannot be used; `reason` is one of `loader.Reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def main(fd: int, deadline: int) -> None:
    """Serves one request, then ends without bcc's exit handlers (they would detach)."""
    signal.alarm(deadline)  # a hung compiler must not outlive an agent that died
    _be_the_first_to_die()
    channel = socket.socket(fileno=fd)
    request = json.loads(channel.recv(_MAX_REQUEST))
    os.environ["BCC_KERNEL_SOURCE"] = os.path.join(_HERE, "include")
    session: _Session | Refusal
    try:
        session = _Session(request["btf"])
    except Refusal as refusal:
        session = refusal
    for group in request["groups"]:
        reply, fds = _serve(session, group)
        reply["peak_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        socket.send_fds(channel, [json.dumps(reply).encode()], fds)
    os._exit(0)


def _serve(
    session: _Session | Refusal, group: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[int]]:
    passed_over = []
    for candidate in group:
        try:
            if isinstance(session, Refusal):
                raise session
            reply, fds = session.load(candidate)
        except Refusal as refusal:
            passed_over.append([candidate["name"], refusal.reason, str(refusal)])
        else:
            return {"name": candidate["name"], "passed_over": passed_over, **reply}, fds
    return {"name": None, "passed_over": passed_over}, []


class _Session:
    """bcc and the kernel's types, loaded once for all candidates."""

    def __init__(self, btf: str) -> None:
        try:
            self._btf = Btf.load(btf)
        except BtfError as error:
            raise Refusal("no_btf", str(error)) from error
        try:
            import bcc  # noqa: PLC0415 # 64 MB, and may be missing
        except ImportError as error:
            raise Refusal("no_bcc", f"{sys.executable}: {error}") from error
        self._bcc = bcc

    def load(self, candidate: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Compiles, loads and attaches one candidate; raises Refusal."""
        attaches = candidate["attach"]
        for attach in attaches:
            self._check(attach["kind"], attach["target"])
        try:
            defines = self._defines(candidate)
            enums = {name: self._btf.enum(name) for name in candidate["enums"]}
        except BtfError as error:
            raise Refusal("unsupported", str(error)) from error
        module = self._compile(candidate["source"], defines, attaches[0]["kind"])
        names, fds = [], []
        for name in candidate["maps"]:
            names.append(f"map {name}")
            fds.append(module[name.encode()].map_fd)
        for attach in attaches:
            program = self._program(module, attach["kind"], attach["function"])
            names.append(f"program {attach['function']}")
            fds.append(program)
            link = _attach(module, attach["kind"], attach["target"], program)
            if link is not None:
                names.append(f"link {attach['function']} {attach['target']}")
                fds.append(link)
        return {"fds": names, "enums": enums}, fds

    def _check(self, kind: str, target: str) -> None:
        if kind == "kprobe":
            if not os.path.exists(_KPROBE_PMU):
                raise Refusal("unsupported", "kernel without kprobes")
            with open("/proc/kallsyms", "rb") as file:
                if f" {target}\n".encode() not in file.read():
                    raise Refusal("unsupported", f"{target} is not in kallsyms (inlined)")
        elif kind == "fentry" and not self._btf.has_function(target):
            raise Refusal("unsupported", f"{target} is not in BTF (inlined)")

    def _defines(self, candidate: dict[str, Any]) -> list[str]:
        values = dict(candidate["defines"])
        for name, path in candidate["offsets"].items():
            values[name] = self._btf.offset(path)
        for name, struct in candidate["sizes"].items():
            values[name] = self._btf.size(struct)
        for name, tracepoint in candidate["arities"].items():
            values[name] = self._btf.tracepoint_arity(tracepoint)
        for name, path in candidate["enumerators"].items():
            values[name] = self._btf.enumerator(path)
        return [f"-D{name}={value}" for name, value in values.items()]

    def _compile(self, source: str, defines: list[str], kind: str) -> Any:
        said = _stderr_size()
        flags = [*defines, f"-I{_HERE}", "-Wno-everything"]
        try:
            with open(os.path.join(_HERE, source), encoding="ascii") as file:
                return self._bcc.BPF(text=file.read(), cflags=flags)
        except Exception as error:  # bcc raises bare Exception
            raise _refusal(kind, f"compiling {source}: {error}", _stderr_tail(said)) from error

    def _program(self, module: Any, kind: str, function: str) -> int:
        said = _stderr_size()
        name = _fentry_name(module, function) if kind == "fentry" else function.encode()
        try:
            fd: int = module.load_func(name, _PROGRAM_TYPES[kind]).fd
        except Exception as error:  # bcc raises bare Exception
            raise _refusal(kind, f"loading {function}: {error}", _stderr_tail(said)) from error
        return fd


def _fentry_name(module: Any, function: str) -> bytes:
    """What bcc's macro makes of the function's name; since 0.30 it names the module too."""
    names = [f"kfunc__{function}".encode(), f"kfunc__vmlinux__{function}".encode()]
    return next((name for name in names if name in module.kfunc_entry_fds), names[0])


def _attach(module: Any, kind: str, target: str, program: int) -> int | None:
    """Attaches; None for programs that the agent itself attaches to threads."""
    if kind == "fentry":  # bcc attaches these when it compiles them
        link: int = module.kfunc_entry_fds[_fentry_name(module, target)]
        return link
    try:
        if kind == "kprobe":
            with open(_KPROBE_PMU, encoding="ascii") as file:
                return syscall.kprobe(program, target, int(file.read()))
        if kind == "raw_tracepoint":
            return syscall.raw_tracepoint(program, target)
        if kind == "sock_ops":
            directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
            try:
                return syscall.cgroup_link(program, directory, syscall.BPF_CGROUP_SOCK_OPS)
            finally:
                os.close(directory)
    except OSError as error:
        detail = f"attaching to {kind} {target}: {error.strerror}"
        raise _refusal(kind, detail, "", error.errno or 0) from error
    return None


def _refusal(kind: str, detail: str, said: str, number: int = 0) -> Refusal:
    """Names the likely cause of a refused load or attach."""
    # All that bcc says of EPERM, of programs and of maps.
    if "super-user" in detail or "not permitted" in said:
        number = errno.EPERM
    reading = [f"{words} bpf_probe_read_kernel" for words in _NO_HELPER]
    refused = number == errno.EPERM or "Invalid argument" in detail
    if any(text in said for text in reading) or (refused and _lockdown() == "confidentiality"):
        return Refusal("lockdown", f"{detail}: lockdown=confidentiality forbids reading the kernel")
    if any(words in said for words in _NO_HELPER):
        return Refusal("unsupported", f"{detail}: this kernel is too old ({said[-80:]})")
    if number in {errno.EPERM, errno.EACCES}:
        missing = _missing_capabilities(kind)
        cause = f"needs {', '.join(missing)}" if missing else "this kernel refuses it to root too"
        detail = detail.replace("Need super-user privileges to run", "EPERM")
        return Refusal("permission" if missing else "unsupported", f"{detail}: {cause}")
    if number in {errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV}:
        return Refusal("unsupported", detail)
    return Refusal("error", f"{detail} {said}".strip())


def _missing_capabilities(kind: str) -> list[str]:
    held = 0
    needed = (bit for bit in _CAPABILITIES if bit != _NET_ADMIN or kind == "sock_ops")
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("CapEff:"):
                held = int(line.split()[1], 16)
    if held >> _SYS_ADMIN & 1:
        return []
    return [f"CAP_{_CAPABILITIES[bit]}" for bit in needed if not held >> bit & 1]


def _lockdown() -> str:
    try:
        with open(_LOCKDOWN, encoding="ascii") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _be_the_first_to_die() -> None:
    """Under memory pressure this short process should go, not the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass


def _stderr_size() -> int:
    return os.fstat(2).st_size


def _stderr_tail(start: int) -> str:
    """What bcc's libraries wrote since `start`; the agent gives a file as standard error."""
    try:
        text = os.pread(2, 1 << 16, start).decode(errors="replace")
    except OSError:
        return ""
    return " ".join(text.split())[-400:]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
