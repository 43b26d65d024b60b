"""The cluster that KUBECONFIG names, with kitty in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.install import Install, archives, image, load, loader
from tests.e2e.kube import Kube


def _missing() -> str:
    """Return why these tests cannot run; empty where they can."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG names no cluster"
    if not shutil.which("kubectl"):
        return "kubectl is not there"
    if absent := [str(archive) for archive in archives() if not archive.exists()]:
        return f"no {' and no '.join(absent)}: run make images"
    answer = subprocess.run(
        ["kubectl", "get", "--raw", "/readyz"], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        return f"the cluster that KUBECONFIG names does not answer: {answer.stderr.strip()}"
    if not loader():
        return "no way to load images: neither a kind nor a k3d cluster, and E2E_LOAD is not set"
    return ""


@pytest.fixture(scope="session")
def kube() -> Iterator[Kube]:
    """Return the cluster; whatever the tests put there is gone afterwards."""
    if why := _missing():
        pytest.skip(why)
    cluster = Kube()
    ours = cluster.api.items("/api/v1/namespaces", labelSelector="kitty-e2e=true")
    cluster.drop_namespaces([namespace["metadata"]["name"] for namespace in ours])
    load()
    yield cluster
    install = Install(cluster)
    install.ensure()
    install.remove()
    cluster.api.close()


@pytest.fixture
def install(kube: Kube) -> Install:
    """Return kitty, installed."""
    made = Install(kube)
    made.ensure()
    return made


@pytest.fixture(scope="module")
def namespace(kube: Kube) -> Iterator[Callable[..., str]]:
    """Return a function that makes a namespace; all of them go with the module."""
    made: list[str] = []

    def make(name: str, **labels: str) -> str:
        made.append(f"kitty-e2e-{name}")
        return kube.namespace(made[-1], **labels)

    Install(kube).ensure()
    yield make
    kube.drop_namespaces(made)


@pytest.fixture(scope="session")
def trainer_image(kube: Kube) -> str:
    """Return an image with python3 and sh for the pods of the tests."""
    return os.environ.get("E2E_TRAINER_IMAGE", image("webhook"))
