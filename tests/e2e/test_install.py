"""What users apply is what the API server takes, and what comes up serves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.install import CONFIGURATION, ROOT, Install
from tests.e2e.kube import SYSTEM, Kube

OVERLAYS = sorted((ROOT / "manifests" / "overlays").iterdir())


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_server_takes_every_object(install: Install, kube: Kube, overlay: Path) -> None:
    """Kinds of other projects are left out where the cluster does not know them."""
    known = set(kube.kubectl("api-resources", "--no-headers", "-o", "name").split())
    rendered = list(yaml.safe_load_all(kube.kubectl("kustomize", str(overlay))))
    ours = [document for document in rendered if _resource(document) in known]
    assert len(ours) >= 11
    for document in ours:
        document["metadata"].pop("resourceVersion", None)
    kube.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump_all(ours)
    )


def _resource(document: dict[str, str]) -> str:
    group, _, _ = document["apiVersion"].rpartition("/")
    kind = document["kind"].lower()
    plural = kind[:-1] + "ies" if kind.endswith("y") else f"{kind}s"
    plural = {"priorityclass": "priorityclasses"}.get(kind, plural)
    return f"{plural}.{group}" if group else plural


def test_both_replicas_serve_in_a_restricted_namespace(install: Install, kube: Kube) -> None:
    namespace = kube.api.get(f"/api/v1/namespaces/{SYSTEM}")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert len(install.replicas()) == 2
    assert len(kube.api.get(CONFIGURATION)["webhooks"]) == 8


def test_check_finds_nothing_wrong(install: Install) -> None:
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr


def test_webhook_needs_no_shell_and_writes_nothing(install: Install, kube: Kube) -> None:
    """The root file system is read-only, and the process is the program itself."""
    replica = install.replicas()[0]
    script = "tr '\\0' ' ' </proc/1/cmdline; touch /opt/kitty/x 2>&1 || id -u"
    said = kube.execute(SYSTEM, replica, script, container="webhook")
    assert "kitty-webhook serve" in said
    assert "Read-only file system" in said
    assert said.strip().endswith("65532")


def check() -> subprocess.CompletedProcess[str]:
    command = shutil.which("kitty-webhook", path=str(Path(sys.executable).parent))
    assert command, "kitty-webhook is not installed beside this Python"
    return subprocess.run([command, "check"], capture_output=True, text=True, check=False)
