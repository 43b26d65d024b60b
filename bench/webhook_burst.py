"""What the webhook costs: bursts, open loop, a big pod, memory; beside a bare Flask app.

Run by hand: ``python bench/webhook_burst.py [--rounds N]``. Both servers run under the same
gunicorn settings, take turns, and are driven over kept-alive TLS by one asyncio client in a
process of its own. The bare application parses the review and allows it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator  # noqa: TC003 -- a script
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

PODS = 1028
IN_FLIGHT = 32
REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

_BARE = """
from flask import Flask, request
app = Flask("bare")
@app.post("/mutate")
def mutate():
    uid = request.get_json()["request"]["uid"]
    response = {"uid": uid, "allowed": True}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
"""


def training_pod() -> dict[str, Any]:
    """A pod of a PyTorchJob as clusters have them: eight GPUs, RDMA, mounts, some 40 variables."""
    env: list[dict[str, Any]] = [
        {"name": f"NCCL_SETTING_{i}", "value": f"value-{i}" * 3} for i in range(40)
    ]
    env += [
        {"name": "RANK", "value": "3"},
        {"name": "MASTER_ADDR", "value": "llama-master-0"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
    ]
    resources = {"cpu": "96", "memory": "1000Gi", "nvidia.com/gpu": "8", "rdma/hca": "8"}
    mounts = [{"name": f"volume-{i}", "mountPath": f"/data/{i}"} for i in range(8)]
    volumes = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": f"claim-{i}"}}
        for i in range(8)
    ]
    fields: dict[str, Any] = {f"f:field-{i}": {"f:name": {}, "f:value": {}} for i in range(60)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "llama-worker-2",
            "labels": {
                "training.kubeflow.org/job-name": "llama",
                "training.kubeflow.org/operator-name": "pytorchjob-controller",
                "training.kubeflow.org/replica-type": "worker",
                "training.kubeflow.org/replica-index": "2",
            },
            "annotations": {"sidecar.istio.io/inject": "false"},
            "ownerReferences": [
                {"kind": "PyTorchJob", "name": "llama", "uid": "u", "controller": True}
            ],
            "managedFields": [{"manager": "training-operator", "fieldsV1": fields}],
        },
        "spec": {
            "restartPolicy": "Never",
            "volumes": volumes,
            "containers": [
                {
                    "name": "pytorch",
                    "image": "train",
                    "command": ["torchrun", "--nproc-per-node=8", "train.py"],
                    "env": env,
                    "resources": {"limits": resources, "requests": resources},
                    "volumeMounts": mounts,
                }
            ],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
    }


def big_pod(containers: int, variables: int) -> dict[str, Any]:
    """A pod with that many containers and that many variables in all of them together."""
    each = variables // containers
    env = [{"name": f"VARIABLE_{i}", "value": "x" * 40} for i in range(each)]
    made = [{"name": f"c-{i}", "image": "i", "env": env} for i in range(containers)]
    return {"kind": "Pod", "metadata": {"name": "big"}, "spec": {"containers": made}}


def review(pod: dict[str, Any], uid: str) -> bytes:
    """A request for it, as the API server sends it."""
    request = {
        "uid": uid,
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "name": "llama-worker-2",
        "namespace": "ml",
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kubeflow:training-operator"},
        "object": pod,
        "oldObject": None,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }
    envelope = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}
    return json.dumps(envelope).encode()


@dataclass(frozen=True)
class Server:
    """One server under test."""

    name: str
    port: int
    metrics: int
    process: subprocess.Popen[bytes]
    ca: str


class Connection:
    """One kept-alive connection that sends one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, server: Server) -> Connection:
        context = ssl.create_default_context(cafile=server.ca)
        return cls(*await asyncio.open_connection("127.0.0.1", server.port, ssl=context))

    async def post(self, body: bytes) -> bytes:
        head = (
            "POST /mutate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:80].decode())
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


async def opened(server: Server, body: bytes) -> list[Connection]:
    """Connections that have been used before the clock starts: the API server's are old."""
    connections = []
    for _ in range(IN_FLIGHT):
        connection = await Connection.open(server)
        await connection.post(body)
        connections.append(connection)
    return connections


async def burst(
    connections: list[Connection], bodies: list[bytes]
) -> tuple[float, list[float], int]:
    """All bodies, one at a time on each: seconds in all, seconds of each, answers with a patch."""
    waiting = iter(bodies)
    took: list[float] = []
    patched = 0

    async def work(connection: Connection) -> None:
        nonlocal patched
        for body in waiting:
            start = time.perf_counter()
            answer = await connection.post(body)
            took.append(time.perf_counter() - start)
            patched += b'"patch"' in answer

    start = time.perf_counter()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(work(connection))
    return time.perf_counter() - start, took, patched


async def open_loop(server: Server, bodies: list[bytes], rate: float) -> list[float]:
    """Bodies at a fixed rate, whatever the answers do: seconds from the due time to the answer."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for connection in await opened(server, bodies[0]):
        free.put_nowait(connection)
    loop, took = asyncio.get_running_loop(), []
    begin = loop.time() + 0.05

    async def one(body: bytes, due: float) -> None:
        await asyncio.sleep(due - loop.time())
        connection = await free.get()
        await connection.post(body)
        took.append(loop.time() - due)
        free.put_nowait(connection)

    await asyncio.gather(*(one(body, begin + i / rate) for i, body in enumerate(bodies)))
    while not free.empty():
        free.get_nowait().close()
    return took


def percentile(values: list[float], q: float) -> float:
    """The q-th percentile, in milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))] * 1000


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], name: str, port: int, metrics: int, ca: str) -> Iterator[Server]:
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{name} did not start")
            time.sleep(0.1)
        yield Server(name, port, metrics, process, ca)
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[Server, Server]]:
    """The webhook and a bare Flask application, both up."""
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1", "localhost")
    cert, key, root = (str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    leaf.cert_chain_pems[0].write_to_path(cert)
    leaf.private_key_pem.write_to_path(key)
    ca.cert_pem.write_to_path(root)
    (folder / "bare.py").write_text(_BARE)
    a, b, c = free_port(), free_port(), free_port()
    ours = [str(BIN / "kitty-webhook"), "serve", "--tls-cert", cert, "--tls-key", key]
    ours += ["--bind", f"127.0.0.1:{a}", "--metrics-bind", f"127.0.0.1:{b}"]
    bare = [str(BIN / "gunicorn"), "--bind", f"127.0.0.1:{c}", "--certfile", cert]
    bare += ["--keyfile", key, "--workers", "1", "--worker-class", "gthread", "--threads", "4"]
    bare += ["--keep-alive", "120", "--no-control-socket", "--log-level", "critical"]
    bare += ["--chdir", str(folder), "bare:app"]
    with running(ours, "kitty-webhook", a, b, root) as webhook:  # noqa: SIM117 -- reads as an order
        with running(bare, "bare Flask", c, 0, root) as flask:
            time.sleep(1)
            yield webhook, flask


def memory(server: Server) -> tuple[float, float]:
    """RSS and PSS of all its processes together, MB."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    rss = pss = 0
    for pid in (str(server.process.pid), *children.split()):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "Rss":
                rss += int(rest.split()[0])
            elif name == "Pss":
                pss += int(rest.split()[0])
    return rss / 1024, pss / 1024


async def bench_bursts(webhook: Server, flask: Server, rounds: int) -> None:
    bodies = [review(training_pod(), f"uid-{i}") for i in range(PODS)]
    print(
        f"burst: {PODS} reviews of {len(bodies[0])} bytes, {IN_FLIGHT} in flight, {rounds} rounds"
    )
    connections = {server.name: await opened(server, bodies[0]) for server in (webhook, flask)}
    results: dict[str, list[tuple[float, float, float]]] = {webhook.name: [], flask.name: []}
    cpu = {webhook.name: 0.0, flask.name: 0.0}
    missed = 0
    for i in range(rounds + 1):
        for server in (webhook, flask):
            before = cpu_seconds(server)
            total, took, patched = await burst(connections[server.name], bodies)
            cpu[server.name] += (cpu_seconds(server) - before) if i else 0
            missed += PODS - patched if server is webhook else 0
            if i:  # the first one warms up
                row = (total, percentile(took, 50), percentile(took, 99))
                results[server.name].append(row)
    ratios = [
        ours[2] / bare[2]
        for ours, bare in zip(results[webhook.name], results[flask.name], strict=True)
    ]
    for name, rows in results.items():
        total, p50, p99 = (statistics.median(column) for column in zip(*rows, strict=True))
        best = min(row[0] for row in rows)
        print(
            f"  {name:14} total {total:.2f} s (best {best:.2f}), p50 {p50:.1f} ms, "
            f"p99 {p99:.1f} ms (medians of rounds), "
            f"CPU {cpu[name] / rounds / PODS * 1e6:.0f} us a review"
        )
    print(
        f"  p99 ratio: median {statistics.median(ratios):.2f}, all {[round(r, 2) for r in ratios]}"
    )
    print(f"  pods missed: {missed}")


def cpu_seconds(server: Server) -> float:
    """CPU time that all its processes have taken."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks = 0
    for each in (str(pid), *children):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def bench_open_loop(webhook: Server) -> None:
    bodies = [review(training_pod(), f"uid-{i}") for i in range(1000)]
    took = asyncio.run(open_loop(webhook, bodies, rate=100))
    print(
        f"open loop, 100/s for 10 s: p50 {percentile(took, 50):.1f} ms, "
        f"p99 {percentile(took, 99):.1f} ms, max {max(took) * 1000:.1f} ms"
    )


def bench_big_pods(webhook: Server) -> None:
    for containers, variables in ((50, 2000), (100, 4000), (200, 8000)):
        body = review(big_pod(containers, variables), "big")

        async def repeat(body: bytes = body) -> list[float]:
            connection = await Connection.open(webhook)
            took = []
            for _ in range(31):
                start = time.perf_counter()
                await connection.post(body)
                took.append(time.perf_counter() - start)
            connection.close()
            return took

        took = asyncio.run(repeat())
        print(
            f"big pod: {containers} containers, {variables} variables, {len(body) / 1024:.0f} KiB: "
            f"median {statistics.median(took) * 1000:.1f} ms, max {max(took) * 1000:.1f} ms"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as (webhook, flask):
        print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        asyncio.run(bench_bursts(webhook, flask, rounds))
        bench_open_loop(webhook)
        bench_big_pods(webhook)
        rss, pss = memory(webhook)
        print(f"memory of all processes: RSS {rss:.1f} MB, PSS {pss:.1f} MB")
        with urllib.request.urlopen(f"http://127.0.0.1:{webhook.metrics}/metrics") as page:
            errors = [
                x
                for x in page.read().decode().splitlines()
                if x.startswith("kitty_webhook_errors_total")
            ]
        print(f"{errors[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
