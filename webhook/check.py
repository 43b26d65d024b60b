"""What would stop injection in a cluster, found by asking it."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import socket
import ssl
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from webhook import __version__
from webhook import annotations as keys
from webhook.cluster import WEBHOOKS, Cluster, ClusterError, versions
from webhook.decision import AUTO_NATIVE_SINCE, SIDECAR, Origin
from webhook.images import presence
from webhook.inject import Target, inject
from webhook.pod import Pod, UnreadablePodError
from webhook.profiles import Level, admitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from webhook.config import Config
    from webhook.pod import JsonObject

ENFORCE = "pod-security.kubernetes.io/enforce"
_CONNECT_LIMIT = 3.0


class Severity(StrEnum):
    """How much a finding matters: a problem makes the command exit 1."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        severity: See Severity.
        check: Which check found it.
        subject: The object it is about.
        message: What is so, and what follows from it.
    """

    severity: Severity
    check: str
    subject: str
    message: str


@dataclass(frozen=True)
class Namespace:
    """A namespace as injection sees it."""

    name: str
    inject: str
    level: Level | None

    @property
    def labelled(self) -> bool:
        """Whether its pods are injected unless they say otherwise."""
        return self.inject == "true"


@dataclass(frozen=True)
class Place:
    """What is looked at.

    Attributes:
        cluster: The API.
        config: The webhook's configuration, as far as this machine knows it.
        webhook_config: The name of the MutatingWebhookConfiguration.
        secret: The Secret with the served certificate, in the Service's namespace, for machines
            that cannot reach the Service; None to do without.
        reach: Opens a TLS connection that trusts a CA bundle; tests may give their own.
    """

    cluster: Cluster
    config: Config
    webhook_config: str
    secret: str | None
    reach: Callable[[str, int, str, str], str]


def reach(host: str, port: int, server_name: str, bundle: str) -> str:
    """Tries a TLS connection as the API server would make it.

    Returns:
        Empty where it stands; what is wrong with the certificate where that is it.

    Raises:
        OSError: Nothing answers there, seen from this machine.
    """
    context = ssl.create_default_context(cadata=bundle)
    with socket.create_connection((host, port), timeout=_CONNECT_LIMIT) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=server_name):
                return ""
        except ssl.SSLError as error:
            return str(error)


def findings(place: Place) -> list[Finding]:
    """Runs every check; one that the API refuses to answer is a problem of its own."""
    found: list[Finding] = []
    configuration = _configuration(place, found)
    excluded = {"kube-system", *_own_namespaces(configuration)}
    namespaces = _namespaces(place, found, excluded)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("endpoint", lambda: _endpoints(place, configuration)),
        ("versions", lambda: _versions(place)),
        ("image", lambda: _image(place, excluded)),
        ("labels", lambda: _labels(namespaces)),
        ("level", lambda: _levels(place, namespaces)),
        ("pods", lambda: _pods(place, namespaces)),
        ("dry-run", lambda: _dry_runs(place, namespaces)),
    ]
    for name, check in checks:
        try:
            found += check()
        except ClusterError as error:
            found.append(Finding(Severity.PROBLEM, name, "API server", str(error)))
    return found


def _configuration(place: Place, found: list[Finding]) -> JsonObject:
    subject = place.webhook_config
    try:
        configuration = place.cluster.get(f"{WEBHOOKS}/{subject}")
    except ClusterError as error:
        message = "is not installed: nothing is injected" if error.status == 404 else str(error)
        found.append(Finding(Severity.PROBLEM, "configuration", subject, message))
        return {}
    before = len(found)
    for entry in configuration.get("webhooks") or []:
        where = f"{subject}/{entry.get('name')}"
        if entry.get("failurePolicy") != "Ignore":
            message = "failurePolicy is not Ignore: pods cannot start while the webhook is away"
            found.append(Finding(Severity.PROBLEM, "configuration", where, message))
        if not (entry.get("clientConfig") or {}).get("caBundle"):
            message = "caBundle is empty: the API server trusts no certificate of the webhook"
            found.append(Finding(Severity.PROBLEM, "configuration", where, message))
    if not configuration.get("webhooks"):
        message = "has no entries: nothing is injected"
        found.append(Finding(Severity.PROBLEM, "configuration", subject, message))
    if len(found) == before:
        entries = len(configuration["webhooks"])
        found.append(Finding(Severity.OK, "configuration", subject, f"{entries} entries"))
    return configuration


def _clients(configuration: JsonObject) -> list[JsonObject]:
    return [entry.get("clientConfig") or {} for entry in configuration.get("webhooks") or []]


def _own_namespaces(configuration: JsonObject) -> set[str]:
    services = [client.get("service") or {} for client in _clients(configuration)]
    return {str(service["namespace"]) for service in services if service.get("namespace")}


def _address(client: JsonObject) -> tuple[str, int]:
    if client.get("url"):
        url = urlsplit(client["url"])
        return url.hostname or "", url.port or 443
    service = client.get("service") or {}
    return f"{service.get('name')}.{service.get('namespace')}.svc", int(service.get("port") or 443)


def _endpoints(place: Place, configuration: JsonObject) -> Iterator[Finding]:
    bundles: dict[tuple[str, int], set[str]] = defaultdict(set)
    for client in _clients(configuration):
        if client.get("caBundle"):
            bundles[_address(client)].add(client["caBundle"])
    for (host, port), of_address in sorted(bundles.items()):
        subject = f"{host}:{port}"
        for encoded in sorted(of_address):
            yield _endpoint(place, subject, host, port, encoded)
    for name, namespace in sorted(_services(configuration)):
        yield from _service(place, name, namespace)
        if place.secret:
            everything = set().union(*bundles.values())
            yield _stored(place.cluster, f"{namespace}/{place.secret}", everything)


def _endpoint(place: Place, subject: str, host: str, port: int, encoded: str) -> Finding:
    try:
        bundle = base64.b64decode(encoded, validate=True).decode("ascii")
        wrong = place.reach(host, port, host, bundle)
    except (ssl.SSLError, binascii.Error, UnicodeDecodeError) as error:
        return Finding(Severity.PROBLEM, "endpoint", subject, f"caBundle is unreadable: {error}")
    except OSError as error:
        message = f"cannot be reached from here ({error}); the dry runs tell whether the API can"
        in_cluster = host.endswith(".svc")
        return Finding(
            Severity.NOTE if in_cluster else Severity.PROBLEM,
            "endpoint",
            subject,
            message if in_cluster else f"cannot be reached: {error}",
        )
    if wrong:
        message = f"caBundle does not fit the served certificate: {wrong}"
        return Finding(Severity.PROBLEM, "endpoint", subject, message)
    return Finding(Severity.OK, "endpoint", subject, "reached, certificate trusted by caBundle")


def _stored(cluster: Cluster, secret: str, bundles: set[str]) -> Finding:
    from webhook.certificates import trusts  # noqa: PLC0415 -- 10 MB for one question

    namespace, _, name = secret.partition("/")
    data = cluster.get(f"/api/v1/namespaces/{namespace}/secrets/{name}").get("data") or {}
    try:
        certificate = base64.b64decode(data.get("tls.crt") or "", validate=True)
        fits = all(trusts(base64.b64decode(b, validate=True), certificate) for b in bundles)
    except ValueError as error:
        return Finding(Severity.PROBLEM, "endpoint", f"secret {secret}", f"unreadable: {error}")
    if fits:
        return Finding(Severity.OK, "endpoint", f"secret {secret}", "trusted by every caBundle")
    message = "a caBundle does not hold the CA of the stored certificate"
    return Finding(Severity.PROBLEM, "endpoint", f"secret {secret}", message)


def _services(configuration: JsonObject) -> set[tuple[str, str]]:
    services = [client.get("service") or {} for client in _clients(configuration)]
    return {(str(s.get("name")), str(s.get("namespace"))) for s in services if s.get("name")}


def _service(place: Place, name: str, namespace: str) -> Iterator[Finding]:
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    ready = 0
    for piece in place.cluster.items(path, labelSelector=f"kubernetes.io/service-name={name}"):
        for endpoint in piece.get("endpoints") or []:
            ready += (endpoint.get("conditions") or {}).get("ready") is not False
    subject = f"service {namespace}/{name}"
    if ready:
        yield Finding(Severity.OK, "endpoint", subject, f"{ready} ready endpoints")
    else:
        yield Finding(Severity.PROBLEM, "endpoint", subject, "has no ready endpoint")


def _versions(place: Place) -> Iterator[Finding]:
    found = versions(place.cluster)
    unknown = [name for name, version in found.items() if version is None]
    for name in unknown:
        message = "its version cannot be read: sidecars are ordinary containers"
        yield Finding(Severity.NOTE, "versions", name, message)
    known = {name: version for name, version in found.items() if version}
    if not known or unknown:
        return
    name, version = min(known.items(), key=lambda item: item[1])
    text = ".".join(map(str, version))
    if version >= AUTO_NATIVE_SINCE:
        yield Finding(Severity.OK, "versions", name, f"oldest is {text}: native sidecars")
    else:
        message = f"oldest is {text}: ordinary sidecars until all are 1.29 or newer"
        yield Finding(Severity.NOTE, "versions", name, message)


def _image(place: Place, excluded: set[str]) -> Iterator[Finding]:
    """Of the image that the webhook gives a pod now; of the configuration's where none answers."""
    image = place.config.image
    if "default" not in excluded:
        probe = probe_pod(inject_label="true")
        path = "/api/v1/namespaces/default/pods"
        with contextlib.suppress(ClusterError):
            made = Pod.read(place.cluster.create(path, probe, dry_run=True))
            for container in (*made.init_containers, *made.containers):
                if container.name == SIDECAR:
                    image = str(container.raw.get("image"))
    there = presence(place.cluster, image)
    missing = there.nodes - there.having - there.unsure
    if missing:
        message = (
            f"is not on {missing} of {there.nodes} nodes: they must be able to pull it, or pods "
            "with a native sidecar wait for it for ever"
        )
        yield Finding(Severity.NOTE, "image", image, message)
    else:
        yield Finding(Severity.OK, "image", image, f"on {there.having} of {there.nodes} nodes")


def _namespaces(place: Place, found: list[Finding], excluded: set[str]) -> dict[str, Namespace]:
    namespaces = {}
    try:
        for raw in place.cluster.items("/api/v1/namespaces"):
            metadata = raw.get("metadata") or {}
            labels, name = metadata.get("labels") or {}, str(metadata.get("name"))
            if name in excluded:
                continue
            level = labels.get(ENFORCE)
            known = Level(level) if level in set(Level) else None
            namespaces[name] = Namespace(name, labels.get(keys.INJECT_LABEL, ""), known)
    except ClusterError as error:
        found.append(Finding(Severity.PROBLEM, "namespaces", "API server", str(error)))
    return namespaces


def _bad_label(value: str) -> bool:
    return value not in ("", "true", "false")


def _labels(namespaces: dict[str, Namespace]) -> Iterator[Finding]:
    for namespace in namespaces.values():
        if _bad_label(namespace.inject):
            yield _absent_label(f"namespace {namespace.name}", namespace.inject)
    labelled = [namespace.name for namespace in namespaces.values() if namespace.labelled]
    names = ", ".join(labelled) or "none; only pods that are labelled themselves are injected"
    yield Finding(Severity.OK, "labels", "labelled namespaces", names)


def _absent_label(subject: str, value: str) -> Finding:
    message = f'label {keys.INJECT_LABEL}="{value}" counts as absent; allowed: true, false'
    return Finding(Severity.PROBLEM, "labels", subject, message)


def _level(place: Place, namespace: Namespace) -> Level:
    return namespace.level or place.config.default_level


def _levels(place: Place, namespaces: dict[str, Namespace]) -> Iterator[Finding]:
    for namespace in namespaces.values():
        level = _level(place, namespace)
        profile = admitted(place.config.profile, level)
        if namespace.labelled and profile is not place.config.profile:
            message = f"enforces {level}: the profile is lowered to {profile}"
            yield Finding(Severity.NOTE, "level", f"namespace {namespace.name}", message)


def _pods(place: Place, namespaces: dict[str, Namespace]) -> Iterator[Finding]:
    ports: dict[tuple[str, int], list[str]] = defaultdict(list)
    missing = False
    for raw in place.cluster.items("/api/v1/pods"):
        try:
            pod = Pod.read(raw)
        except UnreadablePodError:
            continue
        namespace = namespaces.get(str(pod.metadata.get("namespace")))
        running = (raw.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        if namespace is None or not running:
            continue
        subject = f"pod {namespace.name}/{pod.metadata.get('name')}"
        label = pod.labels.get(keys.INJECT_LABEL, "")
        if _bad_label(label):
            yield _absent_label(subject, label)
        _note_ports(pod, subject, ports)
        for finding in _sidecar_of(pod, subject, wanted=_wanted(label, namespace)):
            missing |= finding.severity is Severity.PROBLEM
            yield finding
    if not missing:
        message = "every running pod that asks for a sidecar has one"
        yield Finding(Severity.OK, "pods", "labelled pods", message)
    yield from _collisions(ports)


def _wanted(label: str, namespace: Namespace) -> bool:
    return label == "true" or (label != "false" and namespace.labelled)


def _status(pod: Pod) -> JsonObject:
    try:
        status = json.loads(pod.annotations.get(keys.STATUS, "{}"))
    except (ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}


def _sidecar_of(pod: Pod, subject: str, *, wanted: bool) -> Iterator[Finding]:
    status = _status(pod)
    # A container of that name may be the user's own: the status then says that it was skipped.
    there = _has_sidecar(pod.raw) and not status.get("skipped")
    if there and status.get("version") not in (None, __version__):
        message = f"sidecar of version {status['version']}, this is {__version__}"
        yield Finding(Severity.NOTE, "pods", subject, message)
    elif not there and wanted and status.get("skipped"):
        yield Finding(Severity.NOTE, "pods", subject, f"skipped: {status['skipped']}")
    elif not there and wanted and "kubernetes.io/config.mirror" not in pod.annotations:
        message = "runs without a sidecar: it was admitted while the webhook was away"
        yield Finding(Severity.PROBLEM, "pods", subject, message)


def _note_ports(pod: Pod, subject: str, ports: dict[tuple[str, int], list[str]]) -> None:
    node = pod.spec.get("nodeName")
    if not isinstance(node, str):
        return
    claimed = [
        port.get("hostPort")
        for container in (*pod.containers, *pod.init_containers)
        for port in container.raw.get("ports") or []
    ]
    if pod.host_network:
        claimed.append(_status(pod).get("port"))
    for number in {n for n in claimed if isinstance(n, int) and n}:
        ports[node, number].append(subject)


def _collisions(ports: dict[tuple[str, int], list[str]]) -> Iterator[Finding]:
    for (node, port), subjects in sorted(ports.items()):
        if len(subjects) > 1:
            message = f"port {port} is claimed by {' and '.join(subjects)}"
            yield Finding(Severity.PROBLEM, "ports", f"node {node}", message)


def probe_pod(*, inject_label: str) -> JsonObject:
    """A pod that every level admits, for a dry run."""
    quantities = {"cpu": "10m", "memory": "16Mi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "kitty-check-",
            "labels": {keys.INJECT_LABEL: inject_label},
        },
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65534,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "probe",
                    "image": "kitty-check",
                    "resources": {"requests": quantities, "limits": quantities},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def _dry_runs(place: Place, namespaces: dict[str, Namespace]) -> Iterator[Finding]:
    for namespace in namespaces.values():
        if namespace.labelled:
            yield _dry_run(place, namespace)


def _dry_run(place: Place, namespace: Namespace) -> Finding:
    """A plain pod, a labelled one, and where no webhook answered one that is injected here."""
    subject = f"namespace {namespace.name}"
    if refusal := _refusal(place, namespace, probe_pod(inject_label="false"))[0]:
        message = f"cannot be judged, it refuses even a plain pod: {refusal}"
        return Finding(Severity.NOTE, "dry-run", subject, message)
    refusal, made = _refusal(place, namespace, probe_pod(inject_label="true"))
    if refusal:
        return Finding(Severity.PROBLEM, "dry-run", subject, f"refuses injected pods: {refusal}")
    if _has_sidecar(made):
        return Finding(Severity.OK, "dry-run", subject, "a pod is injected and admitted")
    here = probe_pod(inject_label="true")
    origin = Origin(uid=namespace.name, namespace=namespace.name)
    inject(here, Target(place.config, _level(place, namespace), None), origin=origin)
    if refusal := _refusal(place, namespace, here)[0]:
        message = f"no webhook answered, and injected pods would be refused: {refusal}"
        return Finding(Severity.PROBLEM, "dry-run", subject, message)
    message = "no webhook answered: pods start without a sidecar"
    return Finding(Severity.PROBLEM, "dry-run", subject, message)


def _refusal(place: Place, namespace: Namespace, pod: JsonObject) -> tuple[str, Any]:
    path = f"/api/v1/namespaces/{namespace.name}/pods"
    try:
        return "", place.cluster.create(path, pod, dry_run=True)
    except ClusterError as error:
        if error.status in (0, 401) or error.status >= 500:
            raise
        return str(error), None


def _has_sidecar(pod: Any) -> bool:
    try:
        read = Pod.read(pod)
    except UnreadablePodError:
        return False
    return any(c.name == SIDECAR for c in (*read.init_containers, *read.containers))


def check(place: Place, *, as_json: bool) -> int:
    """Prints what would stop injection.

    Returns:
        0, or 1 where there is a problem.
    """
    found = findings(place)
    problems = sum(finding.severity is Severity.PROBLEM for finding in found)
    if as_json:
        report = {"problems": problems, "findings": [asdict(finding) for finding in found]}
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        for finding in found:
            print(f"{finding.severity:8} {finding.check:14} {finding.subject}: {finding.message}")
        print(f"{problems} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0
