"""Two databases that scrape with the configuration that is shipped, each in a pod of its own.

Debian's Prometheus is built without the cluster's API: it is told the targets that its pod role
would have found, and does the rest. Debian's VictoriaMetrics reads the same file as it stands and
asks the API itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from tests.e2e.install import ROOT
from tests.e2e.kube import Json, Kube, all_ready, pod_of

CACHE = ROOT / ".cache" / "debian"
SCRAPE = ROOT / "manifests" / "components" / "prometheus" / "kitty-scrape.yaml"


@dataclass(frozen=True)
class Kind:
    """A database: Debian's package and program, its flags, and whether it asks the API."""

    name: str
    flags: str
    discovers: bool


PROMETHEUS = Kind(
    "prometheus",
    "--config.file=/etc/scrape/scrape.yaml --storage.tsdb.path=/data/db --web.listen-address=:9090",
    discovers=False,
)
VICTORIA = Kind(
    "victoria-metrics",
    "-promscrape.config=/etc/scrape/scrape.yaml -storageDataPath=/data/db "
    "-httpListenAddr=:9090 -search.latencyOffset=0s",
    discovers=True,
)


@dataclass(frozen=True)
class Database:
    """One that scrapes."""

    kube: Kube
    namespace: str

    def ask(self, what: str) -> list[Json]:
        """Run an instant query."""
        path = self.kube.proxy(self.namespace, "database", 9090)
        answer = json.loads(self.kube.text(f"{path}/api/v1/query?query={quote(what)}"))
        found: list[Json] = answer["data"]["result"]
        return found


def program(package: str) -> Path:
    """Return a program of a Debian package that has its name, unpacked but not installed."""
    path = CACHE / package / "usr" / "bin" / package
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for command in (["download"], ["update"], ["download"]):
            words = ["apt-get", "-qq", *command, *([package] if command == ["download"] else [])]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
            if archives := list(Path(folder).glob(f"{package}_*.deb")):
                subprocess.run(
                    ["dpkg-deb", "-x", str(archives[0]), str(CACHE / package)], check=True
                )
                return path
    pytest.skip(f"{package} cannot be downloaded: {done.stderr.strip()}")


@contextmanager
def database(kube: Kube, kind: Kind, home: str, image: str, scraped: str) -> Iterator[Database]:
    """Start a database in a namespace; the pods of another one are there already."""
    binary = program(kind.name)
    scrape = yaml.safe_load(SCRAPE.read_text())
    files = {}
    if not kind.discovers:
        files["targets.json"] = json.dumps(targets(kube.pods(scraped)))
        for entry in scrape["scrape_configs"]:
            del entry["kubernetes_sd_configs"]
            entry["file_sd_configs"] = [{"files": ["/etc/scrape/targets.json"]}]
    files["scrape.yaml"] = SCRAPE.read_text() if kind.discovers else yaml.safe_dump(scrape)
    kube.apply(*_rights(home), _config(home, files))
    try:
        kube.api.create(f"/api/v1/namespaces/{home}/pods", _pod(kind, image))
        kube.wait("the database's pod", lambda: all_ready(kube.pod(home, "database")))
        script = "cat >/data/program && chmod 755 /data/program && touch /data/go"
        copy = ["kubectl", "exec", "-i", "-n", home, "database", "--", "sh", "-c", script]
        with binary.open("rb") as file:
            subprocess.run(copy, stdin=file, check=True, timeout=120, capture_output=True)
        yield Database(kube, home)
    finally:
        kube.kubectl("delete", f"clusterrole/{home}", f"clusterrolebinding/{home}")


def _rights(home: str) -> list[Json]:
    rbac = "rbac.authorization.k8s.io"
    role = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    metadata = {"name": home}
    return [
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": metadata,
            "rules": [role],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": home},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": home}],
        },
    ]


def _config(home: str, files: dict[str, str]) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "scrape", "namespace": home},
        "data": files,
    }


def _pod(kind: Kind, image: str) -> Json:
    run = f"while [ ! -e /data/go ]; do sleep 0.2; done; exec /data/program {kind.flags}"
    volumes = [
        {"name": "data", "emptyDir": {}},
        {"name": "scrape", "configMap": {"name": "scrape"}},
    ]
    pod = pod_of("database", ["sh", "-c", run], image=image, volumes=volumes)
    container = pod["spec"]["containers"][0]
    container["resources"]["limits"]["memory"] = "512Mi"
    container["volumeMounts"] = [
        {"name": "data", "mountPath": "/data"},
        {"name": "scrape", "mountPath": "/etc/scrape"},
    ]
    return pod


def targets(pods: list[Json]) -> list[Json]:
    """List what Prometheus's pod role finds: each port of each container, or the container.

    The labels are those of its documentation; the selector of the shipped file is applied.
    """
    found = []
    for pod in pods:
        metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
        if metadata.get("labels", {}).get("kitty.k10s.dev/injected") != "true":
            continue
        base = {
            "namespace": metadata["namespace"],
            "pod_name": metadata["name"],
            "pod_ip": status["podIP"],
            "pod_phase": status["phase"],
            "pod_node_name": spec["nodeName"],
        }
        for kind in ("label", "annotation"):
            for key, value in metadata.get(f"{kind}s", {}).items():
                base[f"pod_{kind}_{re.sub('[^a-zA-Z0-9_]', '_', key)}"] = value
        for init, group in (("false", "containers"), ("true", "initContainers")):
            for container in spec.get(group, []):
                of_container = base | {
                    "pod_container_name": container["name"],
                    "pod_container_init": init,
                }
                ports = container.get("ports") or [{}]
                found += [_target(of_container, port) for port in ports]
    return found


def _target(labels: dict[str, str], port: Json) -> Json:
    address = labels["pod_ip"]
    if port:
        host = f"[{address}]" if ":" in address else address
        address = f"{host}:{port['containerPort']}"
        labels = labels | {"pod_container_port_name": port.get("name", "")}
    named = {f"__meta_kubernetes_{key}": value for key, value in labels.items()}
    return {"targets": [address], "labels": named}
