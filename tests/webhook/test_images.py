"""What the nodes say of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.webhook.restpeer import Peer, running_peer
from tests.webhook.support import Files
from webhook.cluster import Cluster
from webhook.images import LISTED, Presence, full_name, presence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("kitty", "docker.io/library/kitty:latest"),
        ("kitty:1", "docker.io/library/kitty:1"),
        ("team/kitty:1", "docker.io/team/kitty:1"),
        ("localhost/kitty:1", "localhost/kitty:1"),
        ("registry.example:5000/kitty", "registry.example:5000/kitty:latest"),
        ("registry.example/kitty@sha256:ab", "registry.example/kitty@sha256:ab"),
    ],
)
def test_names_are_completed_as_runtimes_do(image: str, name: str) -> None:
    assert full_name(image) == name
    assert full_name(name) == name


@pytest.fixture
def peer(tmp_path: Path, tls: Files) -> Iterator[Peer]:
    with running_peer(tmp_path, tls) as running:
        yield running


def test_every_node_is_asked(peer: Peer) -> None:
    def node(number: int, images: list[str]) -> None:
        entries: list[Any] = [{"names": [name]} for name in images]
        status = {"images": [*entries, {"sizeBytes": 1}]}
        peer.put(f"/api/v1/nodes/{number}", {"metadata": {"name": str(number)}, "status": status})

    node(1, ["docker.io/library/kitty:1"])
    node(2, ["docker.io/library/kitty:2"])
    node(3, [f"docker.io/library/other:{i}" for i in range(LISTED)])
    peer.put("/api/v1/nodes/4", {"metadata": {"name": "4"}})
    cluster = Cluster.connect(kubeconfig=str(peer.kubeconfig))
    try:
        assert presence(cluster, "kitty:1") == Presence(nodes=4, having=1, unsure=1)
    finally:
        cluster.close()
