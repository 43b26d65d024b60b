"""A cluster, as the tests use it: kubectl for what users type, raw requests for the rest."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families
from urllib3.exceptions import HTTPError

from webhook.cluster import TIMEOUT, Cluster, ClusterError

Json = dict[str, Any]
PREFIX = "kitty.k10s.dev/"
SYSTEM = "kitty-system"
OURS = {"kitty-e2e": "true"}


@dataclass(frozen=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


class Kube:
    """One cluster; ``api`` speaks raw JSON with it."""

    def __init__(self) -> None:
        self.api = Cluster.connect()

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return what it prints; AssertionError with its complaint."""
        done = subprocess.run(
            ["kubectl", *arguments], input=stdin, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, *objects: Json) -> None:
        """Create or change objects."""
        documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "-f", "-", stdin=documents)

    def text(self, path: str) -> str:
        """Read what is no JSON, such as a metrics page through the API server's proxy."""
        client = self.api._client
        auth = list(client.configuration.auth_settings())
        request = client.param_serialize(
            "GET", path, header_params={"Accept": "*/*"}, auth_settings=auth
        )
        try:
            response = client.call_api(*request, _request_timeout=TIMEOUT)
            body: bytes = response.read()
        except HTTPError as error:
            raise ClusterError(0, f"GET {path}: {error}") from error
        if response.status != 200:
            raise ClusterError(response.status, body.decode(errors="replace"))
        return body.decode()

    def proxy(self, namespace: str, pod: str, port: int | str) -> str:
        """Return the path that leads to a pod's port through the API server."""
        return f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy"

    def page(self, pod: Json) -> list[Sample]:
        """Read a sidecar's metrics; empty where it does not answer yet."""
        return self.samples(pod["metadata"]["namespace"], pod["metadata"]["name"], port_of(pod))

    def samples(self, namespace: str, name: str, port: int) -> list[Sample]:
        """Read a pod's metrics; empty where it does not answer yet."""
        try:
            text = self.text(f"{self.proxy(namespace, name, port)}/metrics")
        except ClusterError:
            return []
        return [
            Sample(sample.name, dict(sample.labels), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def pods(self, namespace: str, selector: str = "") -> list[Json]:
        """List pods in order of their names."""
        query = {"labelSelector": selector} if selector else {}
        found = self.api.items(f"/api/v1/namespaces/{namespace}/pods", **query)
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, namespace: str, name: str) -> Json:
        """Read one pod."""
        return self.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    def try_pod(self, namespace: str, pod: Json) -> Json:
        """Return what a pod would become if it were created."""
        return self.api.create(f"/api/v1/namespaces/{namespace}/pods", pod, dry_run=True)

    def events(self, namespace: str) -> list[str]:
        """List the messages of a namespace's events."""
        path = f"/api/v1/namespaces/{namespace}/events"
        return [str(event.get("message")) for event in self.api.items(path)]

    def wait(self, what: str, ready: Callable[[], Any], *, seconds: float = 90) -> Any:
        """Ask again and again until the answer is truthy, and return it."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                answer: Any = ready()
            except ClusterError as error:
                answer, why = None, str(error)
            else:
                why = ""
            if answer:
                return answer
            assert time.monotonic() < deadline, f"after {seconds} s still not: {what} {why}"
            time.sleep(0.25)

    def namespace(self, name: str, **labels: str) -> str:
        """Create a namespace that pods can be created in; ``__`` in a label is a slash."""
        named = {key.replace("__", "/"): value for key, value in labels.items()}
        metadata = {"name": name, "labels": {**OURS, **named}}
        self.api.create("/api/v1/namespaces", {"metadata": metadata})
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        self.wait(f"service account of {name}", lambda: self.api.get(path))
        return name

    def drop_namespaces(self, names: Iterable[str]) -> None:
        """Delete namespaces and wait until nothing of them is left."""
        here = [name for name in names if self.exists(f"/api/v1/namespaces/{name}")]
        if here:
            self.kubectl("delete", "namespace", "--wait=true", "--timeout=120s", *here)

    def exists(self, path: str) -> bool:
        """Tell whether there is such an object."""
        try:
            self.api.get(path)
        except ClusterError as error:
            if error.status != 404:
                raise
            return False
        return True

    def execute(self, namespace: str, pod: str, script: str, *, container: str = "trainer") -> str:
        """Run a shell script in a container."""
        return self.kubectl("exec", "-n", namespace, pod, "-c", container, "--", "sh", "-c", script)

    def native(self, namespace: str) -> bool:
        """Tell whether the server keeps an init container's restartPolicy."""
        probe = pod_of("probe", ["true"], image="probe")
        first = {"name": "first", "image": "probe", "restartPolicy": "Always"}
        probe["spec"]["initContainers"] = [first]
        probe["metadata"]["labels"][f"{PREFIX}inject"] = "false"
        try:
            made = self.try_pod(namespace, probe)
        except ClusterError:
            return False
        return bool(made["spec"]["initContainers"][0].get("restartPolicy"))


def pod_of(
    name: str,
    command: list[str],
    *,
    image: str,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    security: Json | None = None,
    **spec: Any,
) -> Json:
    """Return a pod of one container called trainer; keys of annotations lack the prefix."""
    notes = {f"{PREFIX}{key}": value for key, value in (annotations or {}).items()}
    container: Json = {"name": "trainer", "image": image, "command": command}
    container["imagePullPolicy"] = "IfNotPresent"
    container["resources"] = {
        "requests": {"cpu": "10m", "memory": "16Mi"},
        "limits": {"cpu": "1", "memory": "128Mi"},
    }
    if security is not None:
        container["securityContext"] = security
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {}), "annotations": notes},
        "spec": {
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            **spec,
        },
    }


def job_of(pod: Json, **spec: Any) -> Json:
    """Return a Job of such pods; one failure fails it."""
    metadata = pod["metadata"]
    template = {"metadata": {k: metadata[k] for k in ("labels", "annotations")}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": metadata["name"]},
        "spec": {"backoffLimit": 0, **spec, "template": {**template, "spec": pod["spec"]}},
    }


def restricted() -> Json:
    """Return the securityContext that every Pod Security level admits."""
    return {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def sidecars(pod: Json) -> list[Json]:
    """List the kitty containers of a pod, native or ordinary."""
    spec = pod["spec"]
    every = [*spec["containers"], *spec.get("initContainers", [])]
    return [container for container in every if container["name"] == "kitty"]


def status_of(pod: Json) -> Json:
    """Return what the webhook wrote about a pod; empty where it did not see it."""
    found: Json = json.loads(pod["metadata"].get("annotations", {}).get(f"{PREFIX}status", "{}"))
    return found


def port_of(pod: Json) -> int:
    """Return the port that the webhook chose."""
    return int(status_of(pod)["port"])


def all_ready(pod: Json) -> bool:
    """Tell whether every container runs, the native sidecar included."""
    status = pod.get("status", {})
    ordinary = status.get("containerStatuses", [])
    native = [
        state for state in status.get("initContainerStatuses", []) if state["name"] == "kitty"
    ]
    wanted = len(pod["spec"]["containers"]) + len(
        [c for c in pod["spec"].get("initContainers", []) if c["name"] == "kitty"]
    )
    return len(ordinary) + len(native) == wanted and all(
        state.get("ready") or "running" in state.get("state", {}) for state in [*ordinary, *native]
    )


def outcome(job: Json) -> tuple[str, str] | None:
    """Return how a Job ended and the reason given; None while it runs."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return condition["type"], condition.get("reason", "")
    return None


@dataclass
class Stream:
    """Creates a pod again and again in a thread, as a dry run, and counts those without sidecar."""

    kube: Kube
    namespace: str
    pod: Json
    made: int = 0
    missed: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            try:
                if not sidecars(self.kube.try_pod(self.namespace, self.pod)):
                    self.missed.append(f"pod {self.made} at {time.time():.2f}")
            except ClusterError as error:
                self.missed.append(f"pod {self.made} refused: {error}")
            self.made += 1

    def more(self, count: int) -> None:
        """Wait until that many more pods were tried."""
        wanted = self.made + count
        self.kube.wait(f"{count} more pods", lambda: self.made >= wanted)
