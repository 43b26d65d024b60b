"""The objects of other projects' kinds, where the cluster knows these: accepted as they are."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.e2e.install import ROOT, Install
from tests.e2e.kube import SYSTEM, Kube

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = {
    "cert-manager": "cert-manager.io",
    "prometheus-operator": "monitoring.coreos.com",
}


@pytest.mark.parametrize("overlay", GROUPS)
def test_the_server_takes_them_to_the_last_field(
    overlay: str, install: Install, kube: Kube, tmp_path: Path
) -> None:
    assert install.kube.exists(f"/api/v1/namespaces/{SYSTEM}")
    rendered = kube.kubectl("kustomize", str(ROOT / "manifests" / "overlays" / overlay))
    foreign: list[dict[str, Any]] = [
        one for one in yaml.safe_load_all(rendered) if one["apiVersion"].startswith(GROUPS[overlay])
    ]
    assert foreign
    known = kube.kubectl("api-resources", f"--api-group={GROUPS[overlay]}", "-o", "name")
    for one in foreign:
        if f"{one['kind'].lower()}s." not in known:
            pytest.skip(f"this cluster has no kind {one['kind']} of {GROUPS[overlay]}")
    path = tmp_path / "foreign.yaml"
    path.write_text(yaml.safe_dump_all(foreign))
    sent = ["kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", str(path)]
    done = subprocess.run(sent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(server dry run)") == len(foreign)
