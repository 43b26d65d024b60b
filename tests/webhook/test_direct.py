"""The way past gunicorn's parser and Flask: what takes it, and that it leads to the same answer."""

from __future__ import annotations

import contextlib
import json
import select
import selectors
import socket
import ssl
import time
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from gunicorn.http.unreader import Unreader

from tests.webhook.support import review_of
from webhook.direct import SMALL, Post, answer, begun, post
from webhook.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.webhook.support import Server

POD = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "trainer"}]}}
HEAD = (
    "POST /mutate/baseline?timeout=2s HTTP/1.1\r\n"
    "Host: kitty-webhook.kitty-system.svc:443\r\n"
    "User-Agent: kube-apiserver-admission\r\n"
    "Content-Length: {}\r\n"
    "Accept: application/json, */*\r\n"
    "Content-Type: application/json\r\n"
    "Accept-Encoding: gzip\r\n\r\n"
)
MARK = b'"allowed":true'


def request(body: bytes = b"{}", head: str = HEAD) -> bytes:
    return head.format(len(body)).encode() + body


def test_what_an_api_server_sends_is_read() -> None:
    assert post(request(b'{"a": 1}')) == Post("/mutate/baseline", b'{"a": 1}')
    assert post(request(b"x" * SMALL)) is not None


def test_a_part_of_it_is_not() -> None:
    whole = request()
    assert not any(post(whole[:end]) for end in range(len(whole)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("POST", "GET"),
        ("HTTP/1.1", "HTTP/1.0"),
        ("HTTP/1.1", "HTTP/1.1 "),
        ("POST /mutate", "POST  /mutate"),
        ("mutate", "mut\u00e4te"),
        ("Host: kitty", "Most: kitty"),
        ("Accept: ", "Transfer-Encoding: chunked\r\nAccept: "),
        ("Accept: ", "Expect: 100-continue\r\nAccept: "),
        ("Accept: ", "Connection: close\r\nAccept: "),
        ("Accept: ", "content-length: 2\r\nAccept: "),
        ("Accept: ", "Accept\r\nAccept: "),
        ("Accept: ", "Content-Length : 2\r\nAccept: "),
        ("Accept: ", " folded: 2\r\nAccept: "),
        ("Content-Length: {}", "Content-Length: +2"),
        ("Content-Length: {}", "Content-Length: 0x2"),
        ("Content-Length: {}", "Content-Length: 1_0"),
        ("Content-Length: {}", "Content-Length:"),
        ("Content-Length: {}", "Content-Length: 1"),
        ("Content-Length: {}\r\n", ""),
        ("kube-", "kube\x00-"),
        ("kube-", "kube\x7f-"),
        ("kube-", "kube\nTransfer-Encoding: chunked"),
        ("kube-", "kube\r-"),
        ("gzip\r\n", "gzip\r\r\n"),
        ("?timeout", "?\x01timeout"),
        ("?timeout", "?\ttimeout"),
        ("?timeout", "?\ntimeout"),
    ],
)
def test_what_is_unusual_is_left_to_the_parser(old: str, new: str) -> None:
    assert old in HEAD
    data = request(head=HEAD.replace(old, new))
    assert post(data) is None
    assert not begun(data)


def test_so_are_large_bodies_and_a_second_request() -> None:
    for data in (request(b"x" * (SMALL + 1)), request() + request(), b"\r\n\r\n", b"x" * 4096):
        assert post(data) is None
        assert not begun(data)


def test_more_is_worth_waiting_for_only_where_it_makes_a_request_of_it() -> None:
    whole = request()
    assert all(begun(whole[:end]) for end in range(len(whole)))
    assert not begun(whole)


class Dripping:
    """A client of which the loop gets one piece after the other, each after a wait."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.deadlines: list[float] = []
        self.there = False

    def arrived(self, buflen: int) -> bytes | None:
        assert buflen > 0
        self.there = not self.there
        return self.pieces.pop(0) if self.there and self.pieces else None

    def soon(self, deadline: float) -> bool:
        self.deadlines.append(deadline)
        return bool(self.pieces)

    def taken(self, data: bytes) -> int:
        return len(data)


def connection(client: Dripping) -> SimpleNamespace:
    return SimpleNamespace(
        sock=client, parser=SimpleNamespace(unreader=Unreader()), set_timeout=lambda: None
    )


def loop(*, refused: bool = False) -> Worker:
    """A worker that answers a body with itself and is heard by nobody."""
    worker = Worker.__new__(Worker)
    worker.alive, worker.keepalived_conns, worker.pending_conns = True, deque(), deque()
    worker.wsgi = SimpleNamespace(direct=lambda _path, body: None if refused else body)
    worker.tmp = SimpleNamespace(notify=lambda: None)
    return worker


def answered(client: Dripping, *, refused: bool = False) -> tuple[bytes | None, bytes]:
    """What the loop answers, and what it leaves to the parser."""
    conn = connection(client)
    return loop(refused=refused)._answer(conn), conn.parser.unreader.take_buffered()


def test_the_loop_waits_for_all_pieces_of_a_request_together_no_longer_than_for_one() -> None:
    data = request(b'{"a": 1}')
    client = Dripping(data[:9], data[9:20], data[20:-1], data[-1:])
    before = time.monotonic()
    said, left = answered(client)
    assert (said or b"").endswith(b'{"a": 1}')
    assert not left
    assert len(client.deadlines) == 3
    assert len(set(client.deadlines)) == 1
    assert client.deadlines[0] > before


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (request(), True),
        (request(head=HEAD.replace("gzip", "gzip\r\nCookie: a")), False),
        (request(b"x" * (SMALL + 1))[:4096], False),
    ],
)
def test_it_does_not_wait_for_more_of_what_it_will_not_answer(
    data: bytes, *, refused: bool
) -> None:
    client = Dripping(data)
    assert answered(client, refused=refused) == (None, data)
    assert not client.deadlines


def test_an_answer_says_how_long_it_is() -> None:
    head, _, body = answer(b'{"b": 2}').partition(b"\r\n\r\n")
    assert body == b'{"b": 2}'
    assert b"\r\nContent-Length: 8" in head


def test_the_arbiter_hears_of_each_answer() -> None:
    """It ends a worker that is silent for too long, as in one turn with hundreds of reviews."""
    worker, heard = loop(), []
    worker.tmp = SimpleNamespace(notify=lambda: heard.append(True))
    for _ in range(3):
        conn = connection(Dripping(request()))
        worker.keepalived_conns.append(conn)
        worker.on_client_socket_readable(conn, conn.sock)
    assert len(heard) == len(worker.keepalived_conns) == 3


@pytest.mark.parametrize("first", ["kept", "new"])
def test_the_longest_silent_connection_makes_room(first: str) -> None:
    """Whether it has asked before or is still to ask: kept ones would lock out all new ones."""
    worker = loop()
    gone: list[str] = []
    worker.poller, worker._busy = selectors.DefaultSelector(), 0
    worker.nr_conns = worker.worker_connections = 2
    pair = socket.socketpair()
    with pair[0], pair[1], worker.poller:
        for end, name in zip(pair, ("kept", "new"), strict=True):
            conn = SimpleNamespace(sock=end, timeout=float(name != first))
            conn.close = partial(gone.append, name)
            worker.poller.register(end, selectors.EVENT_READ)
            (worker.keepalived_conns if name == "kept" else worker.pending_conns).append(conn)
        worker.wait_for_and_dispatch_events(0)
    assert gone == [first]
    assert worker.nr_conns == 1


def test_both_ways_lead_to_the_same_answer(server: Server) -> None:
    body = json.dumps(review_of(POD)).encode()
    refused = json.dumps({"kind": "AdmissionReview"}).encode()
    with contextlib.closing(server.connection()) as connection:

        def ask(path: str, body: bytes, **headers: str) -> tuple[int, bytes, bool]:
            connection.request("POST", path, body, headers)
            got = connection.getresponse()
            # gunicorn says who it is, the direct way does not.
            return got.status, got.read(), got.getheader("Server") is None

        ask("/mutate", body)  # a connection's first request is always a thread's
        before = server.metric('kitty_webhook_requests_total{code="200"}') or 0
        for path in ("/mutate", "/mutate/baseline", "/mutate/restricted", "/mutate?timeout=2s"):
            direct = ask(path, body)
            parsed = ask(path, body, Cookie="unusual")
            assert direct[:2] == parsed[:2]
            assert direct[0] == 200
            assert (direct[2], parsed[2]) == (True, False)
        assert server.metric('kitty_webhook_requests_total{code="200"}') == before + 8
        control = {"Traceparent": "a\x7f"}
        assert ask("/mutate", body, **control)[0] == 400
        for path, said in (("/mutate", b"{"), ("/mutate", refused), ("/mutat", body), ("/", body)):
            status, text, direct_way = ask(path, said)
            assert (status, text, direct_way) == ask(path, said, Cookie="unusual")
            assert status in (400, 404)
        assert ask("/mutate", body)[0] == 200


@pytest.mark.parametrize("last", [300, 12_000])
def test_a_request_in_the_record_of_the_one_before_is_answered(server: Server, last: int) -> None:
    """Two in one go, of which the first one's body ends so many bytes into a record."""
    record = 16 * 1024
    small = request(json.dumps(review_of(POD)).encode())
    body = json.dumps(review_of(POD)).encode()
    body += b" " * ((last - len(request(body + b" " * 5 * record))) % record + 5 * record)
    assert len(request(body)) % record == last
    with (
        socket.create_connection(("127.0.0.1", server.port), 20) as plain,
        server.context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        tls.sendall(request(body) + small)
        answers = b""
        while answers.count(MARK) < 2:
            piece = tls.recv(65536)
            assert piece
            answers += piece


def test_half_a_record_takes_no_thread(server: Server) -> None:
    """However long the other half takes: the loop answers, and says less than gunicorn."""
    one = request(json.dumps(review_of(POD)).encode())
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = server.context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", server.port), 20) as plain:

        def done(step: Callable[[], Any]) -> Any:
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    plain.sendall(outgoing.read())
                    incoming.write(plain.recv(65536))

        def said() -> bytes:
            text: bytes = b""
            while MARK not in text:
                piece = done(lambda: tls.read(65536))
                assert piece
                text += piece
            return text

        done(tls.do_handshake)
        tls.write(one)
        assert b"Server:" in said()  # the first one is always a thread's
        for cut in (1, 5, 300):
            tls.write(one)
            record = outgoing.read()
            plain.sendall(record[:cut])
            # By its answer the server has seen the half; the loop would wait for a millisecond.
            assert server.review(review_of(POD))["allowed"] is True
            plain.sendall(record[cut:])
            assert b"Server:" not in said()


def test_a_client_that_reads_late_gets_every_answer(server: Server) -> None:
    """More of them than the kernel keeps, so that the loop leaves the rest of one to a thread."""
    one = request(json.dumps(review_of(POD)).encode())
    with socket.socket() as plain:
        # The server waits a few seconds for a client: what it does not read has to be little.
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(20)
        plain.connect(("127.0.0.1", server.port))
        with server.context.wrap_socket(plain, server_hostname="127.0.0.1") as tls:
            sent, rest = 0, b""
            tls.setblocking(False)
            until = time.monotonic() + 0.3
            while sent < 10_000 and time.monotonic() < until:
                rest = rest or one
                try:
                    rest = rest[tls.send(rest) :]
                except ssl.SSLWantWriteError:
                    select.select([], [tls], [], 0.1)
                else:
                    sent += not rest
                    until = time.monotonic() + 0.3
            tls.settimeout(20)
            # A thread has the connection now, and nobody else waits for it.
            assert server.review(review_of(POD))["allowed"] is True
            answers = tail = b""
            found = 0
            while found < sent:
                answers = tail + tls.recv(65536)
                assert len(answers) > len(tail)
                found += answers.count(MARK)
                tail = answers[1 - len(MARK) :]
            assert found == sent > 100
