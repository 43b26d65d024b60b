"""The loader and its child: what they hand over, leave behind, and say when they cannot."""

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidecar.ebpf import loader, rtt, syscall
from sidecar.ebpf.memory import headroom
from tests.ebpf.conftest import BCC_PYTHON
from tests.sidecar.sandbox import ROOT

BPF_PROG_GET_NEXT_ID, BPF_PROG_QUERY = 11, 16
CGROUP2 = next(
    (
        p
        for p in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        if Path(p, "cgroup.procs").exists() and Path(p, "cgroup.controllers").exists()
    ),
    None,
)


def programs() -> set[int]:
    """The ids of all programs that are loaded on this machine."""
    found: set[int] = set()
    last = 0
    while True:
        attr = ctypes.create_string_buffer(struct.pack("<III", last, 0, 0), 12)
        try:
            syscall.bpf(BPF_PROG_GET_NEXT_ID, attr)
        except FileNotFoundError:
            return found
        last = struct.unpack_from("<I", attr, 4)[0]
        found.add(last)


def attached(directory: str) -> int:
    """How many sock_ops programs a cgroup has."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        attr = ctypes.create_string_buffer(
            struct.pack("<IIIIQI", folder, syscall.BPF_CGROUP_SOCK_OPS, 0, 0, 0, 0), 32
        )
        syscall.bpf(BPF_PROG_QUERY, attr)
        return int(struct.unpack_from("<I", attr, 24)[0])
    finally:
        os.close(folder)


def until(condition: object, *, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def children() -> set[str]:
    """The processes that this one has started, ended but not waited for included."""
    return {
        pid
        for path in Path("/proc/self/task").iterdir()
        for pid in (path / "children").read_text().split()
    }


def scope(**other: object) -> rtt.Scope:
    return rtt.Scope(netns=1, netns_cookie=1, **other)  # type: ignore[arg-type]


@pytest.mark.alone  # any sidecar that starts loads programs
def test_what_is_loaded_goes_with_its_descriptors(load: loader.Loader) -> None:
    before = programs()
    [loaded] = load.load(rtt.candidates(scope(), hook="tcp_probe"))
    assert isinstance(loaded, loader.Loaded)
    assert set(loaded.maps) == {"cells", "ports", "smoothed"}
    assert len(programs() - before) == 1
    for fd in (*loaded.links, *loaded.programs.values()):
        assert not os.get_inheritable(fd)
    loaded.close()
    until(lambda: programs() <= before)


def test_groups_are_loaded_apart(load: loader.Loader) -> None:
    bad = loader.Candidate("bad", "rtt.bpf.c", (loader.Attach("x", "raw_tracepoint", "x"),), ())
    good = rtt.candidates(scope(), hook="tcp_probe")
    refused, loaded = load.load([bad], [bad, *good])
    assert isinstance(refused, loader.Refused)
    assert "bad" in refused.detail
    assert isinstance(loaded, loader.Loaded)
    assert [over.name for over in loaded.passed_over] == ["bad"]
    assert loaded.peak_kib > 50_000
    loaded.close()


@pytest.mark.alone  # any sidecar that starts loads programs
def test_a_killed_agent_leaves_nothing_on_the_cgroup(load: loader.Loader) -> None:
    if CGROUP2 is None:
        pytest.skip("no cgroup v2 is mounted")
    before = attached(CGROUP2)
    script = (
        "import sys, time; from sidecar.ebpf import loader, rtt\n"
        f"[done] = loader.Loader().load(rtt.candidates(rtt.Scope(1, 1, ({CGROUP2!r},)), "
        "hook='sock_ops'))\n"
        "print(type(done).__name__, flush=True); time.sleep(60)"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == "Loaded\n"
    assert attached(CGROUP2) == before + 1
    agent.kill()
    agent.communicate()
    until(lambda: attached(CGROUP2) == before)


@pytest.mark.parametrize("python", [sys.executable, "/nonexistent/python3"])
def test_no_bcc(load: loader.Loader, python: str) -> None:
    [refused] = loader.Loader(python=python).load(rtt.candidates(scope(), hook="tcp_probe"))
    assert isinstance(refused, loader.Refused)
    assert refused.reason == loader.Reason.NO_BCC
    assert python in refused.detail


def test_no_btf(load: loader.Loader, tmp_path: Path) -> None:
    without = loader.Loader(python=BCC_PYTHON, btf=str(tmp_path / "vmlinux"))
    [refused] = without.load(rtt.candidates(scope()))
    assert isinstance(refused, loader.Refused)
    assert refused.reason == loader.Reason.NO_BTF


def test_missing_capabilities_are_named(load: loader.Loader) -> None:
    script = (
        "import json; from sidecar.ebpf import loader, rtt\n"
        "[no] = loader.Loader().load(rtt.candidates(rtt.Scope(1), hook='tcp_probe'))\n"
        "print(json.dumps([no.reason, no.detail]))"
    )
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
    done = subprocess.run(
        [*drop, sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    reason, detail = json.loads(done.stdout)
    assert reason == "permission"
    assert "CAP_BPF" in detail
    assert "CAP_PERFMON" in detail
    assert "CAP_NET_ADMIN" not in detail  # only sock_ops needs it


def test_the_three_capabilities_are_enough(load: loader.Loader) -> None:
    script = (
        "from sidecar.ebpf import loader, rtt\n"
        "[done] = loader.Loader().load(rtt.candidates(rtt.Scope(1), hook='tcp_probe'))\n"
        "print(type(done).__name__, getattr(done, 'detail', ''))"
    )
    keep = "-all,+bpf,+perfmon,+net_admin"
    done = subprocess.run(
        ["setpriv", f"--inh-caps={keep}", f"--bounding-set={keep}", sys.executable, "-c", script],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("Loaded")


def test_a_hook_that_this_kernel_lacks_is_unsupported(load: loader.Loader) -> None:
    [refused] = load.load(
        [
            loader.Candidate(
                "new", "rtt.bpf.c", (loader.Attach("f", "fentry", "no_such_function"),), ()
            )
        ]
    )
    assert isinstance(refused, loader.Refused)
    assert refused.reason == loader.Reason.UNSUPPORTED


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        ("import time; time.sleep(60)", loader.Reason.TIMEOUT, "did not answer in 1 s"),
        ("import os; os.abort()", loader.Reason.ERROR, "SIGABRT"),
        ("raise SystemExit('out of tokens')", loader.Reason.ERROR, "out of tokens"),
        (
            "import socket, sys; socket.socket(fileno=int(sys.argv[1])).send(b'{')",
            loader.Reason.ERROR,
            "unusable",
        ),
    ],
)
def test_a_child_that_breaks_is_a_reason(
    tmp_path: Path, body: str, reason: loader.Reason, words: str
) -> None:
    child = tmp_path / "child.py"
    child.write_text(body)
    fast = loader.Loader(python=BCC_PYTHON, child=str(child), deadline=1)
    before = children()
    for refused in fast.load(rtt.candidates(scope()), rtt.candidates(scope())):
        assert isinstance(refused, loader.Refused)
        assert refused.reason == reason
        assert words in refused.detail
    assert children() == before, "nothing is left to wait for"


def test_too_little_memory_starts_no_child(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(300 << 20))
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(150 << 20))
    missing = str(tmp_path / "never-run")
    poor = loader.Loader(python=missing, sys=str(tmp_path / "sys"), proc=str(tmp_path / "proc"))
    [refused] = poor.load(rtt.candidates(scope()))
    assert isinstance(refused, loader.Refused)
    assert refused.reason == loader.Reason.MEMORY
    assert "150 MiB" in refused.detail
    # Page cache that the kernel can drop is room as well.
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text(f"anon 1\ninactive_file {60 << 20}\n")
    assert headroom(proc=str(tmp_path / "proc"), sys=str(tmp_path / "sys")) == 210 << 20


def test_the_tightest_level_decides(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/pod/kitty\n0::/\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n")
    for level, limit, used in (
        ("", 1 << 62, 5),
        ("pod", 1 << 30, 1 << 29),
        ("pod/kitty", 1 << 30, 7),
    ):
        folder = tmp_path / "sys/fs/cgroup/memory" / level
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    assert headroom(proc=str(tmp_path / "proc"), sys=str(tmp_path / "sys")) == 1 << 29


def test_sigkill_of_the_child_is_named(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})")
    [refused] = loader.Loader(python=BCC_PYTHON, child=str(child)).load(rtt.candidates(scope()))
    assert isinstance(refused, loader.Refused)
    assert "SIGKILL" in refused.detail
