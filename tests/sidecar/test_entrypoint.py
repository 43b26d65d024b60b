"""The image's entrypoint around the real agent: what ends the container, and what must not."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
from pathlib import Path

from tests.sidecar.sandbox import ROOT, Sandbox

STRAY = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals meant for trainers: all processes of a pod see each other."""


def started(sandbox: Sandbox) -> subprocess.Popen[str]:
    """Starts the entrypoint as the image does: the system's Python, without a virtual one."""
    path = f"{ROOT}:{sysconfig.get_path('purelib')}"
    entrypoint = sandbox.start("sh", str(ROOT / "sidecar/entrypoint.sh"), env={"PYTHONPATH": path})
    sandbox.until(lambda: sandbox.get("/healthz")[0] == 200)
    return entrypoint


def below(pid: int) -> int:
    """Returns the one child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_stray_signals_end_neither_the_shell_nor_the_agent(sandbox: Sandbox) -> None:
    entrypoint = started(sandbox)
    shell = below(entrypoint.pid)
    agent = below(shell)
    for number in STRAY:
        os.kill(shell, number)
        os.kill(agent, number)
    assert sandbox.get("/healthz")[0] == 200
    assert entrypoint.poll() is None
    assert below(shell) == agent


def test_an_agent_that_dies_is_started_again(sandbox: Sandbox) -> None:
    entrypoint = started(sandbox)
    first = below(below(entrypoint.pid))
    os.kill(first, signal.SIGKILL)
    assert entrypoint.stderr is not None
    while "starting it again" not in (line := entrypoint.stderr.readline()):
        assert line, "the entrypoint has ended"
    # While it waits to start the next one it must not be ended either.
    for number in STRAY:
        os.kill(below(entrypoint.pid), number)
    sandbox.until(lambda: sandbox.get("/healthz")[0] == 200)
    assert below(below(entrypoint.pid)) != first


def test_sigterm_reaches_the_agent_and_the_status_is_0(sandbox: Sandbox) -> None:
    entrypoint = started(sandbox)
    os.kill(below(entrypoint.pid), signal.SIGTERM)
    entrypoint.communicate(timeout=20)
    assert entrypoint.returncode == 0
    assert sandbox.get("/healthz")[0] == 0
