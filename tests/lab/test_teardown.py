"""However a run ends, nothing of it is left; after SIGKILL, nothing after the next start."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.cgroups import hierarchies
from lab.cluster import MARKER, Cluster
from lab.commands import ToolError
from lab.judge import find_programs
from lab.leftovers import PREFIX, start_time

LAB = [sys.executable, "-m", "lab.cli"]


def marked_processes(owner: str) -> list[str]:
    """Command lines of the processes that carry the marker of a lab."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={owner}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def things(owner: str) -> list[Path]:
    """The cgroups of a lab, and every file in the directory for temporary ones."""
    cgroups = [tree.mount / owner for tree in hierarchies()]
    files = Path(tempfile.gettempdir()).iterdir()
    return [*files, *(path for path in cgroups if path.exists())]


def eventually(condition: Callable[[], bool], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


class Running:
    """A command of `kitty-lab` once it has said something: a fault in its middle, usually."""

    def __init__(self, fault: str, until: str, *, demo: bool = False) -> None:
        command = ["demo", "--fault", fault] if demo else ["run", fault, "--seconds", "600"]
        self.process = subprocess.Popen(
            [*LAB, *command, *([] if demo else ["--calm", "1"])],
            env=os.environ | {"TMPDIR": tempfile.gettempdir()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.owner = f"{PREFIX}{self.process.pid}-{start_time(self.process.pid)}"
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if until in line:
                return
        assert self.process.stderr is not None
        pytest.fail(f"it ended: {self.process.stderr.read()}")

    def end(self, *numbers: signal.Signals) -> tuple[int, str]:
        """Send signals; the exit status and what it said at last."""
        for number in numbers:
            self.process.send_signal(number)
        _, error = self.process.communicate(timeout=30)
        return self.process.returncode, error


def _interfaces() -> set[str]:
    """The host's, but for the ends of other programs' pods, which come and go as they like."""
    return {name for _, name in socket.if_nameindex() if not name.startswith("veth")}


@pytest.fixture
def host_as_before(root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory of its own for temporary files; the host's network must stay as it is."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = _interfaces()
    rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, check=False).stdout
    yield
    assert _interfaces() == before
    after = subprocess.run(["nft", "list", "ruleset"], capture_output=True, check=False).stdout
    assert after == rules


@pytest.mark.parametrize(
    ("fault", "numbers"),
    [
        ("latency", (signal.SIGINT,)),
        ("pause", (signal.SIGTERM, signal.SIGINT, signal.SIGINT)),
        ("cpu", (signal.SIGHUP,)),
    ],
)
def test_a_signal_in_the_middle_of_a_fault(
    host_as_before: None, fault: str, numbers: tuple[signal.Signals, ...]
) -> None:
    run = Running(fault, "fault on")
    assert len(marked_processes(run.owner)) > 12
    assert things(run.owner)
    status, said = run.end(*numbers)
    assert (status, said) == (1, "kitty-lab: interrupted; everything was removed\n")
    assert marked_processes(run.owner) == []
    assert things(run.owner) == []


def test_a_signal_while_it_starts(host_as_before: None) -> None:
    run = Running("loss", "kitty-webhook serves")
    status, said = run.end(signal.SIGINT)
    assert (status, said) == (1, "kitty-lab: interrupted; everything was removed\n")
    assert marked_processes(run.owner) == []
    assert things(run.owner) == []


def test_sigkill_and_the_next_start(host_as_before: None) -> None:
    run = Running("latency", "fault on")
    run.end(signal.SIGKILL)
    assert eventually(lambda: marked_processes(run.owner) == [])
    assert things(run.owner)  # what the next start is for
    with Cluster() as cluster:
        assert run.owner in cluster.swept
    assert things(run.owner) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_demos_prometheus_ends_with_it(host_as_before: None, number: signal.Signals) -> None:
    try:
        find_programs()
    except ToolError as error:
        pytest.skip(str(error))
    run = Running("latency", "Prometheus scrapes", demo=True)
    assert any("prometheus --config.file" in line for line in marked_processes(run.owner))
    run.end(number)
    assert eventually(lambda: marked_processes(run.owner) == [])
    with Cluster():
        pass
    assert things(run.owner) == []


def test_a_sidecar_that_dies_fails_the_run(host_as_before: None) -> None:
    run = Running("latency", "fault on")
    sidecar = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if b"KITTY_POD=" in _read(path)
        and f"={run.owner}".encode() in _read(path)
        and b"kitty-sidecar" in _read(path.parent / "cmdline")
    )
    os.kill(sidecar, signal.SIGKILL)
    status, said = run.end()
    assert status == 1
    assert "container kitty of pod ring-" in said
    assert marked_processes(run.owner) == []
    assert things(run.owner) == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_missing_tools_are_named_with_their_packages(root: None, tmp_path: Path) -> None:
    (tmp_path / "ip").symlink_to(shutil.which("ip") or "")
    done = subprocess.run(
        [*LAB, "run", "throttle"],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "kitty-lab: tc, nft, unshare, nsenter, taskset, setpriv not found: "
        "install iproute2, nftables, util-linux\n"
    )
