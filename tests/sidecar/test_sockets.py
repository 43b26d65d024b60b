"""Every figure belongs to the rank whose process holds the socket."""

import contextlib
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from sidecar.sources.sockdiag import SockDiag
from sidecar.sources.tcp_counters import TcpCounters, growth, pack, unpack
from tests.sidecar.sandbox import ROOT, Page, Sandbox, inside, parse

SENDER = """
import socket, sys, time
port, total = int(sys.argv[1]), int(sys.argv[2])
connection = socket.create_connection(('127.0.0.1', port))
for _ in range(total // 16000):
    # Slower than the reader: a full receive buffer drops segments of its own.
    connection.sendall(b'x' * 16000)
    time.sleep(0.001)
print('sent', connection.getsockname()[1], flush=True)
sys.stdin.read()
"""
SINK = """
import socket, sys, threading
def drain(connection):
    while connection.recv(1 << 16):
        pass
def serve(port):
    listener = socket.create_server(('127.0.0.1', port))
    listening.release()
    while True:
        threading.Thread(target=drain, args=(listener.accept()[0],), daemon=True).start()
listening = threading.Semaphore(0)
for port in map(int, sys.argv[1:]):
    threading.Thread(target=serve, args=(port,), daemon=True).start()
    listening.acquire()
print('listening', flush=True)
sys.stdin.read()
"""


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_only_the_rank_on_the_lossy_path_retransmits(sandbox: Sandbox) -> None:
    """Two ranks in one pod; the namespace's own totals cannot tell them apart."""
    sandbox.run(
        "nft",
        "-f",
        "-",
        stdin="table ip t {\nchain in {\ntype filter hook input priority 0;\n"
        "tcp dport 5001 meta length > 1000 numgen random mod 100 < 10 drop\n}\n}\n",
    )
    sandbox.run("ip", "link", "set", "lo", "mtu", "1500")
    sink = sandbox.python(SINK, "5001", "5002")
    assert line(sink) == "listening"
    size = 4_000_000
    for rank, port in enumerate(("5001", "5002")):
        sender = sandbox.python(
            SENDER, port, str(size), KITTY_WATCH="1", RANK=str(rank), JOB_NAME="llm"
        )
        assert line(sender).startswith("sent")
    sandbox.sidecar()
    sandbox.until(
        lambda: (
            sandbox.scrape().values("kitty_tcp_delivered_bytes_total", rank="1") == [size + 1]
            and sandbox.scrape().values("kitty_tcp_delivered_bytes_total", rank="0") == [size + 1]
        )
    )
    page = sandbox.scrape()
    lossy, clean = (
        page.value("kitty_tcp_retransmitted_segments_total", rank=rank) for rank in "01"
    )
    # On a busy machine a probe of a tail that was only late repeats a segment of the clean path.
    assert lossy > 3 * clean
    assert page.value("kitty_tcp_peer_retransmitted_segments_total", rank="0") == lossy
    both = page.values("net_tcp_retransmits_total")
    assert len(both) == 2
    assert both[0] == both[1] == lossy + clean
    name = "kitty_pod_peer_retransmitted_segments_total"
    sandbox.until(lambda: sum(sandbox.scrape().values(name)) == lossy + clean)


def test_what_a_closed_connection_counted_stays(sandbox: Sandbox) -> None:
    sink = sandbox.python(SINK, "5001")
    assert line(sink) == "listening"
    rank = sandbox.python(
        "import socket, sys\n"
        "held = socket.create_connection(('127.0.0.1', 5001))\n"
        "for turn in sys.stdin:\n"
        "    connection = socket.create_connection(('127.0.0.1', 5001))\n"
        "    connection.sendall(b'x' * 10000)\n"
        "    print('up', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    connection.sendall(b'y' * 500)\n"
        "    connection.close()\n"
        "    print('closed', flush=True)\n",
        KITTY_WATCH="1",
        RANK="0",
    )
    sandbox.sidecar()
    assert rank.stdin is not None
    for turn in range(1, 4):
        rank.stdin.write("open\n")
        rank.stdin.flush()
        assert line(rank) == "up"
        sandbox.until(
            lambda: (
                sandbox.scrape().values("kitty_tcp_connections", rank="0", state="established")
                == [2.0]
            )
        )
        rank.stdin.write("close\n")
        rank.stdin.flush()
        assert line(rank) == "closed"
        # 10,500 bytes, and the FIN takes a sequence number too.
        sandbox.until(
            lambda turn=turn: (
                sandbox.scrape().values(  # type: ignore[misc] # a default binds it
                    "kitty_tcp_delivered_bytes_total", rank="0"
                )
                == [turn * 10502.0 + 1]
            )
        )
    page = sandbox.scrape()
    assert page.value("kitty_tcp_closed_connections_total", rank="0", counted="to_the_end") == 3
    assert (
        page.value("kitty_tcp_closed_connections_total", rank="0", counted="to_the_reading_before")
        == 0
    )


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_a_connection_shorter_than_a_round_is_the_pods(sandbox: Sandbox, loopback: str) -> None:
    sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "RANK": "0"})
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("kitty_watched_processes") == [1.0])
    sandbox.run(
        "/usr/bin/python3",
        "-c",
        "import socket, sys\n"
        "family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET\n"
        "l = socket.create_server((sys.argv[1], 5001), family=family)\n"
        "for _ in range(5):\n"
        "    c = socket.create_connection(l.getsockname()[:2]); a, _ = l.accept()\n"
        "    c.sendall(b'x' * 1000); a.recv(2000); c.close(); a.close()\n",
        loopback,
    )
    sandbox.until(
        lambda: sandbox.scrape().values("kitty_tcp_received_bytes_total", rank="") == [5 * 1002]
    )


def test_closings_that_the_kernel_could_not_keep_are_noticed(sandbox: Sandbox) -> None:
    with contextlib.closing(SockDiag()) as diag:
        inside(sandbox.init, diag.sockets)
        assert list(diag.closed()) == []
        sandbox.run(
            "/usr/bin/python3",
            "-c",
            "import socket\n"
            "l = socket.create_server(('127.0.0.1', 5001))\n"
            "for _ in range(6000):\n"
            "    c = socket.create_connection(l.getsockname()); a, _ = l.accept()\n"
            "    c.close(); a.close()\n",
        )
        # The kernel tells of closings from a queue of its own, later than they happen.
        sandbox.until(lambda: dropped_messages(sandbox.init) > 0)
        assert len(list(diag.closed())) > 1000
        assert diag.overruns > 0


def dropped_messages(pid: int) -> int:
    lines = Path(f"/proc/{pid}/net/netlink").read_text().splitlines()
    return sum(int(line.split()[8]) for line in lines[1:])


def test_the_smoothed_round_trip_time_is_the_sockets_own(sandbox: Sandbox) -> None:
    """An IPv4 peer of an IPv6 socket has its IPv4 address."""
    sink = sandbox.python(SINK, "5001")
    assert line(sink) == "listening"
    rank = sandbox.python(
        "import socket, struct, sys\n"
        "c = socket.create_connection(('::ffff:127.0.0.1', 5001))\n"
        "for _ in range(20): c.sendall(b'x' * 1000)\n"
        "import time; time.sleep(0.5)\n"
        "info = c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)\n"
        "print(struct.unpack_from('=I', info, 68)[0], flush=True)\n"
        "sys.stdin.read()\n",
        KITTY_WATCH="1",
        RANK="0",
    )
    micros = int(line(rank))
    sandbox.sidecar()
    name = "kitty_tcp_peer_srtt_seconds"
    sandbox.until(
        lambda: (
            sandbox.scrape().values(name, rank="0", peer="127.0.0.1")
            == [pytest.approx(micros / 1e6)]
        )
    )


def test_the_agents_own_scrapes_do_not_count(sandbox: Sandbox) -> None:
    sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "RANK": "0"})
    sandbox.sidecar()
    for _ in range(30):
        sandbox.scrape()
    sandbox.until(lambda: sandbox.scrape().values("kitty_watched_processes") == [1.0])
    assert sum(sandbox.scrape().values("kitty_tcp_received_bytes_total")) == 0


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_a_listener_with_many_accepted_connections(sandbox: Sandbox, loopback: str) -> None:
    rank = sandbox.python(
        "import json, socket, sys\n"
        "family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET\n"
        "l = socket.create_server((sys.argv[1], 5001), family=family, backlog=100)\n"
        "print('listening', flush=True)\n"
        "held = [l.accept()[0] for _ in range(50)]\n"
        "print('accepted', flush=True)\n"
        "sys.stdin.read()\n",
        loopback,
        KITTY_WATCH="1",
        RANK="0",
    )
    assert line(rank) == "listening"
    other = sandbox.python(
        "import socket, sys\n"
        "held = [socket.create_connection((sys.argv[1], 5001)) for _ in range(50)]\n"
        "[c.sendall(b'x' * 100) for c in held]\n"
        "print('sent', flush=True)\n"
        "sys.stdin.read()\n",
        loopback,
        KITTY_WATCH="1",
        RANK="1",
    )
    assert line(other) == "sent"
    sandbox.sidecar()
    sandbox.until(
        lambda: (
            sandbox.scrape().values("kitty_tcp_connections", rank="0", state="established")
            == [50.0]
        )
    )
    page = sandbox.scrape()
    assert page.value("kitty_tcp_received_bytes_total", rank="0") == 5000
    assert page.value("kitty_tcp_delivered_bytes_total", rank="0") == 0
    assert page.value("kitty_tcp_rx_queue_bytes", rank="0") == 5000
    assert page.value("kitty_tcp_connections", rank="0", state="listen") == 1
    assert page.value("kitty_tcp_peer_received_bytes_total", rank="0", peer=loopback) == 5000


def test_a_queue_that_is_not_read_shows(sandbox: Sandbox) -> None:
    """The receiver stands still: the sender's queue fills, and the peer's window is to blame."""
    still = sandbox.python(
        "import socket, sys\n"
        "l = socket.create_server(('127.0.0.1', 5001))\n"
        "print('listening', flush=True)\n"
        "held = l.accept()\n"
        "sys.stdin.read()\n",
    )
    assert line(still) == "listening"
    sandbox.python(
        "import socket, sys\n"
        "c = socket.create_connection(('127.0.0.1', 5001))\n"
        "c.sendall(b'x' * 50_000_000)\n",
        KITTY_WATCH="1",
        RANK="0",
    )
    sandbox.sidecar()
    sandbox.until(
        lambda: sum(sandbox.scrape().values("kitty_tcp_tx_queue_bytes", rank="0")) > 10**5
    )
    sandbox.until(
        lambda: (
            sum(sandbox.scrape().values("kitty_tcp_limited_seconds_total", rank="0", by="receiver"))
            > 0.5
        )
    )
    page = sandbox.scrape()
    assert page.value("net_tcp_tx_queue_bytes", rank="0") >= page.value(
        "kitty_tcp_tx_queue_bytes", rank="0"
    )


def test_many_peers_keep_sixteen_series_and_nothing_is_lost(sandbox: Sandbox) -> None:
    rank = sandbox.python(
        "import json, socket, sys, threading\n"
        "l = socket.create_server(('0.0.0.0', 5001), backlog=100)\n"
        "held = []\n"
        "for n in range(1, 41):\n"
        "    c = socket.create_connection((f'127.0.1.{n}', 5001), 9, ('127.0.0.1', 0))\n"
        "    a, _ = l.accept()\n"
        "    held += [c, a]\n"
        "    c.sendall(b'x' * 1000 * n)\n"
        "print('sent', flush=True)\n"
        "sys.stdin.read()\n",
        KITTY_WATCH="1",
        RANK="0",
    )
    assert line(rank) == "sent"
    sandbox.sidecar()
    total = sum(1000 * n for n in range(1, 41))
    sandbox.until(
        lambda: sum(sandbox.scrape().values("kitty_tcp_received_bytes_total", rank="0")) == total
    )
    page = sandbox.scrape()
    peers = page.values("kitty_tcp_peer_received_bytes_total", rank="0")
    assert len(peers) == 17
    assert "other" in page.label("kitty_tcp_peer_received_bytes_total", "peer")
    assert sum(peers) == total


def grown(new: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, ...]:
    return unpack(growth(pack(TcpCounters(*new)), pack(TcpCounters(*old))))


def test_growth_is_counter_by_counter() -> None:
    old = (1, 2, 3, 4, 5, 6, 7, 8)
    for index in range(len(old)):
        new = tuple(n + (1 << 31) - 1 if i == index else n for i, n in enumerate(old))
        expected = tuple((1 << 31) - 1 if i == index else 0 for i in range(len(old)))
        assert grown(new, old) == expected
        assert sum(grown(new, new)) == 0


def test_counters_of_32_bits_wrap() -> None:
    """A rank at 100 Gbit/s sends 2^32 segments in nine minutes."""
    old = (5, 100, 100, 2**32 - 10, 0, 0, 0, 0)
    new = (6, 200, 100, 20, 0, 0, 0, 0)
    assert grown(new, old) == (1, 100, 0, 30, 0, 0, 0, 0)
    total = sum(pack(TcpCounters(*counts)) for counts in (old, grown(new, old)))
    assert unpack(total).sent_segments == 2**32 + 20


def test_growth_of_a_socket_that_began_anew_is_all_it_has() -> None:
    old = (5, 100, 100, 2**20, 9, 9, 9, 9)
    assert grown((0, 3, 0, 1, 0, 0, 0, 0), old) == (0, 3, 0, 1, 0, 0, 0, 0)
    assert grown((0, 100, 100, 1, 9, 9, 9, 9), old) == (0, 100, 100, 1, 9, 9, 9, 9)


STEPS = """
import ctypes, os, socket, struct, sys, time
listener = socket.create_server(('127.0.0.1', 5001))
def step():
    print('done', flush=True)
    sys.stdin.readline()
def pair():
    client = socket.create_connection(('127.0.0.1', 5001))
    return client, listener.accept()[0]
def pour(here, there, size):
    here.sendall(b'x' * size)
    while size:
        size -= len(there.recv(size))
"""


def go(process: subprocess.Popen[str]) -> None:
    """Lets a process of STEPS do its next step, and waits until it has."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert line(process) == "done"


def received(sandbox: Sandbox) -> float:
    return sum(sandbox.scrape().values("kitty_tcp_received_bytes_total"))


def test_a_connection_that_its_peer_reset_counts_once(sandbox: Sandbox) -> None:
    """It leaves the kernel's table at once, and ends when the process closes it, hours later."""
    rank = sandbox.python(
        STEPS + "client, server = pair()\npour(client, server, 50000)\nstep()\n"
        "server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))\n"
        "server.close()\nstep()\n"
        "client.close()\npour(*pair(), 7)\nstep()\npour(*pair(), 7)\nstep()\n",
        KITTY_WATCH="1",
        RANK="0",
    )
    sandbox.sidecar()
    assert line(rank) == "done"
    sent, closed = "kitty_tcp_delivered_bytes_total", "kitty_tcp_closed_connections_total"
    sandbox.until(lambda: sandbox.scrape().values(sent, rank="0") == [50001.0])
    go(rank)
    sandbox.until(
        lambda: sandbox.scrape().values(closed, rank="0", counted="to_the_reading_before") == [1.0]
    )
    go(rank)
    for turn in (1, 2):
        if turn > 1:
            go(rank)
        sandbox.until(
            lambda turn=turn: (
                sandbox.scrape().values(  # type: ignore[misc] # a default binds it
                    "kitty_tcp_received_bytes_total", rank=""
                )
                == [turn * 9.0]
            )
        )
    page = sandbox.scrape()
    assert page.value(sent, rank="0") == 50001
    assert page.value("kitty_tcp_received_bytes_total", rank="0") == 50000
    assert sum(page.values(sent)) < 50001 + 30
    assert page.value(closed, rank="", counted="to_the_end") == 4


def test_a_socket_that_is_connected_again(sandbox: Sandbox) -> None:
    """Its counters begin anew; the kernel's number of it stays."""
    rank = sandbox.python(
        STEPS + "client, server = pair()\n"
        "for _ in range(20): pour(client, server, 1000)\nstep()\n"
        "ctypes.CDLL(None).connect(client.fileno(), struct.pack('=H14x', 0), 16)\n"
        "client.connect(('127.0.0.1', 5001))\npour(client, listener.accept()[0], 1000)\nstep()\n",
        KITTY_WATCH="1",
        RANK="0",
    )
    sandbox.sidecar()
    assert line(rank) == "done"
    sandbox.until(lambda: received(sandbox) == 20000)
    before = sandbox.scrape().value("kitty_tcp_sent_segments_total", rank="0")
    go(rank)
    sandbox.until(lambda: received(sandbox) >= 21000)
    after = sandbox.scrape().value("kitty_tcp_sent_segments_total", rank="0")
    assert before <= after <= before + 10


def test_what_a_process_sent_before_it_was_known_counts(sandbox: Sandbox) -> None:
    """Sockets are read twice as often as processes."""
    sink = sandbox.python(SINK, "5001")
    assert line(sink) == "listening"
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("kitty_collector_up", collector="tcp") == [1.0])
    ranks = 4
    for rank in range(ranks):
        sender = sandbox.python(SENDER, "5001", "160000", KITTY_WATCH="1", RANK=str(rank))
        assert line(sender).startswith("sent")
    sent = "kitty_tcp_delivered_bytes_total"
    sandbox.until(
        lambda: all(
            sandbox.scrape().values(sent, rank=str(rank)) == [160001.0] for rank in range(ranks)
        )
    )


def test_a_socket_that_is_passed_on(sandbox: Sandbox) -> None:
    """A launcher accepts and gives the connection to its rank, as inetd and sshd do."""
    launcher = sandbox.python(
        STEPS + "server = pair()\nhere, there = socket.socketpair()\n"
        "if os.fork() == 0:\n"
        "    there.set_inheritable(True)\n"
        "    os.execve(sys.executable, [sys.executable, '-c', sys.argv[1], str(there.fileno())],\n"
        "              {**os.environ, 'RANK': '3'})\n"
        "pour(*server, 1000)\nstep()\n"
        "socket.send_fds(here, [b'x'], [server[1].fileno()])\nserver[1].close()\nhere.recv(1)\n"
        "server[0].sendall(b'x' * 500)\nstep()\n",
        "import socket, sys\n"
        "there = socket.socket(fileno=int(sys.argv[1]))\n"
        "passed = socket.fromfd(socket.recv_fds(there, 1, 1)[1][0], 2, 1)\n"
        "new = socket.create_connection(('127.0.0.1', 5001))\nthere.send(b'x')\n"
        "sys.stdin.read()\n",
        KITTY_WATCH="1",
    )
    sandbox.sidecar()
    assert line(launcher) == "done"
    name = "kitty_tcp_received_bytes_total"
    sandbox.until(lambda: sandbox.scrape().values(name, rank="") == [1000.0])
    go(launcher)
    sandbox.until(lambda: received(sandbox) == 1500)
    sandbox.until(
        lambda: (
            sandbox.scrape().values("kitty_tcp_rx_queue_bytes", rank="3") == [500.0]
            and sandbox.scrape().values("kitty_tcp_rx_queue_bytes", rank="") == [0.0]
        )
    )


def test_a_peers_port_of_the_same_number_is_no_scrape(sandbox: Sandbox) -> None:
    """A rendezvous may well be at port 9100 of another pod."""
    sandbox.run("ip", "addr", "add", "127.0.7.7/8", "dev", "lo")
    sandbox.python(
        "import socket, sys\n"
        "l = socket.create_server(('127.0.7.7', 9100))\n"
        "c = socket.create_connection(('127.0.7.7', 9100), 9, ('127.0.0.1', 0))\n"
        "c.sendall(b'x' * 1000)\n"
        "sys.stdin.read()\n",
        KITTY_WATCH="1",
        RANK="0",
    )
    sandbox.sidecar(KITTY_BIND="127.0.0.1")
    name = "kitty_tcp_peer_delivered_bytes_total"
    sandbox.until(lambda: sandbox.scrape().values(name, rank="0", peer="127.0.7.7") == [1001.0])


def test_in_the_machines_network_what_nobody_holds_is_not_the_pods(sandbox: Sandbox) -> None:
    """With hostNetwork the kernel tells of the connections of every pod of the node."""
    inner = ["nsenter", f"--target={sandbox.init}", "--pid", "--mount", "--root", "--wd", "--"]
    sandbox.enter = inner
    if sandbox.run("sh", "-c", "ls /proc/sys/net/core").find("netdev_budget\n") < 0:
        pytest.skip("the tests do not run in the machine's own network namespace")
    script = (
        STEPS.replace("('127.0.0.1', 5001)", "('127.0.0.1', 0)").replace(
            "create_connection(('127.0.0.1', 0))", "create_connection(listener.getsockname())"
        )
        + "held = pair()\npour(*held, 100)\nstep()\n"
        "for _ in range(20):\n    a, b = pair()\n    pour(a, b, 5000)\n"
        "    a.close()\n    b.close()\n"
        "held[1].close()\ntime.sleep(1)\npour(*pair(), 11)\nstep()\n"
    )
    other = sandbox.start("/usr/bin/python3", "-c", script)
    rank = sandbox.start("/usr/bin/python3", "-c", script, env={"KITTY_WATCH": "1", "RANK": "0"})
    agent = sandbox.start(
        sys.executable,
        *("-m", "sidecar"),
        env={"PYTHONPATH": str(ROOT), "KITTY_PORT": "19777", "KITTY_BIND": "127.0.0.1"},
        cwd=str(ROOT),
    )
    assert agent.stderr is not None
    port = next(int(m[1]) for text in agent.stderr if (m := re.search(r": port (\d+)", text)))

    def page() -> Page:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return parse(answer.read().decode())

    assert (line(other), line(rank)) == ("done", "done")
    name = "kitty_tcp_received_bytes_total"
    sandbox.until(lambda: page().values(name, rank="0") == [100.0])
    go(other)
    assert rank.poll() is None
    sandbox.until(lambda: page().values("kitty_tcp_closed_connections_total", rank="0"))
    last = page()
    assert last.values(name, rank="0") == [100.0]
    assert not last.values(name, rank="")
