"""The webhook's configuration file: YAML, one flat mapping, every key optional."""

from __future__ import annotations

import ipaddress
import textwrap
import urllib.parse
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import yaml

from webhook import __version__
from webhook.annotations import FIELDS, BadValueError
from webhook.profiles import Level, Profile
from webhook.quantities import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


RTT_HOOKS = ("auto", "tcp_rtt_estimator", "tcp_ack_update_rtt", "tcp_probe", "sock_ops", "tcp_info")
"""What the sidecar knows by these names."""


class ConfigError(Exception):
    """The configuration cannot be used; the text names the key and what it may hold."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What holds for every pod that does not say otherwise by annotation.

    Attributes:
        image: The sidecar's image.
        sidecar_command: Its command; None leaves the image's entrypoint, which starts the agent
            again when it dies.
        default_level: The Pod Security level of namespaces without an enforce label, which is
            the API server's own default (some distributions enforce baseline).
        profile: The profile wished for; lowered to what the level admits.
        native_sidecar: ``auto``, ``true`` or ``false``.
        cpu_request: A quantity, like the three after it.
        cpu_limit: See cpu_request.
        memory_request: See cpu_request.
        memory_limit: See cpu_request.
        port: Where the sidecar serves, except in hostNetwork pods.
        collectors: Names, or None for all.
        accelerators: Extended resources that mark a training container, beyond those whose name
            holds ``gpu`` or ``mig-``.
        driver_root: A directory of the node that holds the GPU driver's libraries, mounted
            read-only at the same path in the privileged profile; None mounts nothing.
        dcgm_exporter: The http address of the node's dcgm-exporter, asked by the sidecars of GPU
            pods; the kubelet puts the node's address in the place of ``$(KITTY_HOST_IP)``.
        rtt_hook: KITTY_RTT_HOOK of every sidecar.
        bind: KITTY_BIND of every sidecar; None leaves it to the sidecar.
    """

    image: str = f"kitty-sidecar:{__version__}"
    sidecar_command: tuple[str, ...] | None = None
    default_level: Level = Level.PRIVILEGED
    profile: Profile = Profile.PRIVILEGED
    native_sidecar: str = "auto"
    cpu_request: str = "20m"
    cpu_limit: str = "500m"
    memory_request: str = "64Mi"
    memory_limit: str = "320Mi"
    port: int = 9100
    collectors: tuple[str, ...] | None = None
    accelerators: frozenset[str] = frozenset(
        {
            "aws.amazon.com/neuron",
            "aws.amazon.com/neuroncore",
            "aws.amazon.com/neurondevice",
            "google.com/tpu",
            "habana.ai/gaudi",
            "huawei.com/Ascend910",
        }
    )
    driver_root: str | None = None
    dcgm_exporter: str | None = None
    rtt_hook: str = "auto"
    bind: str | None = None


def _text(value: Any) -> str:
    """YAML's true, 9100 and 2 are the texts that an annotation would hold."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise BadValueError


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise BadValueError
    if not all(isinstance(item, str) and item and "\0" not in item for item in value):
        raise BadValueError
    return value


def _comma(value: Any) -> str:
    return ",".join(_strings(value)) if isinstance(value, list) else _text(value)


def _command(value: Any) -> tuple[str, ...] | None:
    return tuple(_strings(value)) or None


def _level(value: Any) -> Level:
    try:
        return Level(_text(value))
    except ValueError as error:
        raise BadValueError from error


_KERNEL = ("/proc/", "/sys/", "/dev/")
_IMAGE = frozenset(
    {
        *("/", "/bin/", "/etc/", "/lib/", "/lib64/", "/opt/", "/opt/kitty/", "/run/", "/sbin/"),
        *("/usr/", "/usr/bin/", "/usr/lib/", "/usr/local/", "/usr/local/bin/", "/var/"),
        *("/lib/aarch64-linux-gnu/", "/lib/x86_64-linux-gnu/"),
        *("/usr/lib/aarch64-linux-gnu/", "/usr/lib/x86_64-linux-gnu/"),
    }
)
"""Where the sidecar's own program lies: a mount there would keep it, and so the pod, from starting.
"""


def _absolute(value: Any) -> str:
    """A path that the API takes for a mount, and a runtime can mount over."""
    path = _text(value)
    parts = path.split("/")
    folder = "".join(f"/{part}" for part in parts if part) + "/"
    usable = path.isprintable() and ":" not in path and not {".", ".."} & set(parts)
    if not path.startswith("/") or not usable or folder.startswith(_KERNEL) or folder in _IMAGE:
        raise BadValueError
    return path


def _http(value: Any) -> str:
    """An address as the sidecar takes it, once the kubelet has put in the node's."""
    url = _text(value)
    bare = url.replace("[$(KITTY_HOST_IP)]", "[::1]").replace("$(KITTY_HOST_IP)", "127.0.0.1")
    if "$" in bare or not bare.isprintable() or " " in bare:
        raise BadValueError
    try:
        parts = urllib.parse.urlsplit(bare)
        usable = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError as error:
        raise BadValueError from error
    if not usable:
        raise BadValueError
    return url


def _ip(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(_text(value)))
    except ValueError as error:
        raise BadValueError from error


def _hook(value: Any) -> str:
    hook = _text(value)
    if hook not in RTT_HOOKS:
        raise BadValueError
    return hook


def _reader(name: str) -> Callable[[Any], Any]:
    return lambda value: FIELDS[name].read(_text(value))


_KEYS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    **{
        name: (FIELDS[name].allowed, _reader(name))
        for name in (
            "image",
            "profile",
            "native-sidecar",
            "cpu-request",
            "cpu-limit",
            "memory-request",
            "memory-limit",
            "port",
        )
    },
    "sidecar-command": ("a list of words", _command),
    "default-level": (", ".join(Level), _level),
    "collectors": (
        FIELDS["collectors"].allowed,
        lambda value: FIELDS["collectors"].read(_comma(value)),
    ),
    "accelerators": (
        "a list of extended resource names",
        lambda value: frozenset(_strings(value)),
    ),
    "driver-root": (
        "an absolute path other than / and the system's folders, without a colon",
        _absolute,
    ),
    "dcgm-exporter": ("an address as http://$(KITTY_HOST_IP):9400/metrics", _http),
    "rtt-hook": (", ".join(RTT_HOOKS), _hook),
    "bind": ("an IP address", _ip),
}


def keys_in_words() -> str:
    """Every key, what it may hold and its default, for a help text of 79 columns."""
    defaults, lines = Config(), []
    for key, (allowed, _) in _KEYS.items():
        value = getattr(defaults, key.replace("-", "_"))
        if isinstance(value, frozenset):
            value = ", ".join(sorted(value))
        default = "" if value is None else f" (default: {value})"
        lines += textwrap.wrap(
            f"  {key:16} {allowed}{default}", 79, subsequent_indent=" " * 19, break_on_hyphens=False
        )
    return "\n".join(lines)


def parse_config(text: str) -> Config:
    """Reads the configuration.

    Args:
        text: YAML; empty is the default configuration.

    Raises:
        ConfigError: An unknown key, a value that its key does not allow, or no mapping.
    """
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not YAML: {error}") from error
    if raw is None:
        return Config()
    if not isinstance(raw, dict):
        raise ConfigError("not a mapping of keys to values")
    values = {}
    for key, value in raw.items():
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}; allowed keys: {', '.join(sorted(_KEYS))}")
        allowed, read = _KEYS[key]
        if value is None:
            continue
        try:
            values[key.replace("-", "_")] = read(value)
        except BadValueError as error:
            raise ConfigError(f"key {key!r}: {value!r} is not {allowed}") from error
    config = Config(**values)
    _check_limits(config)
    return config


def _check_limits(config: Config) -> None:
    for kind in ("cpu", "memory"):
        request = parse_quantity(getattr(config, f"{kind}_request"))
        limit = parse_quantity(getattr(config, f"{kind}_limit"))
        assert request is not None
        assert limit is not None
        if request > limit:
            raise ConfigError(f"key '{kind}-request' exceeds '{kind}-limit'")


def load_config(path: str | None) -> Config:
    """Reads the file, or returns the defaults where no path is given.

    Raises:
        ConfigError: As parse_config, or the file cannot be read.
    """
    if path is None:
        return Config()
    try:
        with open(path, encoding="utf-8") as file:
            return parse_config(file.read())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


assert set(_KEYS) == {field.name.replace("_", "-") for field in fields(Config)}
