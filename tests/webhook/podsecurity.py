"""The Pod Security Standards as published, written down without a look at the code under test.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from typing import Any

BASELINE_CAPABILITIES = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t"}
SECCOMP = {"RuntimeDefault", "Localhost"}
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [c for kind in kinds for c in spec.get(kind) or []]


def context(of: dict[str, Any]) -> dict[str, Any]:
    return of.get("securityContext") or {}


def baseline_violations(pod: dict[str, Any]) -> list[str]:
    """What the baseline level holds against a pod."""
    spec = pod["spec"]
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += ["hostPath" for volume in spec.get("volumes") or [] if volume.get("hostPath")]
    for container in containers(spec):
        own = context(container)
        found += ["privileged"] if own.get("privileged") else []
        added = set((own.get("capabilities") or {}).get("add") or [])
        found += sorted(added - BASELINE_CAPABILITIES)
        found += ["hostPort" for port in container.get("ports") or [] if port.get("hostPort")]
        found += ["procMount"] if own.get("procMount", "Default") != "Default" else []
    for of in (spec, *containers(spec)):
        own = context(of)
        seccomp = (own.get("seccompProfile") or {}).get("type")
        found += ["seccomp"] if seccomp is not None and seccomp not in SECCOMP else []
        armor = (own.get("appArmorProfile") or {}).get("type")
        found += ["appArmor"] if armor is not None and armor not in SECCOMP else []
        linux = own.get("seLinuxOptions") or {}
        found += ["seLinux"] if linux.get("type") not in SELINUX_TYPES else []
        found += ["seLinux"] if linux.get("user") or linux.get("role") else []
        found += ["hostProcess"] if (own.get("windowsOptions") or {}).get("hostProcess") else []
    return found


def restricted_violations(pod: dict[str, Any]) -> list[str]:
    """What the restricted level holds against a pod."""
    spec = pod["spec"]
    found = baseline_violations(pod)
    for volume in spec.get("volumes") or []:
        found += sorted(set(volume) - {"name"} - RESTRICTED_VOLUMES)
    of_pod = context(spec)
    found += ["runAsUser"] if of_pod.get("runAsUser") == 0 else []
    found += ["runAsNonRoot"] if of_pod.get("runAsNonRoot") is False else []
    for container in containers(spec):
        own = context(container)
        found += ["escalation"] if own.get("allowPrivilegeEscalation") is not False else []
        non_root = own.get("runAsNonRoot", of_pod.get("runAsNonRoot"))
        found += ["runAsNonRoot"] if non_root is not True else []
        found += ["runAsUser"] if own.get("runAsUser") == 0 else []
        seccomp = own.get("seccompProfile") or of_pod.get("seccompProfile") or {}
        found += ["seccomp"] if seccomp.get("type") not in SECCOMP else []
        capabilities = own.get("capabilities") or {}
        found += ["drop"] if "ALL" not in (capabilities.get("drop") or []) else []
        found += sorted(set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"})
    return found


def violations(pod: dict[str, Any], level: str) -> list[str]:
    """What a level holds against a pod; empty where it is admitted."""
    if level == "restricted":
        return restricted_violations(pod)
    return baseline_violations(pod) if level == "baseline" else []
