"""The agent while no descriptor is left: what it cannot read is unknown, not gone."""

from __future__ import annotations

import resource
from pathlib import Path

from tests.sidecar.sandbox import Sandbox

RANK = r"""
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
held = []
def connect(size):
    near = socket.create_connection(server.getsockname())
    far = server.accept()[0]
    near.sendall(b"x" * size)
    while size:
        size -= len(far.recv(size))
    held.extend((near, far))
while time.process_time() < 0.5:
    pass
connect(3000)
print("ready", flush=True)
sys.stdin.readline()
connect(500)
print("more", flush=True)
sys.stdin.readline()
"""
COLLECTORS = ("pod", "tcp", "process", "rank")


def test_nothing_is_taken_for_gone_while_no_descriptor_is_left(sandbox: Sandbox) -> None:
    rank = sandbox.python(RANK, KITTY_WATCH="1", RANK="0")
    assert rank.stdout is not None
    assert rank.stdin is not None
    assert rank.stdout.readline() == "ready\n"
    agent = sandbox.sidecar(KITTY_COLLECTORS=",".join(COLLECTORS))
    received = "kitty_tcp_received_bytes_total"
    sandbox.until(lambda: sandbox.scrape().values(received, rank="0") == [3000.0])
    sandbox.until(lambda: sandbox.scrape().values("kitty_rank_cpu_seconds_total", rank="0"))
    used = sandbox.scrape().value("kitty_rank_cpu_seconds_total", rank="0")
    pid = int(Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text())
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    rank.stdin.write("\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "more\n"
    assert agent.stderr is not None
    failed: set[str] = set()
    while not failed.issuperset({"pod", "tcp", "rank"}):
        line = agent.stderr.readline()
        assert line, "the agent has ended"
        failed.update(name for name in COLLECTORS if f"{name}: error: " in line)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    sandbox.until(lambda: sandbox.scrape().values(received, rank="0") == [3500.0])
    sandbox.until(lambda: set(sandbox.scrape().values("kitty_collector_up")) == {1.0})
    page = sandbox.scrape()
    assert used <= page.value("kitty_rank_cpu_seconds_total", rank="0") < used + 0.4
    assert sum(page.values("kitty_tcp_closed_connections_total")) == 0
