"""Whether the nodes have an image, as they say themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from webhook.cluster import Cluster

LISTED = 50
"""Images that a kubelet lists at most (its nodeStatusMaxImages)."""


@dataclass(frozen=True)
class Presence:
    """Where an image is.

    Attributes:
        nodes: Number of nodes.
        having: Those that list the image.
        unsure: Those that do not, but list so many that it may be there all the same.
    """

    nodes: int
    having: int
    unsure: int


def full_name(image: str) -> str:
    """The name with registry and tag, as container runtimes complete it."""
    first, slash, _ = image.partition("/")
    if not slash:
        image = f"docker.io/library/{image}"
    elif not ("." in first or ":" in first or first == "localhost"):
        image = f"docker.io/{image}"
    last = image.rpartition("/")[2]
    return image if ":" in last or "@" in last else f"{image}:latest"


def presence(cluster: Cluster, image: str) -> Presence:
    """Asks the nodes.

    Raises:
        ClusterError: The API refused.
    """
    wanted = full_name(image)
    nodes = having = unsure = 0
    for node in cluster.items("/api/v1/nodes"):
        images = (node.get("status") or {}).get("images") or []
        names = {full_name(name) for entry in images for name in entry.get("names") or []}
        nodes += 1
        having += wanted in names
        unsure += wanted not in names and len(images) >= LISTED
    return Presence(nodes, having, unsure)
