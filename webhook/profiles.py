"""How much the sidecar may do, and what each Pod Security level admits of it.

Levels: https://kubernetes.io/docs/concepts/security/pod-security-standards/. PodSecurity runs
after mutation: a sidecar above the namespace's level would get the user's own pod rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Profile(StrEnum):
    """What the sidecar is granted, from most to least."""

    PRIVILEGED = "privileged"
    CAPABILITIES = "capabilities"
    UNPRIVILEGED = "unprivileged"


class Level(StrEnum):
    """A level of the Pod Security Standards, as a namespace's enforce label names it."""

    PRIVILEGED = "privileged"
    BASELINE = "baseline"
    RESTRICTED = "restricted"


# SYS_RESOURCE may be outside a node's bounding set, and then the container cannot start.
CAPABILITIES = ("BPF", "PERFMON", "SYS_PTRACE", "NET_ADMIN", "DAC_READ_SEARCH")


@dataclass(frozen=True)
class Identity:
    """The user a watched container runs as, as far as the pod says it.

    Attributes:
        user: runAsUser of the container, else of the pod; None where the image decides.
        group: runAsGroup, likewise.
    """

    user: int | None
    group: int | None


def admitted(profile: Profile, level: Level) -> Profile:
    """The profile itself where the level admits it, else the highest that it does."""
    return profile if level is Level.PRIVILEGED else Profile.UNPRIVILEGED


def security_context(profile: Profile, level: Level, watched: Identity) -> dict[str, Any]:
    """The securityContext of the sidecar's container.

    User, non-root and seccomp are always said, because what a pod-level context leaves or sets
    would be inherited: a pod-level ``runAsUser: 0`` beside an inherited runAsNonRoot keeps the
    container, and with a native sidecar the whole pod, from starting.

    Args:
        profile: The profile in force, already lowered to the level.
        level: The namespace's level; at ``restricted`` its own rules apply.
        watched: Whom the watched container runs as: only the same user and group may read its
            environment where no capability helps.
    """
    if level is Level.RESTRICTED:
        return _restricted(watched)
    if profile is Profile.PRIVILEGED:
        return {
            "privileged": True,
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "seccompProfile": {"type": "Unconfined"},
        }
    if profile is Profile.CAPABILITIES:
        return {
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            # bpf(2) and perf_event_open(2) are outside the default profile of older runtimes.
            "seccompProfile": {"type": "Unconfined"},
        }
    user = 0 if watched.user is None else watched.user
    context: dict[str, Any] = {"privileged": False, "runAsUser": user}
    if watched.group is not None:
        context["runAsGroup"] = watched.group
    context["runAsNonRoot"] = user != 0
    context["seccompProfile"] = {"type": "RuntimeDefault"}
    return context


def _restricted(watched: Identity) -> dict[str, Any]:
    context: dict[str, Any] = {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    # No user of our own: OpenShift assigns one and refuses any other.
    if watched.user:
        context["runAsUser"] = watched.user
        if watched.group is not None:
            context["runAsGroup"] = watched.group
    return context
