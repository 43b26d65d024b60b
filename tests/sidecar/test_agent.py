"""The agent as a process: its port, its signals, its leaving."""

import signal
import time

from tests.sidecar.sandbox import Sandbox


def test_sigterm_ends_it_at_once_with_status_0(sandbox: Sandbox) -> None:
    agent = sandbox.sidecar()
    began = time.monotonic()
    sandbox.signal(agent, signal.SIGTERM)
    agent.communicate(timeout=5)
    assert agent.returncode == 0
    assert time.monotonic() - began < 5


def test_a_taken_port_moves_it_to_the_next(sandbox: Sandbox) -> None:
    sandbox.sidecar()
    second = sandbox.sidecar(port=9101)
    sandbox.signal(second, signal.SIGTERM)
    _, log = second.communicate()
    assert "port 9100 is taken, serving on 9101" in log


def test_a_bad_setting_is_named_and_it_runs(sandbox: Sandbox) -> None:
    agent = sandbox.sidecar(KITTY_PORT="ninety", KITTY_COLLECTORS="pod,gups")
    sandbox.signal(agent, signal.SIGTERM)
    _, log = agent.communicate()
    assert "KITTY_PORT='ninety' is not used" in log
    assert "KITTY_COLLECTORS='pod,gups' is not used" in log


def test_it_serves_what_was_asked_for_only(sandbox: Sandbox) -> None:
    sandbox.sidecar(KITTY_COLLECTORS="system")
    sandbox.until(lambda: sandbox.scrape().values("sys_cpu_utilization"))
    collectors = set(sandbox.scrape().label("kitty_collector_up", "collector"))
    assert collectors == {"pod", "system"}


def test_an_ordinary_sidecar_of_a_pod_that_is_over_exits_0(sandbox: Sandbox) -> None:
    agent = sandbox.sidecar(KITTY_LIFECYCLE="ordinary", KITTY_RESTART_POLICY="Never")
    _, log = agent.communicate(timeout=20)
    assert agent.returncode == 0
    assert "leaving" in log


def test_the_page_for_people_escapes_what_it_shows(sandbox: Sandbox) -> None:
    sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "RANK": "4", "JOB_NAME": "<b>llm</b>"})
    sandbox.sidecar(KITTY_NODE="n1")
    sandbox.until(lambda: "<td>4</td>" in sandbox.get("/")[1])
    text = sandbox.get("/")[1]
    assert "job &lt;b&gt;llm&lt;/b&gt;" in text
    assert "<b>llm" not in text


def test_unknown_paths_and_methods(sandbox: Sandbox) -> None:
    sandbox.sidecar()
    assert sandbox.get("/nothing")[0] == 404
    assert sandbox.get("/metrics/../../etc/passwd")[0] == 404


def test_a_client_that_sends_nothing_does_not_keep_others_waiting(sandbox: Sandbox) -> None:
    sandbox.sidecar()
    idle = sandbox.python(
        "import socket, sys\n"
        "held = [socket.create_connection(('127.0.0.1', 9100)) for _ in range(20)]\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    assert idle.stdout is not None
    assert idle.stdout.readline() == "held\n"
    assert sandbox.get("/healthz")[0] == 200
