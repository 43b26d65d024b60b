"""JSON Patch (RFC 6902), as much of it as the mutation writes: ``add``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence


class Operation(TypedDict):
    """One operation; an ``add`` to a key that exists replaces its value."""

    op: str
    path: str
    value: Any


@functools.lru_cache(maxsize=64)
def pointer(*parts: str) -> str:
    """A JSON pointer (RFC 6901) from unescaped parts."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)


def add(path: str, value: Any) -> Operation:
    """Sets a key, or appends where the path ends in ``/-``."""
    return {"op": "add", "path": path, "value": value}


def apply(target: Any, operations: Sequence[Operation]) -> None:
    """Applies operations in place.

    Args:
        target: The JSON document.
        operations: Of this module's making: every parent is there.
    """
    for operation in operations:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        node = target
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        if isinstance(node, list):
            node.append(operation["value"])
        else:
            node[last] = operation["value"]
