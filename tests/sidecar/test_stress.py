"""The real agent while processes come, change and go, and where they are as odd as may be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.sidecar.sandbox import Page, Sandbox, parse

SCRAPES = 50

STORM = r"""
import ctypes, os, random, signal, socket, time
libc = ctypes.CDLL(None)
alive, seed = [], random.Random(7)
server = socket.create_server(("127.0.0.1", 0), backlog=512)
print("storm", flush=True)
while True:
    pid = os.fork()
    if pid == 0:
        kind = os.getpid() % 5
        libc.prctl(15, [b"a) R 1 (b", b"x\ny z", b"((", b"\xff\xfe", b") ("][kind], 0, 0, 0)
        if kind == 0:
            os._exit(0)
        if kind == 1:
            os.execve("/bin/sleep", ["sleep", "60"], {"KITTY_WATCH": "1"})
        if kind == 2:
            held = socket.create_connection(server.getsockname())
            held.send(b"x" * 1000)
        if kind == 3 and os.fork() == 0:
            time.sleep(0.3)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    alive.append(pid)
    while len(alive) > 30:
        gone = alive.pop(seed.randrange(len(alive)))
        os.kill(gone, signal.SIGKILL)
        if seed.random() < 0.9:
            os.waitpid(gone, 0)
    time.sleep(0.002)
"""


def test_scrapes_while_processes_are_forked_and_killed(sandbox: Sandbox) -> None:
    storm = sandbox.python(STORM, KITTY_WATCH="1", RANK="0", JOB_NAME="storm")
    assert storm.stdout is not None
    assert storm.stdout.readline() == "storm\n"
    agent = sandbox.sidecar()
    # The storm itself takes a core: on a busy machine the agent starts late.
    sandbox.until(
        lambda: sandbox.scrape().values("kitty_rank_cpu_seconds_total", rank="0"), seconds=90
    )
    pages: list[Page] = []
    with ThreadPoolExecutor(4) as pool:
        for status, text in pool.map(lambda _: sandbox.get("/metrics"), range(SCRAPES)):
            assert status == 200
            pages.append(parse(text))
    last = sandbox.scrape()
    assert set(last.values("kitty_collector_errors_total")) == {0.0}
    # eBPF may not be had here, or not yet; what matters is that nothing broke.
    reasons = set(last.label("kitty_collector_up", "reason"))
    assert reasons.isdisjoint({"error", "stalled"})
    assert storm.poll() is None
    assert agent.poll() is None
    for page in [*pages, last]:
        identities = [
            (name, *sorted(labels.items()))
            for name, rows in page.samples.items()
            for labels, _ in rows
        ]
        assert len(identities) == len(set(identities))
        assert set(page.label("kitty_rank_threads", "rank")) <= {"0"}
    for counter in ("cpu_seconds", "page_faults", "io_requested_read_bytes"):
        first = sum(pages[0].values(f"kitty_rank_{counter}_total", rank="0"))
        assert sum(last.values(f"kitty_rank_{counter}_total", rank="0")) >= first


ODD = r"""
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(15, eval(sys.argv[1]), 0, 0, 0)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", [b"a b", b") R 1 (", b"x\ny", b"\xff\xfe\xfd", b"((((", b""])
def test_odd_names(sandbox: Sandbox, name: bytes) -> None:
    process = sandbox.python(ODD, repr(name), KITTY_WATCH="1", RANK="4")
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("kitty_rank_threads", rank="4") == [1.0])
    assert sandbox.scrape().value("proc_state", rank="4", state="S") == 1


ENVIRONMENTS = r"""
import os, sys
environment = {b"KITTY_WATCH": b"1", b"RANK": b"8"}
if sys.argv[1] == "megabytes":
    environment = {f"A{i}".encode(): b"x" * 100_000 for i in range(15)} | environment
elif sys.argv[1] == "alien":
    environment[b"JOB_NAME"] = b"\xff\xfe"
    environment[b"\xff"] = b"\xff"
elif sys.argv[1] == "hostile":
    environment[b"JOB_NAME"] = b'x"} 1\nkitty_up{job="y'
elif sys.argv[1] == "long":
    environment[b"JOB_NAME"] = b"j" * 300
os.execve("/bin/sleep", ["sleep", "60"], environment)
"""


@pytest.mark.parametrize("kind", ["megabytes", "alien", "hostile", "long"])
def test_odd_environments(sandbox: Sandbox, kind: str) -> None:
    """The rank counts; a job that nobody can have meant is left out."""
    sandbox.python(ENVIRONMENTS, kind)
    sandbox.sidecar(KITTY_JOB="fallback")
    sandbox.until(lambda: sandbox.scrape().values("kitty_rank_threads", rank="8") == [1.0])
    assert sandbox.scrape().label("kitty_rank_threads", "job") == ["fallback"]
