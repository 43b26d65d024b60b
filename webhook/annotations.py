"""What a user may write on a pod or a namespace, key by key, and how each value is read.

The same fields, without the prefix, are keys of the configuration file: an annotation wins over
the configuration, the configuration over the default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from webhook.profiles import Profile
from webhook.quantities import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFIX = "kitty.k10s.dev/"

INJECT_LABEL = PREFIX + "inject"
"""On a namespace or a pod: "true" or "false"; the pod's wins; any other value counts as absent."""
INJECTED_LABEL = PREFIX + "injected"
"""Written on every injected pod ("true"), for label selectors."""
STATUS = PREFIX + "status"
"""Written by the webhook: JSON with version, profile, port, containers, or the skip reason."""
PORT = PREFIX + "port"
JOB = PREFIX + "job"

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""kubectl's own: which container exec and logs take; set only where absent."""

MAX_JOB = 253
_CPU_FLOOR = parse_quantity("10m")
_MEMORY_FLOOR = parse_quantity("64Mi")
# The grammar that kubelets hold an image to: one outside it never starts, and with a native
# sidecar neither does the training container.
# https://github.com/distribution/reference/blob/main/reference.go
_HOST = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_DOMAIN = (
    rf"(?:{_HOST}(?:\.{_HOST})+(?::\d{{1,5}})?|{_HOST}:\d{{1,5}}|\[[0-9a-fA-F:]+\](?::\d{{1,5}})?)"
)
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DIGEST = r"(?:sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128})"
_IMAGE = re.compile(
    rf"(?P<name>(?:{_DOMAIN}/)?{_COMPONENT}(?:/{_COMPONENT})*)(?::\w[\w.-]{{0,127}})?(?:@{_DIGEST})?",
    re.ASCII,
)
_MAX_IMAGE, _MAX_IMAGE_NAME = 512, 255
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

COLLECTORS = (
    *("pod", "tcp", "net", "rtt", "kernel", "system", "process", "rank", "matrix", "waiting"),
    *("anomaly", "cgroup", "rdma", "netdev", "gpu"),
)
"""What the sidecar knows by these names, in its order."""


class BadValueError(ValueError):
    """A value outside what its field allows."""


@dataclass(frozen=True)
class Field:
    """One setting: how it is read and what it may hold.

    Attributes:
        allowed: The allowed values in words.
        read: Turns the text into the value, or raises BadValueError.
    """

    allowed: str
    read: Callable[[str], Any]


def _one_of(*values: str) -> Field:
    def read(text: str) -> str:
        if text not in values:
            raise BadValueError
        return text

    return Field(", ".join(values), read)


def _profile(text: str) -> Profile:
    try:
        return Profile(text)
    except ValueError as error:
        raise BadValueError from error


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise BadValueError
    return int(text)


def _quantity(allowed: str, floor: Any) -> Field:
    def read(text: str) -> str:
        value = parse_quantity(text)
        if value is None or value <= 0 or (floor is not None and value < floor):
            raise BadValueError
        return text

    return Field(allowed, read)


def _image(text: str) -> str:
    match = _IMAGE.fullmatch(text) if len(text) <= _MAX_IMAGE else None
    if not match or len(match["name"]) > _MAX_IMAGE_NAME:
        raise BadValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _containers(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not names or not all(_NAME.fullmatch(name) for name in names):
        raise BadValueError
    return names


def _collectors(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not names or (names != ("all",) and set(names) - set(COLLECTORS)):
        raise BadValueError
    return names


def _job(text: str) -> str:
    job = text.strip()
    if not job or len(job) > MAX_JOB or not job.isprintable():
        raise BadValueError
    return job


FIELDS: Mapping[str, Field] = {
    "containers": Field("container names, comma separated", _containers),
    "profile": Field("privileged, capabilities, unprivileged", _profile),
    "native-sidecar": _one_of("auto", "true", "false"),
    "image": Field("an image such as registry.example/kitty:1.0", _image),
    "cpu-request": _quantity("a CPU quantity above 0", None),
    # Below these a runtime refuses to start the container, or the agent is killed while it
    # starts: with a native sidecar the training container would then not start either.
    "cpu-limit": _quantity("a CPU quantity, 10m or more", _CPU_FLOOR),
    "memory-request": _quantity("a memory quantity above 0", None),
    "memory-limit": _quantity("a memory quantity, 64Mi or more", _MEMORY_FLOOR),
    "port": Field("1-65535", _port),
    "job": Field(f"text of 1-{MAX_JOB} printable characters", _job),
    "collectors": Field("all, or some of " + ", ".join(COLLECTORS), _collectors),
}
"""Every annotation a user may set, by its name without the prefix."""
