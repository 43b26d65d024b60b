"""What a kubelet reads from a pod's manifest before it starts a container."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Manifest = Mapping[str, Any]

REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
SUFFIXES = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


class UnsupportedError(ValueError):
    """The manifest asks for something that the lab does not do."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What is known of a pod only once it has a place.

    Attributes:
        node: Name of the node.
        pod_ip: The pod's address.
        host_ip: The node's address.
        uid: The pod's uid.
    """

    node: str
    pod_ip: str
    host_ip: str
    uid: str


def containers_in_order(pod: Manifest) -> list[Mapping[str, Any]]:
    """Return the containers that run beside each other, in the order in which they start.

    Native sidecars are init containers with ``restartPolicy: Always``; they start first.

    Raises:
        UnsupportedError: There is an init container of the ordinary kind.
    """
    initial = list(pod["spec"].get("initContainers", []))
    for container in initial:
        if container.get("restartPolicy") != "Always":
            raise UnsupportedError(f"init container {container['name']} is no sidecar")
    return [*initial, *pod["spec"]["containers"]]


def environment(pod: Manifest, container: Manifest, placement: Placement) -> dict[str, str]:
    """Resolve a container's ``env``: values, ``$(NAME)`` references and ``fieldRef``.

    Raises:
        UnsupportedError: A value comes from elsewhere.
    """
    resolved: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom")
        if source is None:
            resolved[entry["name"]] = expand(entry.get("value", ""), resolved)
        elif "fieldRef" in source:
            resolved[entry["name"]] = field(pod, source["fieldRef"]["fieldPath"], placement)
        else:
            raise UnsupportedError(f"env {entry['name']}: valueFrom {'/'.join(source)}")
    return resolved


def field(pod: Manifest, path: str, placement: Placement) -> str:
    """Return the value of a downward API field.

    Raises:
        UnsupportedError: The field is not one that the lab knows.
    """
    metadata = pod["metadata"]
    if match := KEYED_FIELD.fullmatch(path):
        return str(metadata.get(match[1], {}).get(match[2], ""))
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": placement.uid,
        "spec.nodeName": placement.node,
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
        "status.podIP": placement.pod_ip,
        "status.podIPs": placement.pod_ip,
        "status.hostIP": placement.host_ip,
        "status.hostIPs": placement.host_ip,
    }
    if path not in known:
        raise UnsupportedError(f"fieldPath {path}")
    return str(known[path])


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand ``$(NAME)``; ``$$`` is a dollar sign, an unknown name stays as it stands."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return REFERENCE.sub(value, text)


def command_line(
    container: Manifest, env: Mapping[str, str], entrypoints: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return what a container runs: ``command`` and ``args``, or its image's entrypoint.

    Args:
        container: From the pod's spec.
        env: Its resolved environment.
        entrypoints: By image name without registry, tag and digest.

    Raises:
        UnsupportedError: It has no command and an image of unknown entrypoint.
    """
    command = container.get("command")
    if not command:
        image = re.split(r"[:@]", str(container.get("image", "")).rpartition("/")[2])[0]
        if image not in entrypoints:
            raise UnsupportedError(f"container {container['name']}: no entrypoint for {image!r}")
        command = entrypoints[image]
    return [expand(word, env) for word in [*command, *container.get("args", [])]]


def quantity(text: str | float) -> float:
    """Return the number that a resource quantity stands for: ``250m``, ``64Mi``, ``2``.

    Raises:
        UnsupportedError: It is no quantity.
    """
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if match is None or (match[2] and match[2] not in SUFFIXES):
        raise UnsupportedError(f"quantity {text!r}")
    return float(match[1]) * SUFFIXES.get(match[2], 1.0)


def declared_port(container: Manifest, name: str) -> int | None:
    """Return a container's port of that name."""
    for port in container.get("ports", []):
        if port.get("name") == name:
            return int(port["containerPort"])
    return None
