"""The sidecar's container and its volume, built from a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from webhook.decision import PORT_NAME, SIDECAR, Plan
from webhook.pod import Pod, items, text
from webhook.profiles import Profile, security_context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from webhook.config import Config

FIELD_ENV = {
    "KITTY_NODE": "spec.nodeName",
    "KITTY_POD": "metadata.name",
    "KITTY_NAMESPACE": "metadata.namespace",
    "KITTY_POD_UID": "metadata.uid",
    "KITTY_POD_IP": "status.podIP",
}
HOST_ENV = {"KITTY_HOST_IP": "status.hostIP"}
"""What the address of an exporter may refer to, so it comes before it."""


ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where every container of a pod finds the pod's account."""


def sidecar(plan: Plan, config: Config, *, mounts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The container, as it goes into the pod.

    It has no probe: a startup probe delays the trainer, a readiness probe its operator.

    Args:
        plan: What was decided.
        config: The image's command and the like.
        mounts: Its volumeMounts.
    """
    container: dict[str, Any] = {
        "name": SIDECAR,
        "image": plan.image,
        "imagePullPolicy": "IfNotPresent",
    }
    if config.sidecar_command:
        container["command"] = list(config.sidecar_command)
    if plan.native:
        container["restartPolicy"] = "Always"
    container["env"] = _env(plan, config)
    if not plan.host_network:
        # In a hostNetwork pod it would become a hostPort and keep the pod from being scheduled.
        container["ports"] = [
            {"name": PORT_NAME, "containerPort": plan.port, "protocol": "TCP"},
        ]
    if plan.resources:
        r = plan.resources
        container["resources"] = {
            "requests": {"cpu": r.cpu_request, "memory": r.memory_request},
            "limits": {"cpu": r.cpu_limit, "memory": r.memory_limit},
        }
    container["securityContext"] = security_context(plan.profile, plan.level, plan.identity)
    if mounts:
        container["volumeMounts"] = list(mounts)
    return container


def needs_driver_volume(plan: Plan, config: Config) -> bool:
    """Whether the node's driver libraries are mounted: where no runtime brings them by env."""
    return plan.gpu and plan.profile is Profile.PRIVILEGED and config.driver_root is not None


def driver_volume(config: Config, name: str) -> dict[str, Any]:
    """The volume of them; without a type, so that a node that lacks the directory still starts."""
    return {"name": name, "hostPath": {"path": config.driver_root}}


def driver_mount(config: Config, name: str) -> dict[str, Any]:
    """Where the sidecar finds it."""
    return {"name": name, "mountPath": config.driver_root, "readOnly": True}


def token_mount(pod: Pod) -> dict[str, Any] | None:
    """The mount of the account's token that the API server gives every container without one.

    It would add it after our patch, and then have the changed pod reviewed a second time.
    Source: kubernetes/plugin/pkg/admission/serviceaccount/admission.go.
    """
    for container in pod.containers:
        for mount in items(container.raw.get("volumeMounts"), f"{container.path}/volumeMounts"):
            name = text(mount.get("name"))
            if mount.get("mountPath") == ACCOUNT_PATH and name.startswith("kube-api-access-"):
                return {"name": name, "readOnly": True, "mountPath": ACCOUNT_PATH}
    return None


def _job(plan: Plan) -> tuple[dict[str, str], str | None]:
    """The job's value, and fields that it refers to: a template's pods may tell it by a label."""
    if plan.job:
        return {}, _literal(plan.job)
    if plan.template is None or not plan.template.label:
        return {}, None
    field = f"metadata.labels['{plan.template.label}']"
    return {"KITTY_JOB_LABEL": field}, f"{_literal(plan.template.prefix)}$(KITTY_JOB_LABEL)"


def _env(plan: Plan, config: Config) -> list[dict[str, Any]]:
    job_field, job = _job(plan)
    exporter = config.dcgm_exporter if plan.gpu else None
    root = config.driver_root if needs_driver_volume(plan, config) else None
    values = {
        "KITTY_PORT": str(plan.port),
        "KITTY_BIND": config.bind,
        "KITTY_JOB": job,
        "KITTY_RANK": None if plan.rank is None else str(plan.rank),
        "KITTY_PROFILE": plan.profile.value,
        "KITTY_COLLECTORS": ",".join(plan.collectors) if plan.collectors else None,
        "KITTY_RTT_HOOK": config.rtt_hook,
        "KITTY_LIFECYCLE": "native" if plan.native else "ordinary",
        "KITTY_RESTART_POLICY": plan.restart_policy,
        "KITTY_DRIVER_ROOT": None if root is None else _literal(root),
        "KITTY_DCGM_EXPORTER": exporter,
        "NVIDIA_VISIBLE_DEVICES": "all" if plan.gpu else "void",
        "NVIDIA_DRIVER_CAPABILITIES": "utility" if plan.gpu else None,
    }
    fields = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (FIELD_ENV | (HOST_ENV if exporter else {}) | job_field).items()
    ]
    return fields + [{"name": name, "value": v} for name, v in values.items() if v is not None]


def _literal(value: str) -> str:
    """The kubelet expands ``$(NAME)`` in a value and takes ``$$`` for one dollar sign."""
    return value.replace("$", "$$")
