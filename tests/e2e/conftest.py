"""The cluster that KUBECONFIG names, with kitty in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.install import Install, image, load, missing
from tests.e2e.kube import Kube


@pytest.fixture(scope="session")
def kube() -> Iterator[Kube]:
    """Return the cluster; whatever the tests put there is gone afterwards."""
    if why := missing():
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
