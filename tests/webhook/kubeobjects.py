"""Kubernetes objects that the tests create, and what to leave out when two are compared."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from webhook.check import ENFORCE
from webhook.profiles import Level

if TYPE_CHECKING:
    from collections.abc import Callable

INJECT = "kitty.k10s.dev/inject"
CONFIGURATION = "kitty-webhook"


def namespace_body(name: str, *, inject: str | None, level: str | None = None) -> dict[str, Any]:
    """A namespace with its two labels."""
    labels = {INJECT: inject, ENFORCE: level}
    labels = {key: value for key, value in labels.items() if value is not None}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def webhook_configuration(
    client: Callable[[str], dict[str, Any]], *, name: str = CONFIGURATION
) -> dict[str, Any]:
    """The disjoint entries: by namespace and by pod, each times the four levels.

    Args:
        client: Gives the clientConfig for a path.
    """
    entries = []
    for level in (None, *Level):
        at_level: dict[str, Any] = (
            {"key": ENFORCE, "operator": "In", "values": [level]}
            if level
            else {"key": ENFORCE, "operator": "DoesNotExist"}
        )
        for by, namespace, pod in (
            ("namespace", ("In", "true"), ("NotIn", "false")),
            ("pod", ("NotIn", "true"), ("In", "true")),
        ):
            path = f"/mutate/{level}" if level else "/mutate"
            entries.append(
                {
                    "name": f"{by}-{level or 'unlabelled'}.webhook.kitty.k10s.dev",
                    "clientConfig": client(path),
                    "rules": [
                        {
                            "operations": ["CREATE"],
                            "apiGroups": [""],
                            "apiVersions": ["v1"],
                            "resources": ["pods"],
                        }
                    ],
                    "failurePolicy": "Ignore",
                    "sideEffects": "None",
                    "reinvocationPolicy": "IfNeeded",
                    "timeoutSeconds": 10,
                    "admissionReviewVersions": ["v1"],
                    "namespaceSelector": {"matchExpressions": [_label(*namespace), at_level]},
                    "objectSelector": {"matchExpressions": [_label(*pod)]},
                }
            )
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": entries,
    }


def _label(operator: str, value: str) -> dict[str, Any]:
    return {"key": INJECT, "operator": operator, "values": [value]}


def plain(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod without what the server writes anew for each, and without its name.

    A hostNetwork pod's port comes from the request's uid: only that it is one of the range counts.
    """
    pod = copy.deepcopy(pod)
    pod.pop("status", None)
    for key in ("uid", "creationTimestamp", "resourceVersion", "managedFields", "generation"):
        pod["metadata"].pop(key, None)
    if pod["metadata"].get("generateName"):
        pod["metadata"].pop("name", None)
    return {"pod": _without_ports(pod)}


def _without_ports(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_ports(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_ports(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"\b(19[1-9]\d\d|20[01]\d\d)\b", "PORT", node)
    return node
