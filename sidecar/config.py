"""The sidecar's settings, read once from the environment.

A bad value never keeps the sidecar from starting: it is named in one log line and the default
is used.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PROFILES = ("privileged", "capabilities", "unprivileged")
LIFECYCLES = ("native", "ordinary")
RESTART_POLICIES = ("Always", "OnFailure", "Never")
RTT_HOOKS = ("auto", "tcp_rtt_estimator", "tcp_ack_update_rtt", "tcp_probe", "sock_ops", "tcp_info")

LABEL_LIMIT = 253
"""Longest label value in characters: the longest name that Kubernetes allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything the environment may say. Empty text means: not told."""

    port: int = 9100
    bind: str = ""
    node: str = ""
    pod: str = ""
    namespace: str = ""
    pod_uid: str = ""
    pod_ip: str = ""
    job: str = ""
    rank: str = ""
    profile: str = "privileged"
    collectors: frozenset[str] | None = None
    """Names to run; None means all."""
    rtt_hook: str = "auto"
    lifecycle: str = "native"
    restart_policy: str = "Always"
    proc: Path = field(default=Path("/proc"))
    sys: Path = field(default=Path("/sys"))
    bcc_python: str = "/usr/bin/python3"
    driver_root: str = ""
    dcgm_exporter: str = ""


def rank_text(value: str) -> str:
    """Returns the rank in its shortest decimal form.

    Raises:
        ValueError: not a non-negative integer of at most seven digits.
    """
    if not (value.isascii() and value.isdigit() and len(value) <= 7):
        raise ValueError("allowed: a non-negative integer of at most 7 digits")
    return str(int(value))


def label_text(value: str) -> str:
    """Returns the text if it can be a label value.

    Raises:
        ValueError: too long, or it holds control characters.
    """
    if len(value) > LABEL_LIMIT or not value.isprintable():
        raise ValueError(f"allowed: printable text of at most {LABEL_LIMIT} characters")
    return value


def _port(value: str) -> int:
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 65535):
        raise ValueError("allowed: 1 to 65535")
    return int(value)


def _address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError as e:
        raise ValueError("allowed: an IPv4 or IPv6 address") from e


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"allowed: {', '.join(allowed)}")
        return value

    return check


def _folder(value: str) -> Path:
    if not value.startswith("/"):
        raise ValueError("allowed: an absolute path")
    return Path(value)


def _url(value: str) -> str:
    if not value.startswith("http://") or not value.isprintable() or " " in value:
        raise ValueError("allowed: an address as http://host:port/path")
    return value


def _names(known: frozenset[str]) -> Callable[[str], frozenset[str] | None]:
    def check(value: str) -> frozenset[str] | None:
        names = frozenset(name.strip() for name in value.split(",")) - {""}
        if not names or names == {"all"}:
            return None
        if names - known:
            raise ValueError(f"allowed: all, or some of {', '.join(sorted(known))}")
        return names

    return check


def from_environment(
    env: Mapping[str, str], *, collectors: frozenset[str]
) -> tuple[Config, list[str]]:
    """Reads the settings.

    Args:
        env: the process's environment.
        collectors: the names that KITTY_COLLECTORS may hold.

    Returns:
        The settings, and one sentence for each value that was refused.
    """
    readers: dict[str, tuple[str, Callable[[str], object]]] = {
        "KITTY_PORT": ("port", _port),
        "KITTY_BIND": ("bind", _address),
        "KITTY_NODE": ("node", label_text),
        "KITTY_POD": ("pod", label_text),
        "KITTY_NAMESPACE": ("namespace", label_text),
        "KITTY_POD_UID": ("pod_uid", label_text),
        "KITTY_POD_IP": ("pod_ip", label_text),
        "KITTY_JOB": ("job", label_text),
        "KITTY_RANK": ("rank", rank_text),
        "KITTY_PROFILE": ("profile", _one_of(PROFILES)),
        "KITTY_COLLECTORS": ("collectors", _names(collectors)),
        "KITTY_RTT_HOOK": ("rtt_hook", _one_of(RTT_HOOKS)),
        "KITTY_LIFECYCLE": ("lifecycle", _one_of(LIFECYCLES)),
        "KITTY_RESTART_POLICY": ("restart_policy", _one_of(RESTART_POLICIES)),
        "KITTY_PROC": ("proc", _folder),
        "KITTY_SYS": ("sys", _folder),
        "KITTY_BCC_PYTHON": ("bcc_python", lambda value: str(_folder(value))),
        "KITTY_DRIVER_ROOT": ("driver_root", lambda value: str(_folder(value))),
        "KITTY_DCGM_EXPORTER": ("dcgm_exporter", _url),
    }
    values: dict[str, object] = {}
    problems = []
    for name, (attribute, read) in readers.items():
        text = env.get(name, "")
        if not text:
            continue
        try:
            values[attribute] = read(text)
        except ValueError as e:
            problems.append(f"{name}={text[:80]!r} is not used, {e}")
    return Config(**values), problems  # type: ignore[arg-type] # each reader returns its field's type
