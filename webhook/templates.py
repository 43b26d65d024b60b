"""Where a manifest keeps pods and pod templates, and what it tells of the job of their pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from webhook.jobs import JOBSET, KUBEFLOW, LWS, RAY, VOLCANO, PodsJob
from webhook.pod import text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from webhook.pod import JsonObject

_JOB_NAME = "batch.kubernetes.io/job-name"
_TOLD_BY: Mapping[str, str] = {
    "batch/Job": _JOB_NAME,
    "batch/CronJob": _JOB_NAME,
    "batch.volcano.sh/Job": VOLCANO + "job-name",
    "jobset.x-k8s.io/JobSet": JOBSET + "jobset-name",
    "kubeflow.org/MPIJob": KUBEFLOW + "job-name",
    "kubeflow.org/PyTorchJob": KUBEFLOW + "job-name",
    "ray.io/RayCluster": RAY + "cluster",
    "ray.io/RayJob": RAY + "cluster",
    "trainer.kubeflow.org/ClusterTrainingRuntime": JOBSET + "jobset-name",
    "trainer.kubeflow.org/TrainingRuntime": JOBSET + "jobset-name",
}
"""The label of a pod that holds its job's name, by group and kind of what it is made from."""
_ONE_FOR_MANY_JOBS = frozenset(
    {
        "batch/CronJob",
        "trainer.kubeflow.org/ClusterTrainingRuntime",
        "trainer.kubeflow.org/TrainingRuntime",
    }
)
"""Kinds whose own name is no job's: each run of them is one."""


@dataclass(frozen=True)
class Found:
    """One pod or pod template.

    Attributes:
        owner: The nearest object around it that has a kind; the pod itself where it is one.
        path: The way from there, such as ``.spec.template``; empty for a pod.
        pod: The object that has ``metadata`` and ``spec``.
    """

    owner: JsonObject
    path: str
    pod: JsonObject

    @property
    def name(self) -> str:
        """The owner's name; empty where the server is still to generate it."""
        return _metadata(self.owner, "name")

    @property
    def namespace(self) -> str:
        """The owner's namespace; empty where it does not say."""
        return _metadata(self.owner, "namespace")

    @property
    def title(self) -> str:
        """What messages call it."""
        return title(self.owner) + self.path

    @property
    def job(self) -> PodsJob | None:
        """What the owner tells of the job; None for a pod that has a name to tell it."""
        if not self.path:
            named = self.name or _metadata(self.owner, "generateName")
            return None if named else PodsJob()
        kind = f"{text(self.owner.get('apiVersion')).partition('/')[0]}/{self.owner.get('kind')}"
        if kind == "leaderworkerset.x-k8s.io/LeaderWorkerSet":
            group = LWS + "group-index" if self.name else ""
            return PodsJob(label=group, prefix=f"{self.name}-")
        if self.name and kind not in _ONE_FOR_MANY_JOBS:
            return PodsJob(name=self.name)
        return PodsJob(label=_TOLD_BY.get(kind, ""))


def title(document: JsonObject) -> str:
    """Kind and name of an object, as far as it says them."""
    kind = text(document.get("kind"))
    name = _metadata(document, "name") or _metadata(document, "generateName")
    return f"{kind}/{name}" if name else kind


def _metadata(document: JsonObject, key: str) -> str:
    metadata = document.get("metadata")
    return str(metadata.get(key) or "") if isinstance(metadata, dict) else ""


def pods_in(document: JsonObject) -> Iterator[Found]:
    """Finds the pods and pod templates of a document.

    A template is what stands under a key named ``template`` or ``...Template`` and has containers:
    so it is in Deployment, StatefulSet, Job, CronJob, JobSet, PyTorchJob, MPIJob, the runtimes of
    TrainJob, RayCluster, LeaderWorkerSet, Volcano's Job and most others.
    """
    if document.get("kind") == "Pod":
        yield Found(document, "", document)
        return
    stack: list[tuple[JsonObject, str, Any]] = [(document, "", document)]
    while stack:
        owner, path, node = stack.pop()
        if isinstance(node, list):
            children = [(owner, f"{path}[{i}]", item) for i, item in enumerate(node)]
        elif isinstance(node, dict):
            children = [(owner, f"{path}.{key}", value) for key, value in node.items()]
        else:
            continue
        children = [(c, "", c) if _is_manifest(c) else (o, p, c) for o, p, c in children]
        for child_owner, child_path, child in children:
            key = child_path.rpartition(".")[2].lower()
            is_pod = not child_path and child.get("kind") == "Pod"
            if is_pod or (isinstance(child, dict) and _is_template(key, child)):
                yield Found(child_owner, child_path, child)
        stack += [c for c in reversed(children) if isinstance(c[2], dict | list)]


def _is_manifest(node: Any) -> bool:
    """Whether it is an object of its own, as the items of a List are."""
    if not isinstance(node, dict) or not text(node.get("kind")):
        return False
    return node["kind"] == "Pod" or isinstance(node.get("metadata"), dict)


def _is_template(key: str, node: JsonObject) -> bool:
    spec = node.get("spec")
    return key.endswith("template") and isinstance(spec, dict) and bool(spec.get("containers"))
