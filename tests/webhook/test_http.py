"""The server as the API server and others meet it: bad input, slow and idle clients, reload."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives import serialization

from tests.webhook.support import Files, Server, patched, review_of, running_server, wait_until

if TYPE_CHECKING:
    from pathlib import Path

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "a", "namespace": "ml"},
    "spec": {"containers": [{"name": "c", "image": "i"}]},
}

NOT_A_REVIEW = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"1e999",
    b"{}",
    b'"text"',
    b"[" * 200_000,
    b'{"a":' * 200_000,
    json.dumps({"kind": "AdmissionReview"}).encode(),
    json.dumps(review_of(POD) | {"apiVersion": "admission.k8s.io/v1beta1"}).encode(),
    json.dumps(review_of(POD) | {"kind": "Pod"}).encode(),
    json.dumps(review_of(POD) | {"request": None}).encode(),
    json.dumps(review_of(POD) | {"request": []}).encode(),
    json.dumps(review_of(POD, uid="")).encode(),
    json.dumps(review_of(POD) | {"request": {"uid": 7}}).encode(),
]


@pytest.mark.parametrize("body", NOT_A_REVIEW, ids=lambda body: repr(body[:24]))
def test_what_cannot_be_answered_is_a_400_with_a_reason(body: bytes, server: Server) -> None:
    status, reason = server.post(body)
    assert status == 400
    assert reason.strip()


def with_spec(**spec: Any) -> dict[str, Any]:
    return POD | {"spec": POD["spec"] | spec}  # type: ignore[operator] # plain JSON


def with_metadata(**metadata: Any) -> dict[str, Any]:
    return POD | {"metadata": POD["metadata"] | metadata}  # type: ignore[operator] # same


def with_container(**container: Any) -> dict[str, Any]:
    return with_spec(containers=[{"name": "c", "image": "i"} | container])


UNREADABLE: list[Any] = [
    None,
    [],
    "a pod",
    7,
    POD | {"metadata": []},
    POD | {"spec": "x"},
    with_metadata(labels={"a": 1}),
    with_metadata(labels=[]),
    with_metadata(annotations={"a": None}),
    with_metadata(ownerReferences={}),
    with_metadata(ownerReferences=[1]),
    with_spec(containers="c"),
    with_spec(containers=["c"]),
    with_spec(containers={"c": {}}),
    with_spec(initContainers=1),
    with_spec(containers=[{}] * 500_000),
    with_spec(os="windows"),
    with_spec(nodeSelector=[]),
    with_spec(affinity="here"),
    with_spec(affinity={"nodeAffinity": []}),
    with_spec(securityContext=[]),
    with_spec(resources=[1]),
    with_container(env={"A": "b"}),
    with_container(env=["A=b"]),
    with_container(ports=9100),
    with_container(resources=[]),
    with_container(resources={"limits": []}),
    with_container(resources={"claims": {}}),
    with_container(securityContext="root"),
]


@pytest.mark.parametrize("pod", UNREADABLE, ids=lambda pod: json.dumps(pod)[-48:])
def test_a_misshapen_pod_goes_through_unchanged_with_a_warning(pod: Any, server: Server) -> None:
    response = server.review(review_of(pod))
    assert response["allowed"] is True
    assert "patch" not in response
    assert response["warnings"]


ODD = [
    {},
    POD | {"metadata": None},
    POD | {"spec": None},
    with_spec(containers=[]),
    with_spec(containers=None),
    with_spec(initContainers=None, volumes=None, securityContext=None, nodeSelector=None),
    with_container(env=None, ports=None, resources=None, securityContext=None),
    with_container(env=[{"name": None}, {"value": "x"}, {}]),
    with_container(ports=[{"containerPort": "9100"}, {"containerPort": None}]),
    with_container(ports=[{"containerPort": [], "hostPort": {}, "protocol": [1]}]),
    with_container(env=[{"name": ["KITTY_WATCH"]}, {"name": "KITTY_WATCH", "value": [1]}]),
    with_spec(nodeSelector={"kubernetes.io/os": ["windows"]}),
    with_metadata(ownerReferences=[{"controller": "yes", "kind": [], "name": {}}]),
    with_metadata(
        labels={
            "training.kubeflow.org/job-name": "j",
            "training.kubeflow.org/replica-type": "worker",
            "training.kubeflow.org/replica-index": "\u00b2",
        }
    )
    | {"spec": {"containers": [{"env": [{"name": "MASTER_ADDR", "value": "j-master-0"}]}]}},
    with_container(resources={"limits": {"cpu": [], "memory": {}}}),
    with_spec(containers=[{}, {"name": 7}]),
    with_spec(containers=[{"name": "c"}, {"name": "c"}]),
    with_spec(hostNetwork="yes", hostPID=1, shareProcessNamespace="no", restartPolicy=5),
    with_metadata(name=7, generateName=[]),
    with_metadata(name="\ud800", annotations={"kitty.k10s.dev/job": "\ud800"}),
    with_metadata(annotations={"kitty.k10s.dev/port": "9" * 5000}),
    with_metadata(annotations={"kitty.k10s.dev/status": "[" * 100_000}),
    with_metadata(labels={"job-name": "a\nb"}),
]


@pytest.mark.parametrize("pod", ODD, ids=lambda pod: json.dumps(pod)[-48:])
def test_odd_pods_are_allowed(pod: Any, server: Server) -> None:
    before = server.metric("kitty_webhook_errors_total")
    response = server.review(review_of(pod, namespace="ml"))
    assert response["allowed"] is True
    assert all(len(w) <= 120 and w.isprintable() for w in response.get("warnings", []))
    assert patched(pod, response) is not None
    assert server.metric("kitty_webhook_errors_total") == before


@pytest.mark.parametrize("operation", ["UPDATE", "DELETE", "CONNECT", "", None])
def test_only_creation_is_reviewed(operation: str | None, server: Server) -> None:
    response = server.review(review_of(POD, operation=operation))
    assert "patch" not in response
    assert response["allowed"] is True


@pytest.mark.parametrize("kind", ["PodList", "Deployment", "Node", "", None])
def test_only_pods_are_reviewed(kind: str | None, server: Server) -> None:
    request_kind = {"group": "", "version": "v1", "kind": kind}
    review = review_of({"kind": kind, "items": [POD]}, kind=request_kind)
    response = server.review(review)
    assert "patch" not in response
    assert response["allowed"] is True


def test_subresources_are_left_alone(server: Server) -> None:
    response = server.review(review_of(POD, subResource="ephemeralcontainers"))
    assert "patch" not in response


@pytest.mark.parametrize("extra", [0, 1])
def test_three_mebibytes_is_the_limit(extra: int, server: Server) -> None:
    review = json.dumps(review_of(POD)).encode()
    body = review + b" " * (3 * 1024 * 1024 - len(review) + extra)
    assert server.post(body)[0] == (413 if extra else 200)


def test_a_huge_chunked_body_is_cut_off(server: Server) -> None:
    with contextlib.closing(server.connection()) as connection:
        pieces = (b" " * 65536 for _ in range(80))
        connection.request("POST", "/mutate", pieces, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_wrong_paths_and_methods(server: Server) -> None:
    review = review_of(POD)
    assert server.post(review, "/mutate/other")[0] == 404
    assert server.post(review, "/")[0] == 404
    with contextlib.closing(server.connection()) as connection:
        connection.request("GET", "/mutate")
        assert connection.getresponse().status == 405


def test_health_and_metrics(server: Server) -> None:
    assert server.get("/healthz") == (200, "ok\n")
    assert server.get("/readyz") == (200, "ok\n")
    assert server.get("/")[0] == 404
    before = server.metric('kitty_webhook_skipped_total{reason="windows-pod"}') or 0
    server.review(review_of(with_spec(os={"name": "windows"})))
    assert server.metric('kitty_webhook_skipped_total{reason="windows-pod"}') == before + 1
    assert (server.metric('kitty_webhook_requests_total{code="200"}') or 0) > 0
    assert server.metric('kitty_webhook_review_duration_seconds_bucket{le="0.001"}') is not None


def test_a_connection_is_kept(server: Server) -> None:
    with contextlib.closing(server.connection()) as connection:
        for _ in range(3):
            connection.request("POST", "/mutate", json.dumps(review_of(POD)))
            answer = connection.getresponse()
            assert answer.read()
            assert answer.getheader("Connection", "keep-alive").lower() != "close"


def test_a_refused_request_leaves_its_connection_usable(server: Server) -> None:
    with contextlib.closing(server.connection()) as connection:
        for body, status in ((b"{", 400), (json.dumps(review_of(POD)).encode(), 200)):
            connection.request("POST", "/mutate", body)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status


def test_idle_and_stalled_clients_hold_up_nobody(server: Server) -> None:
    """More idle TLS connections than the server has threads, and some that say half a word."""
    with contextlib.ExitStack() as stack:
        for i in range(48):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            if i % 2:
                wrapped = server.context.wrap_socket(plain, server_hostname="127.0.0.1")
                stack.enter_context(wrapped)
        start = time.monotonic()
        assert server.review(review_of(POD))["allowed"] is True
        assert time.monotonic() - start < 8


def test_a_stalled_handshake_is_given_up(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as plain:
        plain.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert plain.recv(1024) == b""  # closed by the server, not by this side's 30 seconds


def test_a_replaced_certificate_is_served_without_dropping_a_connection(
    tmp_path: Path,
) -> None:
    files = Files.make(tmp_path)
    context = ssl.create_default_context(cafile=str(files.root))
    flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    with running_server(tmp_path, *flags, context=context) as server:
        with contextlib.closing(server.connection()) as old:
            old.request("POST", "/mutate", json.dumps(review_of(POD)))
            assert old.getresponse().read()
            before = server.certificate()
            # Half-way through a replacement the two files do not fit: the last good pair stays.
            key = files.key.read_bytes()
            files.issue()
            new_key = files.key.read_bytes()
            files.key.write_bytes(key)
            assert server.certificate() == before
            files.key.write_bytes(new_key)
            assert server.certificate() != before
            old.request("POST", "/mutate", json.dumps(review_of(POD)))
            assert old.getresponse().status == 200
        wait_until(
            lambda: server.metric("kitty_webhook_certificate_expiry_timestamp_seconds"),
        )


def test_sigterm_ends_it_and_leaves_nothing(tmp_path: Path, tls: Files) -> None:
    context = ssl.create_default_context(cafile=str(tls.root))
    flags = ("--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
    with running_server(tmp_path, *flags, context=context) as server:
        server.process.terminate()
        assert server.process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            server.get("/healthz")


def ask(server: Server, raw: bytes) -> bytes:
    """What the server answers to bytes on a TLS connection of their own, up to its status line."""
    with (
        socket.create_connection(("127.0.0.1", server.port), 20) as plain,
        server.context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        tls.sendall(raw)
        return tls.recv(12)


HEAD = b"POST /mutate HTTP/1.1\r\nHost: kitty\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Content-Length: abc\r\n\r\n{}",
        HEAD + b"Content-Length: -5\r\n\r\n{}",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
        HEAD + b"Script_Name: /x\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X-Forwarded-Proto: http\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Expect: nothing\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"\r\n",
        HEAD.replace(b"1.1", b"3.0") + b"\r\n",
        b"\x00\x01garbage\r\n\r\n",
    ],
    ids=lambda raw: repr(raw[:64][-28:]),
)
def test_bad_http_is_the_clients_fault(raw: bytes, server: Server) -> None:
    before = server.metric("kitty_webhook_errors_total")
    version, status = ask(server, raw).split()
    assert version.startswith(b"HTTP/1.")
    assert 400 <= int(status) < 500
    assert server.metric("kitty_webhook_errors_total") == before


def test_requests_behind_one_another_are_all_answered(server: Server) -> None:
    """More of them than one read of the server takes, in one write of the client."""
    pod = with_metadata(annotations={"padding": "x" * 7000})
    body = json.dumps(review_of(pod)).encode()
    one = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with (
        socket.create_connection(("127.0.0.1", server.port), 20) as plain,
        server.context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        tls.sendall(one * 6)
        answers = b""
        while answers.count(b'"allowed"') < 6:
            got = tls.recv(65536)
            assert got
            answers += got


def test_clients_that_trickle_hold_up_nobody_for_long(server: Server) -> None:
    """More of them than there are threads, none ever silent for long, and none ever done."""
    done = threading.Event()

    def trickle() -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.port), 20) as plain,
            server.context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
        ):
            tls.sendall(HEAD + b"Content-Length: 9000\r\n\r\n")
            started.release()
            while not done.wait(0.2):
                tls.sendall(b" ")

    started = threading.Semaphore(0)
    threads = [threading.Thread(target=trickle) for _ in range(12)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(8):
            started.acquire()
        assert server.review(review_of(POD))["allowed"] is True
    finally:
        done.set()
        for thread in threads:
            thread.join()


HALVES = {
    "handshake": b"",
    "head": HEAD,
    "body": HEAD + b"Content-Length: 9000\r\n\r\n{",
}


@pytest.mark.parametrize("said", HALVES.values(), ids=HALVES)
def test_a_crowd_that_stops_half_way_holds_up_nobody_for_long(said: bytes, server: Server) -> None:
    """More of them than there are threads to wait for them; the API server waits two seconds."""
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            for _ in range(100)
        ]
        if said:
            crowd = [
                stack.enter_context(server.context.wrap_socket(one, server_hostname="127.0.0.1"))
                for one in crowd
            ]
        for one in crowd:
            one.sendall(said or b"\x16\x03\x01\x02\x00\x01")
        start = time.monotonic()
        assert server.review(review_of(POD))["allowed"] is True
        # With a thread each for their three seconds, four at a time, it would be 75.
        assert time.monotonic() - start < 12


def test_more_idle_connections_than_the_server_keeps_lock_nobody_out(server: Server) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048 and hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"1,100 sockets need more than the {hard} descriptors allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
        assert server.review(review_of(POD))["allowed"] is True


def test_a_key_with_a_password_is_no_certificate(tmp_path: Path, tls: Files) -> None:
    """OpenSSL would ask on the terminal, and the server would wait there for ever."""
    key = serialization.load_pem_private_key(tls.key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    leader, follower = pty.openpty()
    code = (
        "import fcntl, sys, termios; from webhook.tls import ReloadingContext;"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0); ReloadingContext(*sys.argv[1:]).current()"
    )
    command = [sys.executable, "-c", code, str(tls.cert), str(locked)]
    try:
        done = subprocess.run(
            command,
            stdin=follower,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=30,
            check=False,
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 1
    assert b"SSLError" in done.stderr
