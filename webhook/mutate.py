"""From a decision to the operations of its patch, written down directly.

Nothing is copied and nothing is compared: the cost grows with the number of operations, which is
one for each watched container and a dozen more.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from webhook import __version__
from webhook import annotations as keys
from webhook.container import (
    driver_mount,
    driver_volume,
    needs_driver_volume,
    sidecar,
    token_mount,
)
from webhook.decision import WATCH, Decision, Plan, Restore, Skip, annotations_room
from webhook.patch import Operation, add, pointer
from webhook.pod import Pod, items, text

if TYPE_CHECKING:
    from webhook.config import Config

_DRIVER_VOLUME = "kitty-driver"
_NOTE = 256
"""More bytes than a status with a reason takes."""


def operations(pod: Pod, decision: Decision, config: Config) -> list[Operation]:
    """The patch that carries out a decision.

    Args:
        pod: The pod that was decided on; it is not changed.
        decision: What becomes of it.
        config: The webhook's configuration.

    Returns:
        The operations, in an order in which every parent exists; none where nothing changes.

    Raises:
        UnreadablePodError: A part that has to be written to is misshapen.
    """
    outcome = decision.outcome
    if isinstance(outcome, Restore):
        return [add(outcome.container.path + "/restartPolicy", "Always")]
    if isinstance(outcome, Skip) and outcome.quiet:
        return []
    found = _note(pod, outcome) if isinstance(outcome, Skip) else _inject(pod, outcome, config)
    if found and pod.raw.get("metadata") is None:
        return [add("/metadata", {}), *found]
    return found


def status(decision: Decision) -> dict[str, Any]:
    """What the ``status`` annotation says of a decision."""
    outcome = decision.outcome
    if isinstance(outcome, Plan):
        return {
            "version": __version__,
            "profile": outcome.profile.value,
            "port": outcome.port,
            "containers": [container.name for container in outcome.watched],
            "lifecycle": "native" if outcome.native else "ordinary",
        }
    if isinstance(outcome, Skip):
        return {"version": __version__, "skipped": outcome.value}
    return {}


def _note(pod: Pod, reason: Skip) -> list[Operation]:
    if annotations_room(pod) < _NOTE:
        return []
    wanted = {keys.STATUS: _compact(status(Decision(reason)))}
    return _set_all(pod, "annotations", pod.annotations, wanted)


def _inject(pod: Pod, plan: Plan, config: Config) -> list[Operation]:
    mark = {"name": WATCH, "value": "1"}
    found = [_append(c.raw, c.path, "env", mark) for c in plan.unmarked]
    if plan.share_process_namespace:
        found.append(add("/spec/shareProcessNamespace", True))
    token = token_mount(pod)
    mounts = [token] if token else []
    if needs_driver_volume(plan, config):
        volume = _free_volume_name(pod)
        found.append(_append(pod.spec, "/spec", "volumes", driver_volume(config, volume)))
        mounts.append(driver_mount(config, volume))
    key = "initContainers" if plan.native else "containers"
    found.append(_append(pod.spec, "/spec", key, sidecar(plan, config, mounts=mounts)))
    labels = {keys.INJECTED_LABEL: "true"}
    return (
        found
        + _set_all(pod, "labels", pod.labels, labels)
        + _set_all(pod, "annotations", pod.annotations, _annotations(pod, plan))
    )


def _annotations(pod: Pod, plan: Plan) -> dict[str, str]:
    wanted = {keys.STATUS: _compact(status(Decision(plan)))}
    if plan.job:
        wanted = {keys.JOB: plan.job, **wanted}
    if plan.host_network:
        wanted[keys.PORT] = str(plan.port)
    if keys.DEFAULT_CONTAINER not in pod.annotations and pod.containers[0].name:
        wanted[keys.DEFAULT_CONTAINER] = pod.containers[0].name
    return wanted


def _append(parent: dict[str, Any], path: str, key: str, value: Any) -> Operation:
    """Appends to a list of the parent, which is made where it is missing or null."""
    if parent.get(key) is None:
        return add(f"{path}/{key}", [value])
    return add(f"{path}/{key}/-", value)


def _set_all(
    pod: Pod, key: str, present: dict[str, str], wanted: dict[str, str]
) -> list[Operation]:
    missing = {name: value for name, value in wanted.items() if present.get(name) != value}
    if not missing:
        return []
    if pod.metadata.get(key) is None:
        return [add(pointer("metadata", key), missing)]
    return [add(pointer("metadata", key, name), value) for name, value in missing.items()]


def _free_volume_name(pod: Pod) -> str:
    taken = {text(v.get("name")) for v in items(pod.spec.get("volumes"), "/spec/volumes")}
    name, n = _DRIVER_VOLUME, 0
    while name in taken:
        n += 1
        name = f"{_DRIVER_VOLUME}-{n}"
    return name


_compact = json.JSONEncoder(separators=(",", ":")).encode
