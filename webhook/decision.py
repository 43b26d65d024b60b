"""From a pod, a Pod Security level and a configuration to a plan or a reason to leave it alone.

Pure: nothing is asked of the cluster, nothing is kept, the pod is not changed.
"""

from __future__ import annotations

import hashlib
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from webhook import annotations as keys
from webhook.annotations import FIELDS, BadValueError, Field
from webhook.jobs import UNKNOWN, PodsJob, membership
from webhook.pod import Container, Pod, items, obj, text
from webhook.profiles import Identity, Level, Profile, admitted
from webhook.quantities import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from webhook.config import Config

SIDECAR = "kitty"
PORT_NAME = "kitty-metrics"
WATCH = "KITTY_WATCH"
HOST_PORTS = range(19100, 20124)
MAX_WARNING = 120
_SPEAKER = "kitty: "
NATIVE_SINCE = (1, 28)
"""Before it a server drops the restartPolicy of an init container, which then never ends."""
ANNOTATIONS_LIMIT = 256 * 1024
"""Bytes of keys and values together: a pod with more is refused."""
_OWN_ANNOTATIONS = 2048
AUTO_NATIVE_SINCE = (1, 29)
"""From here on native sidecars are on unless someone turned them off."""


class Skip(StrEnum):
    """Why a pod is left alone: the words of the log, the status, the warning and the metric."""

    NOT_A_POD = "not-a-pod"
    NOT_A_CREATE = "not-a-create"
    UNREADABLE = "unreadable-pod"
    OPTED_OUT = "opted-out"
    ALREADY_INJECTED = "already-injected"
    MIRROR = "mirror-pod"
    WINDOWS = "windows-pod"
    NO_CONTAINERS = "no-containers"
    NAME_TAKEN = "container-name-taken"
    OWN_PROCESS_NAMESPACES = "share-process-namespace-false"
    WATCH_DECLINED = "watch-declined"
    NO_PORT = "no-port-free"
    NO_ROOM = "annotations-full"
    INTERNAL = "internal-error"

    @property
    def says(self) -> str:
        """What the reason means, in one line."""
        return _SAYS[self]

    @property
    def quiet(self) -> bool:
        """Whether nobody waits for a word about it: no warning, and no status on the pod."""
        return self in {Skip.OPTED_OUT, Skip.ALREADY_INJECTED, Skip.MIRROR}


_SAYS: Mapping[Skip, str] = {
    Skip.NOT_A_POD: "the object under review is no Pod",
    Skip.NOT_A_CREATE: "only the creation of pods is reviewed",
    Skip.UNREADABLE: "a part of the pod is misshapen",
    Skip.OPTED_OUT: f'label {keys.INJECT_LABEL} is "false"',
    Skip.ALREADY_INJECTED: "the pod has its sidecar",
    Skip.MIRROR: "a mirror of a static pod cannot be changed",
    Skip.WINDOWS: "there is no sidecar for Windows",
    Skip.NO_CONTAINERS: "the pod has no containers",
    Skip.NAME_TAKEN: f"another container is named {SIDECAR}",
    Skip.OWN_PROCESS_NAMESPACES: "the pod sets shareProcessNamespace: false",
    Skip.WATCH_DECLINED: f"the containers set {WATCH} to something else than 1",
    Skip.NO_PORT: "no port is left for the sidecar",
    Skip.NO_ROOM: "with more annotations the pod would exceed the API's 256 KiB",
    Skip.INTERNAL: "the webhook failed on this pod; see its log",
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What the request knows of the pod that the pod itself may not say.

    Attributes:
        uid: The request's uid; offline, anything stable.
        namespace: Empty in the metadata of controllers' pods, hence taken from the request.
        name: The pod's name; empty where the server is still to generate it.
        template: What is known of the job of a template's pods; None for a pod with a name.
    """

    uid: str
    namespace: str = ""
    name: str = ""
    template: PodsJob | None = None


_OS_LABELS = ("kubernetes.io/os", "beta.kubernetes.io/os")

Version = tuple[int, int]
"""Major and minor of a Kubernetes version."""


@dataclass(frozen=True)
class Resources:
    """Requests and limits of the sidecar, as quantities."""

    cpu_request: str
    cpu_limit: str
    memory_request: str
    memory_limit: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything the mutation writes, decided.

    Attributes:
        watched: The containers that get KITTY_WATCH or set it themselves.
        unmarked: Those of them that do not have it yet.
        profile: Lowered to what the level admits.
        level: The namespace's Pod Security level.
        identity: Whom the first watched container runs as.
        native: An init container with restartPolicy Always, or else an ordinary container.
        share_process_namespace: Whether the pod must still be told to.
        host_network: Then no containerPort is declared and the port is published by annotation.
        image: The sidecar's.
        port: Where the sidecar serves.
        resources: None in pods with pod-level resources, whose sum must hold.
        job: The resolved job; empty in a template whose pods' job is not known yet.
        template: What is known of that job; None for a pod with a name.
        rank: The pod's rank where its controller tells it.
        collectors: Names, or None for all.
        gpu: Whether a container may have been given an NVIDIA GPU.
        restart_policy: The pod's.
    """

    watched: tuple[Container, ...]
    unmarked: tuple[Container, ...]
    profile: Profile
    level: Level
    identity: Identity
    native: bool
    share_process_namespace: bool
    host_network: bool
    image: str
    port: int
    resources: Resources | None
    job: str
    template: PodsJob | None
    rank: int | None
    collectors: tuple[str, ...] | None
    gpu: bool
    restart_policy: str


@dataclass(frozen=True)
class Restore:
    """Our native sidecar lost its restartPolicy to another webhook's old model; it gets it back."""

    container: Container


@dataclass(frozen=True)
class Decision:
    """What becomes of the pod, and what its creator should read."""

    outcome: Plan | Restore | Skip
    warnings: tuple[str, ...] = ()


def warning(message: str) -> str:
    """A message as a response may carry it: printable, 120 characters at most."""
    clean = "".join(c if c.isprintable() else "?" for c in _SPEAKER + message)
    return clean if len(clean) <= MAX_WARNING else clean[: MAX_WARNING - 3] + "..."


def skip(reason: Skip, detail: str = "") -> Decision:
    """A decision to leave the pod alone, with its warning where someone waits for one."""
    return Decision(reason, () if reason.quiet else (left_alone(reason, detail),))


def left_alone(reason: Skip, detail: str = "") -> str:
    """The message that says so."""
    return warning(f"not injected ({reason}): {detail or reason.says}")


def decide(
    pod: Pod, level: Level, config: Config, *, origin: Origin, oldest: Version | None
) -> Decision:
    """Decides what becomes of a pod.

    Args:
        pod: The pod under review.
        level: The Pod Security level of its namespace.
        config: What holds where the pod does not say otherwise.
        origin: What the request says.
        oldest: The oldest version among the API server and the kubelets; None where unknown.

    Raises:
        UnreadablePodError: A part that the decision needs is misshapen.
    """
    if reason := _reason_to_skip(pod):
        return skip(reason)
    if present := _sidecar(pod):
        return _already_there(present)
    notes: list[str] = []
    settings = _Settings(pod.annotations, notes)
    watched = _watched(pod, settings, config)
    marked = [(c, c.variable(WATCH)) for c in watched]
    unmarked = tuple(c for c, entry in marked if entry is None)
    watched = [c for c, entry in marked if not _declines(entry)]
    if not watched:
        return skip(Skip.WATCH_DECLINED)
    if annotations_room(pod) < _OWN_ANNOTATIONS + sum(6 * len(c.name) + 3 for c in watched):
        return skip(Skip.NO_ROOM)
    port = _port(pod, settings, config, origin)
    if port is None:
        return skip(Skip.NO_PORT)
    member = membership(
        pod,
        watched,
        annotated=settings.get("job"),
        name=_own_name(pod, origin),
        fallback=origin.template.name if origin.template else _own_name(pod, origin),
    )
    job = member.job or _job_not_named(origin, settings)
    plan = Plan(
        watched=tuple(watched),
        unmarked=unmarked,
        profile=_profile(settings, config, level),
        level=level,
        identity=_identity(pod, watched[0]),
        native=_native(settings, config, oldest),
        share_process_namespace=not pod.host_pid
        and pod.spec.get("shareProcessNamespace") is not True,
        host_network=pod.host_network,
        image=settings.get("image") or config.image,
        port=port,
        resources=_resources(pod, settings, config),
        job=job,
        template=origin.template,
        rank=member.rank,
        collectors=settings.get("collectors") or config.collectors,
        gpu=any(map(_may_have_nvidia, (*pod.containers, *_native_sidecars(pod)))),
        restart_policy=pod.restart_policy,
    )
    return Decision(plan, tuple(notes))


class _Settings:
    """The pod's annotations, read; what is bad or unknown is noted once and then as if absent."""

    def __init__(self, annotations: Mapping[str, str], notes: list[str]) -> None:
        self._values: dict[str, Any] = {}
        self._notes = notes
        for key, given in annotations.items():
            if not key.startswith(keys.PREFIX) or key == keys.STATUS:
                continue
            name = key.removeprefix(keys.PREFIX)
            if field := FIELDS.get(name):
                self._read(name, field, given)
            elif key in (keys.INJECT_LABEL, keys.INJECTED_LABEL):
                self.note(f"annotation {name} ignored: it is a label")
            else:
                self.note(f"annotation {shown(name)} ignored: there is none of that name")

    def _read(self, name: str, field: Field, given: str) -> None:
        try:
            self._values[name] = field.read(given)
        except BadValueError:
            text = f"annotation {name} {shown(given)} ignored; allowed: {field.allowed}"
            lines = textwrap.wrap(
                text,
                MAX_WARNING - len(_SPEAKER),
                replace_whitespace=False,
                break_on_hyphens=False,
            )
            for line in lines:
                self.note(line)

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def note(self, message: str) -> None:
        self._notes.append(warning(message))


def shown(value: str) -> str:
    """A user's value, quoted and cut to what fits a message."""
    return '"' + (value if len(value) <= 24 else value[:21] + "...") + '"'


def annotations_room(pod: Pod) -> int:
    """Bytes that the API still allows the pod's annotations; negative where they are too many."""
    parts = chain(pod.annotations.keys(), pod.annotations.values())
    return ANNOTATIONS_LIMIT - sum(len(p.encode("utf-8", "surrogatepass")) for p in parts)


def _reason_to_skip(pod: Pod) -> Skip | None:
    if pod.labels.get(keys.INJECT_LABEL) == "false":
        return Skip.OPTED_OUT
    if "kubernetes.io/config.mirror" in pod.annotations:
        return Skip.MIRROR
    if _is_windows(pod):
        return Skip.WINDOWS
    if not pod.containers:
        return Skip.NO_CONTAINERS
    if pod.spec.get("shareProcessNamespace") is False and not _sidecar(pod):
        return Skip.OWN_PROCESS_NAMESPACES
    return None


def _is_windows(pod: Pod) -> bool:
    """As the pod says it: by name, by where it may run, or by options that only Windows has."""
    system = obj(pod.spec.get("os"), "/spec/os").get("name")
    if system:
        return bool(system == "windows")
    selector = obj(pod.spec.get("nodeSelector"), "/spec/nodeSelector")
    if named := [selector[key] for key in _OS_LABELS if key in selector]:
        return "windows" in named
    contexts = [pod.security_context(), *(c.security_context() for c in pod.containers)]
    return any(context.get("windowsOptions") for context in contexts) or _only_windows_nodes(pod)


def _only_windows_nodes(pod: Pod) -> bool:
    node: Any = pod.spec
    where = "/spec"
    for key in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        where = f"{where}/{key}"
        node = obj(node.get(key), where)
    terms = items(node.get("nodeSelectorTerms"), f"{where}/nodeSelectorTerms")
    return bool(terms) and all(
        any(
            e.get("key") in _OS_LABELS
            and e.get("operator") == "In"
            and e.get("values") == ["windows"]
            for e in items(term.get("matchExpressions"), f"{where}/matchExpressions")
        )
        for term in terms
    )


def _sidecar(pod: Pod) -> Container | None:
    everywhere = (*pod.init_containers, *pod.containers)
    return next((c for c in everywhere if c.name == SIDECAR), None)


def _native_sidecars(pod: Pod) -> list[Container]:
    return [c for c in pod.init_containers if c.raw.get("restartPolicy") == "Always"]


def _already_there(found: Container) -> Decision:
    lifecycle = found.variable("KITTY_LIFECYCLE")
    if lifecycle is None and found.variable("KITTY_PORT") is None:
        return skip(Skip.NAME_TAKEN)
    is_init = found.path.startswith("/spec/initContainers/")
    if (
        is_init
        and found.raw.get("restartPolicy") is None
        and lifecycle
        == {
            "name": "KITTY_LIFECYCLE",
            "value": "native",
        }
    ):
        return Decision(Restore(found))
    return skip(Skip.ALREADY_INJECTED)


def _watched(pod: Pod, settings: _Settings, config: Config) -> list[Container]:
    named = settings.get("containers")
    if named:
        wanted = set(named)
        found = [c for c in (*pod.containers, *pod.init_containers) if c.name in wanted]
        for name in sorted(wanted - {c.name for c in found})[:3]:
            settings.note(f"annotation containers: no container is named {shown(name)}")
        if found:
            return found
    accelerated = [c for c in pod.containers if _has_accelerator(c, config)]
    return accelerated or list(pod.containers)


def _declines(entry: Mapping[str, Any] | None) -> bool:
    """A value that refers to another variable is known in the container only, like valueFrom."""
    if entry is None or entry.get("valueFrom"):
        return False
    value = entry.get("value")
    return value != "1" and "$(" not in text(value)


def _extended_resources(container: Container) -> list[str]:
    asked = {**container.resources("requests"), **container.resources("limits")}
    return [name for name, n in asked.items() if "/" in name and parse_quantity(n) != 0]


def _claims(container: Container) -> bool:
    where = f"{container.path}/resources"
    return bool(items(obj(container.raw.get("resources"), where).get("claims"), f"{where}/claims"))


def _has_accelerator(container: Container, config: Config) -> bool:
    return _claims(container) or any(
        "gpu" in name or "mig-" in name or name in config.accelerators
        for name in _extended_resources(container)
    )


def _may_have_nvidia(container: Container) -> bool:
    """A claim does not say whose device it stands for, so it may be NVIDIA's."""
    names = _extended_resources(container)
    return _claims(container) or any(name.startswith("nvidia.com/") for name in names)


def _profile(settings: _Settings, config: Config, level: Level) -> Profile:
    wished: Profile = settings.get("profile") or config.profile
    profile = admitted(wished, level)
    if profile is not wished:
        settings.note(f"profile {wished} lowered to {profile}: the namespace enforces {level}")
    return profile


def _identity(pod: Pod, container: Container) -> Identity:
    own, of_pod = container.security_context(), pod.security_context()

    def number(key: str) -> int | None:
        value = own.get(key)
        value = of_pod.get(key) if value is None else value
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return Identity(number("runAsUser"), number("runAsGroup"))


def _native(settings: _Settings, config: Config, oldest: Version | None) -> bool:
    wished = settings.get("native-sidecar") or config.native_sidecar
    if wished == "auto":
        return oldest is not None and oldest >= AUTO_NATIVE_SINCE
    if wished == "true" and oldest is not None and oldest < NATIVE_SINCE:
        # The restartPolicy would be dropped and the pod would wait for an init container forever.
        settings.note("native-sidecar true ignored: a node or the server is older than 1.28")
        return False
    return bool(wished == "true")


def _taken_ports(pod: Pod) -> set[int]:
    taken: set[int] = set()
    for container in (*pod.containers, *pod.init_containers):
        for port in items(container.raw.get("ports"), f"{container.path}/ports"):
            if port.get("protocol") in (None, "", "TCP"):
                numbers = (port.get("containerPort"), port.get("hostPort"))
                taken |= {n for n in numbers if isinstance(n, int)}
    return taken


def _port(pod: Pod, settings: _Settings, config: Config, origin: Origin) -> int | None:
    taken = _taken_ports(pod)
    wished = settings.get("port")
    if pod.host_network and wished is None:
        digest = hashlib.sha256(origin.uid.encode("utf-8", "surrogatepass")).digest()
        first = int.from_bytes(digest[:4], "big") % len(HOST_PORTS)
        candidates = chain(HOST_PORTS[first:], HOST_PORTS[:first])
    else:
        start = wished or config.port
        candidates = chain(
            range(start, min(start + 64, 65536)), range(max(start - 64, 1024), start)
        )
    port = next((port for port in candidates if port not in taken), None)
    if wished is not None and port != wished:
        settings.note(f"annotation port {wished} is taken by another container; using {port}")
    return port


def _resources(pod: Pod, settings: _Settings, config: Config) -> Resources | None:
    if obj(pod.spec.get("resources"), "/spec/resources"):
        return None
    cpu = _request_and_limit("cpu", settings, config)
    memory = _request_and_limit("memory", settings, config)
    if _guaranteed(pod):
        return Resources(cpu[1], cpu[1], memory[1], memory[1])
    return Resources(cpu[0], cpu[1], memory[0], memory[1])


def _request_and_limit(kind: str, settings: _Settings, config: Config) -> tuple[str, str]:
    """A request above its limit would get the pod rejected: the one not annotated follows."""
    asked, capped = settings.get(f"{kind}-request"), settings.get(f"{kind}-limit")
    default = (getattr(config, f"{kind}_request"), getattr(config, f"{kind}_limit"))
    request, limit = asked or default[0], capped or default[1]
    if (parse_quantity(request) or 0) <= (parse_quantity(limit) or 0):
        return request, limit
    if asked and capped:
        settings.note(f"annotation {kind}-request exceeds {kind}-limit; both ignored")
        return default
    return (asked, asked) if asked else (limit, limit)


def _guaranteed(pod: Pod) -> bool:
    """Whether the pod's class is Guaranteed: every container's requests equal its limits."""
    for container in (*pod.containers, *pod.init_containers):
        limits, requests = container.resources("limits"), container.resources("requests")
        for kind in ("cpu", "memory"):
            limit = parse_quantity(limits.get(kind))
            if not limit or parse_quantity(requests.get(kind, limits[kind])) != limit:
                return False
    return True


def _job_not_named(origin: Origin, settings: _Settings) -> str:
    """The job where nothing names it: of a template's pods it is left to what tells it later."""
    if origin.template is None:
        return origin.namespace or UNKNOWN
    if label := origin.template.label:
        settings.note(f"job known at run time only, from the pod's label {label}")
    else:
        settings.note(f"job not known offline: set the template's annotation {keys.JOB}")
    return ""


def _own_name(pod: Pod, origin: Origin) -> str:
    name = origin.name or text(pod.metadata.get("name"))
    return name or text(pod.metadata.get("generateName")).rstrip("-")
