"""Which job a pod belongs to and which rank it is, from what its controller wrote on it.

One line per controller in CONTROLLERS. A rank is given only where the controller tells it for
the whole job: an index within a part of the job is no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from webhook.annotations import MAX_JOB
from webhook.pod import Container, Pod, items, text

Marks = Mapping[str, str]
"""Labels and annotations of a pod together; where both hold a key, the label's value."""

INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET = "jobset.sigs.k8s.io/"
KUBEFLOW = "training.kubeflow.org/"
TRAINER = "trainer.kubeflow.org/"
VOLCANO = "volcano.sh/"
RAY = "ray.io/"
LWS = "leaderworkerset.sigs.k8s.io/"
POD_INDEX = "apps.kubernetes.io/pod-index"


@dataclass(frozen=True)
class Membership:
    """The job and, where it is known, the rank of a pod."""

    job: str
    rank: int | None


@dataclass(frozen=True)
class Controller:
    """How one controller marks its pods.

    Attributes:
        name: The controller, for the documentation.
        job: Gives the job's name, or an empty text where the pod is not this controller's.
        rank: Gives the rank as text, or an empty text where it is not told.
    """

    name: str
    job: Callable[[Marks], str]
    rank: Callable[[Marks], str]


def _mark(key: str) -> Callable[[Marks], str]:
    return lambda marks: marks.get(key, "")


def _untold(_: Marks) -> str:
    return ""


def _jobset_rank(marks: Marks) -> str:
    """The completion index, where the whole JobSet is one Job: else it is only a Job's own."""
    jobs = marks.get(JOBSET + "global-replicas") or marks.get(JOBSET + "replicatedjob-replicas")
    return marks.get(INDEX, "") if jobs == "1" else ""


def _trainjob_job(marks: Marks) -> str:
    return (
        marks.get(JOBSET + "jobset-name", "") if TRAINER + "trainjob-ancestor-step" in marks else ""
    )


def _trainjob_rank(marks: Marks) -> str:
    """The nodes of a TrainJob are the one Job of its trainer step; other steps do not train."""
    return marks.get(INDEX, "") if marks[TRAINER + "trainjob-ancestor-step"] == "trainer" else ""


def _kubeflow_rank(marks: Marks) -> str:
    """Master is 0. A worker's index is its rank only in jobs that have workers and no master."""
    role, index = (
        marks.get(KUBEFLOW + "replica-type", "").lower(),
        marks.get(KUBEFLOW + "replica-index", ""),
    )
    if marks.get(KUBEFLOW + "operator-name", "") == "mpi-operator":
        return index
    if role == "master":
        return "0"
    return ""


def _lws_job(marks: Marks) -> str:
    name, group = marks.get(LWS + "name", ""), marks.get(LWS + "group-index", "")
    return f"{name}-{group}" if name and group else name


def _ray_job(marks: Marks) -> str:
    return marks.get(RAY + "originated-from-cr-name", "") or marks.get(RAY + "cluster", "")


CONTROLLERS: Sequence[Controller] = (
    Controller("LeaderWorkerSet", _lws_job, _mark(LWS + "worker-index")),
    Controller("TrainJob (Kubeflow Trainer)", _trainjob_job, _trainjob_rank),
    Controller("JobSet", _mark(JOBSET + "jobset-name"), _jobset_rank),
    Controller("PyTorchJob, MPIJob (Kubeflow)", _mark(KUBEFLOW + "job-name"), _kubeflow_rank),
    Controller("Ray", _ray_job, _untold),
    Controller("Volcano", _mark(VOLCANO + "job-name"), _mark(VOLCANO + "task-index")),
    Controller("Job", _mark("batch.kubernetes.io/job-name"), _mark(INDEX)),
    Controller("Job before 1.27", _mark("job-name"), _mark(INDEX)),
)
"""In order of precedence: a JobSet's pods are a Job's pods too, and so on."""


def membership(
    pod: Pod, watched: Sequence[Container], *, annotated: str | None, name: str
) -> Membership:
    """Resolves job and rank.

    Args:
        pod: The pod under review.
        watched: The containers that will be watched.
        annotated: The job that the pod's annotation names; it wins.
        name: The name to fall back to: the pod's own, or that of the object it is made from.
    """
    marks = {**pod.annotations, **pod.labels}
    owner_kind, owner_name = _owner(pod)
    controller = next((c for c in CONTROLLERS if c.job(marks)), None)
    told_job = controller.job(marks) if controller else ""
    told_rank = controller.rank(marks) if controller else ""
    if controller is None and owner_kind == "StatefulSet":
        told_rank = marks.get(POD_INDEX, "") or _ordinal(name, owner_name)
    job = annotated or _job_name(watched) or told_job or owner_name or name
    return Membership(job[:MAX_JOB], _rank(told_rank))


def _job_name(watched: Sequence[Container]) -> str:
    """A literal JOB_NAME; one that refers to another variable is known only in the container."""
    for container in watched:
        value = text((container.variable("JOB_NAME") or {}).get("value"))
        if value.strip() and "$(" not in value and value.isprintable():
            return value.strip()
    return ""


def _owner(pod: Pod) -> tuple[str, str]:
    owners = items(pod.metadata.get("ownerReferences"), "/metadata/ownerReferences")
    owner = next((o for o in owners if o.get("controller") is True), owners[0] if owners else {})
    kind, name = text(owner.get("kind")), text(owner.get("name"))
    template_hash = pod.labels.get("pod-template-hash", "")
    if kind == "ReplicaSet" and template_hash:
        name = name.removesuffix("-" + template_hash)
    return kind, name


def _ordinal(name: str, owner: str) -> str:
    return name.removeprefix(owner + "-") if owner and name.startswith(owner + "-") else ""


def _rank(told: str) -> int | None:
    return int(told) if told.isascii() and told.isdigit() and len(told) <= 7 else None
