"""A pod as raw JSON, read with care: what is missing or null is empty, what is misshapen is named.

Nothing here goes through typed models: an old model drops the fields that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

JsonObject = dict[str, Any]

MOST_CONTAINERS = 10_000
"""Of a pod; with the fields that the API server adds, what it can store holds far fewer."""


class UnreadablePodError(Exception):
    """A part of the pod has a shape that no Kubernetes API serves; the text names the part."""


def obj(value: Any, where: str) -> JsonObject:
    """The value as an object; empty where it is missing or null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnreadablePodError(f"{where} is no object")
    return value


def items(value: Any, where: str) -> list[JsonObject]:
    """The value as a list of objects; empty where it is missing or null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnreadablePodError(f"{where} is no list")
    for item in value:
        if not isinstance(item, dict):
            raise UnreadablePodError(f"{where} holds what is no object")
    return value


def texts(value: Any, where: str) -> dict[str, str]:
    """The value as a map of strings, such as labels; empty where it is missing or null."""
    found = obj(value, where)
    for key, text in found.items():
        if not isinstance(text, str):
            raise UnreadablePodError(f"{where}: the value of {key[:48]} is no string, quote it")
    return found


def text(value: Any) -> str:
    """The value where it is a string, else an empty one."""
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class Container:
    """One container of the pod and where it stands in it.

    Attributes:
        raw: Its JSON object.
        path: Its JSON pointer in the pod, such as ``/spec/containers/0``.
    """

    raw: JsonObject
    path: str

    @property
    def name(self) -> str:
        """Its name; empty where it has none."""
        return text(self.raw.get("name"))

    @cached_property
    def _variables(self) -> dict[str, JsonObject]:
        entries = items(self.raw.get("env"), f"{self.path}/env")
        return {name: e for e in entries if isinstance(name := e.get("name"), str)}

    def variable(self, name: str) -> JsonObject | None:
        """The entry that defines a variable: of several, the last one wins."""
        return self._variables.get(name)

    def resources(self, kind: str) -> JsonObject:
        """Its ``limits`` or ``requests``."""
        where = f"{self.path}/resources"
        return obj(obj(self.raw.get("resources"), where).get(kind), f"{where}/{kind}")

    def security_context(self) -> JsonObject:
        """Its securityContext."""
        return obj(self.raw.get("securityContext"), f"{self.path}/securityContext")


@dataclass(frozen=True)
class Pod:
    """A pod whose outer parts have been found to have their shape."""

    raw: JsonObject
    metadata: JsonObject
    spec: JsonObject
    labels: dict[str, str]
    annotations: dict[str, str]
    containers: tuple[Container, ...]
    init_containers: tuple[Container, ...]

    @classmethod
    def read(cls, raw: Any) -> Pod:
        """Looks at the parts that every decision needs.

        Args:
            raw: The pod's JSON; shared, never changed.

        Raises:
            UnreadablePodError: One of them is misshapen.
        """
        if not isinstance(raw, dict):
            raise UnreadablePodError("the object is no object")
        metadata = obj(raw.get("metadata"), "/metadata")
        spec = obj(raw.get("spec"), "/spec")
        return cls(
            raw=raw,
            metadata=metadata,
            spec=spec,
            labels=texts(metadata.get("labels"), "/metadata/labels"),
            annotations=texts(metadata.get("annotations"), "/metadata/annotations"),
            containers=_containers(spec, "containers"),
            init_containers=_containers(spec, "initContainers"),
        )

    @property
    def host_network(self) -> bool:
        """Whether it shares the node's network namespace."""
        return self.spec.get("hostNetwork") is True

    @property
    def host_pid(self) -> bool:
        """Whether it shares the node's process namespace."""
        return self.spec.get("hostPID") is True

    @property
    def restart_policy(self) -> str:
        """When containers are started again: Always where the pod does not say."""
        return text(self.spec.get("restartPolicy")) or "Always"

    def security_context(self) -> JsonObject:
        """Its pod-level securityContext."""
        return obj(self.spec.get("securityContext"), "/spec/securityContext")


def _containers(spec: JsonObject, key: str) -> tuple[Container, ...]:
    found = items(spec.get(key), f"/spec/{key}")
    if len(found) > MOST_CONTAINERS:
        # A request holds a million empty ones, and seconds of work for nothing.
        raise UnreadablePodError(f"/spec/{key} holds more than {MOST_CONTAINERS}")
    return tuple(Container(raw, f"/spec/{key}/{i}") for i, raw in enumerate(found))
