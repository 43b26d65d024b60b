"""What a rank's process waits for: real processes that stop, and that wait for pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.collectors.waiting import WaitingCollector
from sidecar.config import Config
from sidecar.pod import Pod
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS
from sidecar.sources.waiting import DEVICE, OTHER, PIPE, STOPPED, WaitReader
from tests.sidecar.fixture import Fixture

SOURCES = {
    "read": "os.read(os.pipe()[0], 1)",
    "poll": "p = select.poll(); p.register(os.pipe()[0]); print(flush=True); p.poll()",
    "queue": "multiprocessing.get_context('fork').Queue().get(timeout=60)",
    "socket": "a, b = socket.socketpair(); a.recv(1)",
    "poll both": "p = select.poll(); p.register(os.pipe()[0]); a, b = socket.socketpair();"
    " p.register(a, select.POLLIN); p.poll()",
    "sleep": "time.sleep(60)",
}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[bytes]], call: str) -> subprocess.Popen[bytes]:
    """Starts a process that waits in a call."""
    script = f"import multiprocessing, os, select, socket, time; {call}"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    started.append(process)
    return process


def settles(reader: WaitReader, pid: int, expected: str | None) -> bool:
    """Whether a process is soon found so, and stays so."""
    deadline = time.monotonic() + 20
    in_a_row = 0
    while in_a_row < 3 and time.monotonic() < deadline:
        in_a_row = in_a_row + 1 if reader.look(pid) == expected else 0
        time.sleep(0.05)
    return in_a_row == 3


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("read", PIPE),
        ("poll", PIPE),
        ("queue", PIPE),
        ("socket", OTHER),
        ("poll both", OTHER),
        ("sleep", OTHER),
    ],
)
def test_what_it_waits_for(
    started: list[subprocess.Popen[bytes]], call: str, expected: str
) -> None:
    process = start(started, SOURCES[call])
    assert settles(WaitReader(), process.pid, expected)


def test_stopped_running_and_gone(started: list[subprocess.Popen[bytes]]) -> None:
    reader = WaitReader()
    process = start(started, "exec('while True: pass')")
    assert settles(reader, process.pid, None)
    process.send_signal(signal.SIGSTOP)
    assert settles(reader, process.pid, STOPPED)
    process.kill()
    process.wait()
    with pytest.raises(OSError, match=r"No such process|No such file"):
        reader.look(process.pid)


def test_files_are_closed_with_their_processes(started: list[subprocess.Popen[bytes]]) -> None:
    reader, before = WaitReader(), len(os.listdir("/proc/self/fd"))
    process = start(started, SOURCES["sleep"])
    reader.look(process.pid)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    reader.keep([])
    assert len(os.listdir("/proc/self/fd")) == before


def test_time_is_summed_by_rank_and_unknown_is_absent(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path / "machine")
    ranked = {"KITTY_WATCH": "1", "RANK": "3"}
    fixture.process(10, ppid=1, environ=ranked, state="T")
    procfs = ProcFS(str(fixture.proc))
    pod, now = Pod(procfs, ProcessTable(procfs, own_pid=2), Config()), 100.0
    collector = WaitingCollector(pod, WaitReader(str(fixture.proc)), clock=lambda: now)

    def waited() -> dict[str, float]:
        collector.sample()
        (family,) = collector.collect()
        return {sample.labels["on"]: round(sample.value, 3) for sample in family.samples}

    pod.refresh()
    assert waited() == {STOPPED: 0.0, DEVICE: 0.0}
    now += 0.1
    assert waited() == {STOPPED: 0.1, DEVICE: 0.0}
    now += 30.0
    assert waited() == {STOPPED: 0.1, DEVICE: 0.0}, "a gap in the looking is nobody's time"
