"""What the webhook's tests share: golden pairs, a running server, a way to ask it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonpatch
import trustme
import yaml

from webhook.config import Config, parse_config
from webhook.profiles import Level

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

GOLDEN = Path(__file__).parent / "golden"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Golden:
    """A pod, the circumstances it is reviewed in, and what becomes of it."""

    name: str
    config_text: str
    config: Config
    level: Level | None
    oldest: tuple[int, int] | None
    pod: dict[str, Any]
    after: dict[str, Any]
    warnings: list[str]
    outcome: str

    @property
    def path(self) -> str:
        return f"/mutate/{self.level}" if self.level else "/mutate"

    @property
    def namespace(self) -> str:
        return str(self.pod["metadata"].get("namespace") or "")

    @property
    def uid(self) -> str:
        """What the offline command takes for the request's uid."""
        return f"{self.namespace}/Pod/{self.pod['metadata'].get('name') or ''}"


def read_golden(path: Path) -> Golden:
    """Reads a pair: ``NAME.yaml`` (circumstances, pod) and ``NAME.after.yaml`` (outcome, pod)."""
    given, pod = yaml.safe_load_all(path.read_text())
    after_path = path.with_suffix(".after.yaml")
    said, after = {}, {}
    if after_path.exists():
        said, after = yaml.safe_load_all(after_path.read_text())
    config_text = yaml.safe_dump(given.get("config") or {})
    oldest = given.get("oldest")
    major, minor = map(int, str(oldest).split(".")) if oldest else (0, 0)
    return Golden(
        name=path.stem,
        config_text=config_text,
        config=parse_config(config_text),
        level=Level(given["level"]) if given.get("level") else None,
        oldest=(major, minor) if oldest else None,
        pod=pod,
        after=after,
        warnings=said.get("warnings") or [],
        outcome=said.get("outcome") or "",
    )


def golden_pairs() -> list[Golden]:
    """All of them."""
    paths = sorted(p for p in GOLDEN.glob("*.yaml") if not p.name.endswith(".after.yaml"))
    return [read_golden(path) for path in paths]


def review_of(pod: Any, *, uid: str = "uid-1", namespace: str = "", **more: Any) -> dict[str, Any]:
    """An AdmissionReview for the creation of a pod, as the API server sends it."""
    request = {
        "uid": uid,
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": namespace,
        "operation": "CREATE",
        "object": pod,
    }
    metadata = pod.get("metadata") if isinstance(pod, dict) else None
    if isinstance(metadata, dict) and metadata.get("name"):
        request["name"] = metadata["name"]
    request |= more
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def patched(pod: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """The pod after the response's patch, applied by a library that is not ours."""
    if "patch" not in response:
        return pod
    assert response["patchType"] == "JSONPatch"
    result: dict[str, Any] = jsonpatch.apply_patch(pod, base64.b64decode(response["patch"]))
    return result


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Files:
    """A CA and a certificate of it, on disk."""

    folder: Path
    ca: trustme.CA

    @classmethod
    def make(cls, folder: Path) -> Files:
        files = cls(folder, trustme.CA())
        files.ca.cert_pem.write_to_path(str(files.root))
        files.issue()
        return files

    @property
    def root(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def cert(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    def issue(self) -> None:
        """Puts a new certificate in place of the one that is there."""
        leaf = self.ca.issue_cert("127.0.0.1", "localhost")
        for blob, path in ((leaf.private_key_pem, self.key), (leaf.cert_chain_pems[0], self.cert)):
            new = path.with_suffix(".new")
            blob.write_to_path(str(new))
            new.replace(path)


@dataclass
class Server:
    """A running ``kitty-webhook serve``."""

    process: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    context: ssl.SSLContext
    log: Path

    def connection(self, timeout: float = 20) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, context=self.context, timeout=timeout
        )

    def post(self, body: bytes | Any, path: str = "/mutate") -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(self.connection()) as connection:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def review(self, body: Any, path: str = "/mutate") -> dict[str, Any]:
        status, data = self.post(body, path)
        assert status == 200, data
        response: dict[str, Any] = json.loads(data)["response"]
        return response

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def metric(self, sample: str) -> float | None:
        """The value of a sample, written as the page shows it; None where it is absent."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(sample + " "):
                return float(line.rpartition(" ")[2])
        return None

    def certificate(self) -> bytes:
        """The certificate that a new connection is shown, DER."""
        with (
            socket.create_connection(("127.0.0.1", self.port), 10) as plain,
            self.context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
        ):
            der = tls.getpeercert(binary_form=True)
            assert der
            return der


@contextlib.contextmanager
def running_server(
    folder: Path, *arguments: str, context: ssl.SSLContext, ready: str = "/readyz"
) -> Iterator[Server]:
    """Runs the real command on loopback until it answers."""
    port, metrics_port = free_port(), free_port()
    log = folder / "serve.log"
    command = [str(BIN / "kitty-webhook"), "serve", *arguments]
    command += ["--bind", f"127.0.0.1:{port}", "--metrics-bind", f"127.0.0.1:{metrics_port}"]
    with log.open("wb") as err, subprocess.Popen(command, stderr=err) as process:
        server = Server(process, port, metrics_port, context, log)
        try:
            wait_until(lambda: server.get(ready)[0] == 200, log=log)
            yield server
        finally:
            process.terminate()


def wait_until(condition: Any, *, seconds: float = 60, log: Path | None = None) -> None:
    """Waits for a condition; an OSError counts as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(log.read_text()[-2000:] if log else "condition never held")
        time.sleep(0.05)
