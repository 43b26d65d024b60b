"""Loads the images and installs kitty the way its documentation says."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

import sidecar
from tests.e2e.kube import SYSTEM, Kube
from webhook.cluster import WEBHOOKS

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "build" / "images"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/kitty-webhook"
CONFIGURATION = f"{WEBHOOKS}/kitty-webhook"


def archives() -> list[Path]:
    """Return where ``make images`` leaves the images."""
    return [IMAGES / f"kitty-{name}.tar" for name in ("webhook", "sidecar")]


def image(name: str) -> str:
    """Return the name that ``make images`` gives an image."""
    return f"localhost/kitty-{name}:{sidecar.__version__}"


def loader() -> list[str] | None:
    """Return the command that brings an archive into the cluster; None where none is known."""
    if command := os.environ.get("E2E_LOAD"):
        return shlex.split(command)
    done = subprocess.run(
        ["kubectl", "config", "current-context"], capture_output=True, text=True, check=False
    )
    kind, _, name = done.stdout.strip().partition("-")
    if kind == "kind" and shutil.which("kind"):
        return ["kind", "load", "image-archive", "--name", name]
    if kind == "k3d" and shutil.which("k3d"):
        return ["k3d", "image", "import", "--cluster", name]
    return None


def missing() -> str:
    """Return why these tests cannot run, in one line; empty where they can."""
    paths = [path for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    if not paths:
        return "KUBECONFIG names no cluster"
    if not any(map(os.path.exists, paths)):
        return f"KUBECONFIG names no cluster: {' and '.join(paths)} does not exist"
    if not shutil.which("kubectl"):
        return "kubectl is not there"
    if absent := [str(archive) for archive in archives() if not archive.exists()]:
        return f"no {' and no '.join(absent)}: run make images"
    answer = subprocess.run(
        ["kubectl", "get", "--raw", "/readyz"], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        why = " ".join(answer.stderr.split()[-40:])
        return f"the cluster that KUBECONFIG names does not answer: {why}"
    if not loader():
        return "no way to load images: neither a kind nor a k3d cluster, and E2E_LOAD is not set"
    return ""


@dataclass(frozen=True)
class Install:
    """kitty in a cluster."""

    kube: Kube

    def overlay(self, name: str, **settings: str) -> str:
        """Write a kustomization as a user would, with settings in place of the base's.

        Returns:
            Its folder.
        """
        folder = ROOT / "build" / "e2e" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = {"image": image("sidecar")} | {k.replace("_", "-"): v for k, v in settings.items()}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        generator = {
            "name": "kitty-webhook-settings",
            "namespace": SYSTEM,
            "behavior": "replace",
            "files": ["config.yaml"],
        }
        kustomization = {
            "resources": ["../../../manifests/overlays/prometheus"],
            "configMapGenerator": [generator],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return str(folder)

    def apply(self, name: str = "default", **settings: str) -> None:
        """Install, or change what is installed, and wait until it serves."""
        self.kube.kubectl("apply", "-k", self.overlay(name, **settings))
        self.rolled_out()

    def rolled_out(self) -> None:
        """Wait until every replica is of the newest kind and every entry has its bundle."""
        self.kube.kubectl(
            "rollout", "status", "-n", SYSTEM, "deployment/kitty-webhook", "--timeout=120s"
        )
        self.kube.wait("caBundle in every entry", self.trusted)
        self.kube.wait("nothing of the old replicas", lambda: len(self.replicas()) == 2)

    def trusted(self) -> bool:
        """Tell whether every entry has a caBundle."""
        entries = self.kube.api.get(CONFIGURATION)["webhooks"]
        return all(entry["clientConfig"].get("caBundle") for entry in entries)

    def replicas(self) -> list[str]:
        """List the webhook's pods."""
        selector = "app.kubernetes.io/component=webhook"
        return [pod["metadata"]["name"] for pod in self.kube.pods(SYSTEM, selector)]

    def ensure(self) -> None:
        """Install unless it is there and whole."""
        if self.kube.exists(CONFIGURATION) and self.kube.exists(DEPLOYMENT):
            status = self.kube.api.get(DEPLOYMENT).get("status", {})
            if status.get("readyReplicas") == 2 and self.trusted():
                return
        self.apply()

    def remove(self) -> None:
        """Uninstall as documented."""
        self.kube.kubectl("delete", "-k", self.overlay("default"), "--timeout=120s")

    def count(self, name: str, **labels: str) -> int:
        """Return the sum of a counter over all replicas."""
        total = 0.0
        for replica in self.replicas():
            page = self.kube.samples(SYSTEM, replica, 8080)
            assert page, f"{replica} serves no metrics"
            total += sum(
                s.value for s in page if s.name == name and labels.items() <= s.labels.items()
            )
        return int(total)

    def reviews(self) -> int:
        """Return how many reviews all replicas have answered."""
        return self.count("kitty_webhook_requests_total")

    def certificate_expiries(self) -> list[float]:
        """Return when the certificate of each replica expires."""
        wanted = "kitty_webhook_certificate_expiry_timestamp_seconds"
        pages = [self.kube.samples(SYSTEM, replica, 8080) for replica in self.replicas()]
        return [s.value for page in pages for s in page if s.name == wanted]


def load() -> None:
    """Bring both images into the cluster."""
    command = loader()
    assert command
    for archive in archives():
        subprocess.run([*command, str(archive)], check=True, capture_output=True)


def now() -> float:
    """Return a clock for durations."""
    return time.monotonic()


if __name__ == "__main__":
    sys.exit(f"e2e: {why}" if (why := missing()) else 0)
