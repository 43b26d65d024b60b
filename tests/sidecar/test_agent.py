"""The agent as a process: its port, its signals, its leaving."""

import errno
import os
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sidecar.agent import Agent
from sidecar.config import Config
from sidecar.web import CONCURRENT, PATIENCE, listen
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
    """Also where nobody reads its log: another status fails the pod, and with it the Job."""
    read, write = os.pipe()
    os.close(read)
    ordinary: dict[str, Any] = {"KITTY_LIFECYCLE": "ordinary", "KITTY_RESTART_POLICY": "Never"}
    unread = sandbox.sidecar(stderr=write, **ordinary)
    os.close(write)
    agent = sandbox.sidecar(port=9101, **ordinary)
    _, log = agent.communicate(timeout=20)
    assert agent.returncode == 0
    assert "leaving" in log
    assert unread.wait(timeout=20) == 0


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


@pytest.mark.parametrize("bind", ["10.1.2.3", "fd00::77", "no address"])
def test_an_address_that_nobody_has_is_named_and_it_serves_on_all(
    sandbox: Sandbox, bind: str
) -> None:
    agent = sandbox.sidecar(KITTY_BIND=bind)
    sandbox.signal(agent, signal.SIGTERM)
    _, log = agent.communicate()
    assert bind in log


def test_signals_meant_for_trainers_do_not_end_it(sandbox: Sandbox) -> None:
    agent = sandbox.sidecar()
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        sandbox.signal(agent, number)
    assert sandbox.get("/healthz")[0] == 200
    sandbox.signal(agent, signal.SIGTERM)
    agent.communicate(timeout=5)
    assert agent.returncode == 0


def test_clients_that_trickle_do_not_keep_others_away(sandbox: Sandbox) -> None:
    """Each sends a byte now and then, for ever: more of them than there are places."""
    sandbox.sidecar()
    trickle = sandbox.python(
        "import socket, sys, time\n"
        "held = [socket.create_connection(('127.0.0.1', 9100)) for _ in range(40)]\n"
        "print('held', flush=True)\n"
        "while True:\n"
        "    for each in held:\n"
        "        try: each.send(b'G')\n"
        "        except OSError: pass\n"
        "    time.sleep(0.5)\n"
    )
    assert trickle.stdout is not None
    assert trickle.stdout.readline() == "held\n"
    time.sleep(PATIENCE + 0.5)  # what is younger is not taken for a client that hangs
    assert [sandbox.get("/healthz")[0] for _ in range(5)] == [200] * 5


def test_fifty_scrapes_at_a_time_are_all_answered(sandbox: Sandbox) -> None:
    sandbox.sidecar()
    answers = sandbox.run(
        "/usr/bin/python3",
        "-c",
        "import concurrent.futures, urllib.request\n"
        "def get(_):\n"
        "    with urllib.request.urlopen('http://127.0.0.1:9100/metrics', timeout=20) as a:\n"
        "        return a.status if a.read().endswith(b'\\n') else 0\n"
        "with concurrent.futures.ThreadPoolExecutor(50) as pool:\n"
        "    print(set(pool.map(get, range(100))))\n",
    )
    assert answers == "{200}\n"


def test_a_thread_that_cannot_be_started_costs_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod's limit of processes is reached for a while."""
    server = listen(lambda environ, start: [], bind="127.0.0.1", port=0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(CONCURRENT + 1):
        client, far = socket.socketpair()
        with client, far, pytest.raises(RuntimeError):
            server.process_request(client, "someone")
    server.server_close()


def test_without_a_socket_to_serve_on_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    agent = Agent(Config(port=0, bind="127.0.0.1"))
    with monkeypatch.context() as patch:
        patch.setattr("sidecar.agent.listen", refuse)
        agent.listen()
    assert agent.port == 0
    agent.listen()
    assert agent.port
    agent.sampler.start()
    agent.close()


def test_a_question_for_the_head_alone_gets_no_body() -> None:
    agent = Agent(Config(port=0, bind="127.0.0.1"))
    agent.listen()
    for path in ("/metrics", "/healthz", "/", "/nothing"):
        with socket.create_connection(("127.0.0.1", agent.port), 20) as client:
            client.sendall(f"HEAD {path} HTTP/1.1\r\n\r\n".encode())
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"Content-Length: " in head
        assert body == b""
    agent.sampler.start()
    agent.close()


@pytest.mark.parametrize("bind", ["fe80::1", "fe80::1%nowhere", "ff02::1", "192.0.2.1"])
def test_an_address_that_cannot_be_served_is_not_waited_for(bind: str) -> None:
    """Link-local without its device, of a device that is not there, of a group, of nobody."""
    server = listen(lambda environ, start: [], bind=bind, port=0)
    assert server.server_address[0] in {"::", "0.0.0.0"}
    server.server_close()


def test_an_answer_that_takes_long_is_not_cut_off_for_others() -> None:
    """A busy machine: all places are taken by requests that are being answered."""
    go_on = threading.Event()

    def slow(environ: dict[str, Any], start: Any) -> list[bytes]:
        go_on.wait(20)
        start("200 OK", [])
        return [b"whole"]

    server = listen(slow, bind="127.0.0.1", port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"

    def get(_: int) -> bytes:
        with urllib.request.urlopen(address, timeout=20) as answer:
            body: bytes = answer.read()
            return body

    with ThreadPoolExecutor(CONCURRENT + 5) as pool:
        answers = pool.map(get, range(CONCURRENT + 5))
        time.sleep(PATIENCE + 0.5)
        go_on.set()
        assert set(answers) == {b"whole"}
    server.shutdown()
    server.server_close()
