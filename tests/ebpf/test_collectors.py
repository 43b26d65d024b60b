"""The eBPF collectors through the real agent's /metrics."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.collectors.rtt import UNKNOWN_SECONDS
from sidecar.ebpf import loader
from sidecar.ebpf.rtt import HOOKS
from tests.ebpf.conftest import BCC_PYTHON
from tests.sidecar.documented import undocumented
from tests.sidecar.sandbox import Page, Sandbox

# A rank: connects to its own listener, on the port of its first argument, and exchanges a
# message, then waits for a lock as long as the second one says. Ends with its stdin.
RANK = """
import select, socket, sys, threading
port = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", port))
near = socket.create_connection(("127.0.0.1", port)); far, _ = listener.accept()
lock = threading.Lock(); lock.acquire()
print("up", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    near.sendall(b"x" * 500); far.recv(1000); far.sendall(b"y"); near.recv(10)
    lock.acquire(timeout=float(sys.argv[2]))
"""


def rank(sandbox: Sandbox, number: int, pause: float = 0.01) -> subprocess.Popen[str]:
    process = sandbox.python(
        RANK, str(7000 + number), str(pause), KITTY_WATCH="1", RANK=str(number), JOB_NAME="j"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def shows(sandbox: Sandbox, *names: str, **labels: str) -> Callable[[], bool]:
    def look() -> bool:
        page = sandbox.scrape()
        return all(page.values(name, **labels) for name in names)

    return look


def growth(before: Page, after: Page, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)


def test_two_ranks_and_all_rows(load: loader.Loader, sandbox: Sandbox) -> None:
    rank(sandbox, 0)
    rank(sandbox, 1)
    sandbox.sidecar(KITTY_JOB="j", KITTY_NODE="n1")
    for number in ("0", "1"):
        sandbox.until(
            shows(sandbox, "net_tcp_rtt_us", "proc_futex_wait_duration_seconds_count", rank=number),
            seconds=60,
        )
    assert not undocumented(sandbox.get("/metrics")[1])
    page = sandbox.scrape()
    [hook] = page.label("kitty_rtt_hook_info", "hook")
    assert hook in HOOKS
    assert page.values("kitty_collector_up", collector="rtt", reason="") == [1]
    assert page.values("kitty_collector_up", collector="kernel", reason="") == [1]
    for number in ("0", "1"):
        labels = {"rank": number, "node": "n1", "job": "j"}
        assert 0 < page.value("net_tcp_rtt_us", **labels) < 100_000
        assert len(page.values("kitty_tcp_rtt_seconds_bucket", **labels)) == 12
        count = page.value("kitty_tcp_rtt_seconds_count", **labels)
        assert page.value("kitty_tcp_rtt_seconds_bucket", **labels, le="+Inf") == count
        assert page.value("kitty_tcp_peer_rtt_seconds_count", **labels, peer="127.0.0.1") == count
        for family in (
            "proc_futex_wait_duration_seconds",
            "proc_sched_preempt_duration_seconds",
            "proc_sched_wakeup_latency_seconds",
        ):
            buckets = page.values(f"{family}_bucket", **labels)
            assert len(buckets) == 12
            assert buckets == sorted(buckets)
    assert page.values("sys_oom_kill_event_total", node="n1", job="j") == [0]
    both = sum(page.values("kitty_tcp_peer_rtt_seconds_count", peer="127.0.0.1"))
    name = "kitty_pod_peer_rtt_seconds_count"
    sandbox.until(lambda: sandbox.scrape().values(name, peer="127.0.0.1") >= [both])


def test_ranks_do_not_mix(load: loader.Loader, sandbox: Sandbox) -> None:
    rank(sandbox, 0, pause=0.01)
    rank(sandbox, 1, pause=0.2)
    # The third rank has no connection.
    sandbox.start("sleep", "600", env={"KITTY_WATCH": "1", "RANK": "2", "JOB_NAME": "j"})
    sandbox.sidecar(KITTY_JOB="j", KITTY_COLLECTORS="rtt")
    for number in ("0", "1"):
        sandbox.until(shows(sandbox, "net_tcp_rtt_us", rank=number), seconds=60)
    first, name = sandbox.scrape(), "kitty_tcp_rtt_seconds_count"
    sandbox.until(lambda: growth(first, sandbox.scrape(), name, rank="1") >= 8)
    page = sandbox.scrape()
    # Two samples an exchange, and about twenty exchanges of the one for each of the other.
    assert growth(first, page, name, rank="0") > 4 * growth(first, page, name, rank="1")
    assert "2" not in page.label(name, "rank")
    assert set(page.label("net_tcp_rtt_us", "rank")) <= {"0", "1"}


def test_the_gauge_goes_when_traffic_ends(load: loader.Loader, sandbox: Sandbox) -> None:
    process = rank(sandbox, 0)
    sandbox.sidecar(KITTY_JOB="j", KITTY_COLLECTORS="tcp,rtt")
    sandbox.until(shows(sandbox, "net_tcp_rtt_us", rank="0"), seconds=60)
    sandbox.signal(process, 19)  # SIGSTOP: the rank is there, its traffic is not
    sandbox.until(lambda: not sandbox.scrape().values("net_tcp_rtt_us"), seconds=15)
    assert sandbox.scrape().values("kitty_tcp_rtt_seconds_count", rank="0")
    sandbox.signal(process, 18)
    sandbox.until(shows(sandbox, "net_tcp_rtt_us", rank="0"))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("KITTY_BCC_PYTHON", sys.executable, "no_bcc"), ("KITTY_SYS", "/nonexistent", "no_btf")],
)
def test_without_ebpf_the_others_stay_up_and_rtt_polls(
    load: loader.Loader, sandbox: Sandbox, name: str, value: str, reason: str
) -> None:
    rank(sandbox, 0)
    sandbox.sidecar(**{"KITTY_JOB": "j", name: value})  # type: ignore[arg-type] # no port
    sandbox.until(shows(sandbox, "kitty_collector_up", collector="kernel", reason=reason))
    sandbox.until(shows(sandbox, "net_tcp_rtt_us", rank="0"))
    page = sandbox.scrape()
    assert page.value("kitty_collector_up", collector="kernel") == 0
    for other in ("pod", "tcp", "net", "rtt", "system", "process"):
        assert page.value("kitty_collector_up", collector=other) == 1
    assert page.values("kitty_rtt_hook_info", hook="tcp_info", raw="false") == [1]
    assert page.values("kitty_rtt_hook_passed_over", reason=reason)
    assert not page.values("proc_futex_wait_duration_seconds_count")


def test_a_loader_that_hangs_does_not_keep_rtt_waiting(sandbox: Sandbox, tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 100\n")
    hangs.chmod(0o755)
    rank(sandbox, 0)
    sandbox.sidecar(KITTY_JOB="j", KITTY_BCC_PYTHON=str(hangs))
    sandbox.until(shows(sandbox, "net_tcp_rtt_us", rank="0"), seconds=60)
    page = sandbox.scrape()
    assert page.values("kitty_rtt_hook_info", hook="tcp_info", raw="false") == [1]
    assert page.value("kitty_collector_up", collector="kernel") == 0  # still being loaded


def test_a_hook_that_was_asked_for_has_no_substitute(load: loader.Loader, sandbox: Sandbox) -> None:
    rank(sandbox, 0)
    sandbox.sidecar(KITTY_JOB="j", KITTY_RTT_HOOK="tcp_rtt_estimator", KITTY_COLLECTORS="tcp,rtt")

    def settled() -> bool:
        page = sandbox.scrape()
        return bool(
            page.values("kitty_collector_up", collector="rtt", reason="unsupported")
            or page.values("kitty_rtt_hook_info", hook="tcp_rtt_estimator")
        )

    sandbox.until(settled, seconds=60)
    if sandbox.scrape().values("kitty_rtt_hook_info"):
        pytest.skip("this kernel did not inline tcp_rtt_estimator")
    assert not sandbox.scrape().values("net_tcp_rtt_us")
    assert sandbox.scrape().value("kitty_collector_up", collector="tcp") == 1


def test_a_scrape_from_within_the_pod_is_not_its_traffic(
    load: loader.Loader, sandbox: Sandbox
) -> None:
    rank(sandbox, 0)
    sandbox.sidecar(KITTY_JOB="j", KITTY_COLLECTORS="tcp,rtt")
    sandbox.until(shows(sandbox, "net_tcp_rtt_us", rank="0"), seconds=60)
    for _ in range(10):
        assert sandbox.scrape().values("kitty_tcp_rtt_seconds_count", rank="0")
        time.sleep(0.2)
    time.sleep(UNKNOWN_SECONDS + 1)  # by then what no rank held counts for the pod
    assert not sandbox.scrape().values("kitty_tcp_rtt_seconds_count", rank="")


def test_missing_capabilities_are_a_reason(load: loader.Loader, sandbox: Sandbox) -> None:
    drop = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")
    root = str(Path(__file__).parents[2])
    agent = sandbox.start(
        *drop, sys.executable, "-m", "sidecar", env={"PYTHONPATH": root}, cwd=root
    )
    sandbox.until(lambda: sandbox.get("/healthz")[0] == 200)
    sandbox.until(
        shows(sandbox, "kitty_collector_up", collector="kernel", reason="permission"), seconds=60
    )
    sandbox.signal(agent, 15)
    _, log = agent.communicate(timeout=10)
    assert "CAP_BPF" in log
    assert agent.returncode == 0


def test_bcc_is_not_in_the_agent() -> None:
    assert sys.executable != BCC_PYTHON
    assert "bcc" not in sys.modules
