"""A real API server on loopback, for tests: etcd and kube-apiserver, no kubelet."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.webhook.support import free_port, wait_until
from webhook.cluster import Cluster, ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

KUBE_BIN = Path(os.environ.get("KUBE_BIN", "/usr/local/kubebuilder/bin"))
TOKEN = "kitty-test"


@dataclass(frozen=True)
class ApiServer:
    """A running API server.

    Attributes:
        kubeconfig: How to reach it, as a cluster administrator.
        cluster: A client with it.
        version: Major and minor, as its binary says.
    """

    kubeconfig: Path
    cluster: Cluster
    version: tuple[int, int]


def _etcd() -> str | None:
    return shutil.which("etcd") or shutil.which("etcd", path=str(KUBE_BIN))


def missing_binaries() -> str:
    """What keeps the API server from being started; empty when nothing does."""
    if not (KUBE_BIN / "kube-apiserver").exists():
        return f"no kube-apiserver in {KUBE_BIN} (set KUBE_BIN)"
    if not _etcd():
        return "no etcd (Debian: etcd-server)"
    return ""


@contextlib.contextmanager
def running_api_server(folder: Path) -> Iterator[ApiServer]:
    """Starts both, waits until the API is ready, and ends both."""
    etcd_port, peer_port, port = free_port(), free_port(), free_port()
    url = f"http://127.0.0.1:{etcd_port}"
    peer = f"http://127.0.0.1:{peer_port}"
    etcd = [str(_etcd()), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"]
    etcd += ["--listen-client-urls", url, "--advertise-client-urls", url]
    etcd += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    etcd += ["--initial-cluster", f"default={peer}"]
    kubeconfig = _files(folder, port)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(etcd, folder / "etcd.log"))
        wait_until(lambda: _listens(etcd_port))
        stack.enter_context(_process(_apiserver(folder, url, port), folder / "apiserver.log"))
        cluster = Cluster.connect(kubeconfig=str(kubeconfig))
        stack.callback(cluster.close)
        wait_until(lambda: _is_ready(cluster), seconds=120, log=folder / "apiserver.log")
        yield ApiServer(kubeconfig, cluster, _version())


def _listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1):
        return True


def _version() -> tuple[int, int]:
    said = subprocess.run(
        [str(KUBE_BIN / "kube-apiserver"), "--version"], capture_output=True, text=True, check=True
    )
    major, minor = said.stdout.split()[-1].removeprefix("v").split(".")[:2]
    return int(major), int(minor)


def _is_ready(cluster: Cluster) -> bool:
    try:
        cluster.get("/api/v1/namespaces/default")
    except ClusterError:
        return False
    return True


def _apiserver(folder: Path, etcd_url: str, port: int) -> list[str]:
    # In 1.28 native sidecars exist behind a gate; later it is open.
    gate = ["--feature-gates=SidecarContainers=true"] if _version() == (1, 28) else []
    return [
        str(KUBE_BIN / "kube-apiserver"),
        *gate,
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--tls-cert-file={folder / 'cert.pem'}",
        f"--tls-private-key-file={folder / 'key.pem'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        f"--service-account-key-file={folder / 'sa.pem'}",
        f"--service-account-signing-key-file={folder / 'sa.pem'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
        # Without a controller manager there are no service accounts to mount.
        "--disable-admission-plugins=ServiceAccount",
    ]


def _files(folder: Path, port: int) -> Path:
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "sa.pem").write_bytes(pem)
    return write_kubeconfig(folder / "kubeconfig", port, folder / "ca.pem", TOKEN)


def write_kubeconfig(path: Path, port: int, ca: Path, token: str) -> Path:
    """Writes a kubeconfig for an API on loopback."""
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(ca)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": "test", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
