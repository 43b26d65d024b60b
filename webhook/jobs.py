"""Which job a pod belongs to and which rank it is, from what its controller wrote on it.

One line per controller in CONTROLLERS. A rank is given only where the controller tells it for
the whole job: an index within a part of the job is no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from webhook.annotations import MAX_JOB
from webhook.pod import Container, Pod, items, text

INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET = "jobset.sigs.k8s.io/"
KUBEFLOW = "training.kubeflow.org/"
VOLCANO = "volcano.sh/"
RAY = "ray.io/"
LWS = "leaderworkerset.sigs.k8s.io/"
POD_INDEX = "apps.kubernetes.io/pod-index"
UNKNOWN = "unknown"
"""The job of a pod that nothing names."""


@dataclass(frozen=True)
class Membership:
    """The job and, where it is known, the rank of a pod."""

    job: str
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class PodsJob:
    """What the owner of a pod template tells of the job of the pods made from it.

    Attributes:
        name: The job; empty where it is known only when a pod is there.
        label: A label of such a pod that tells it then; empty where none does.
        prefix: What stands before the label's value.
    """

    name: str = ""
    label: str = ""
    prefix: str = ""


@dataclass(frozen=True)
class Facts:
    """What a controller's line may look at.

    Attributes:
        marks: Labels and annotations together; where both hold a key, the label's value.
        name: The pod's name; empty or a prefix where the server is still to generate it.
        owner: Kind and name of the owner.
        watched: The watched containers.
    """

    marks: Mapping[str, str]
    name: str
    owner: tuple[str, str]
    watched: Sequence[Container]

    def mark(self, key: str) -> str:
        """A label or annotation; empty where there is none."""
        return self.marks.get(key, "")

    def literal(self, variable: str) -> str:
        """The literal value of a variable of a watched container; empty where there is none.

        One that refers to another variable is known only inside the container.
        """
        for container in self.watched:
            value = text((container.variable(variable) or {}).get("value")).strip()
            if value and "$(" not in value and value.isprintable():
                return value
        return ""

    def ordinals(self, owner: str) -> list[str]:
        """The numbers after the owner's name in the pod's: ``["1", "3"]`` of ``set-1-3``."""
        prefix = owner + "-"
        return self.name.removeprefix(prefix).split("-") if self.name.startswith(prefix) else []


Teller = Callable[[Facts], str]


@dataclass(frozen=True)
class Controller:
    """How one controller marks its pods.

    Attributes:
        name: The controller, for the documentation.
        job: Gives the job's name, or an empty text where the pod is not this controller's.
        rank: Gives the rank as text, or an empty text where it is not told.
    """

    name: str
    job: Teller
    rank: Teller


def _mark(key: str) -> Teller:
    return lambda facts: facts.mark(key)


def _untold(_: Facts) -> str:
    return ""


def _jobset_rank(facts: Facts) -> str:
    """The completion index, where the JobSet is one Job or the Job is a TrainJob's ``node``.

    Elsewhere the index counts within one of several Jobs.
    """
    alone = facts.mark(JOBSET + "global-replicas") == "1"
    nodes = facts.mark(JOBSET + "replicatedjob-name") == "node"
    nodes = nodes and facts.mark(JOBSET + "replicatedjob-replicas") == "1"
    return facts.mark(INDEX) if alone or nodes else ""


def _mpijob_job(facts: Facts) -> str:
    ours = facts.mark(KUBEFLOW + "operator-name") == "mpi-operator"
    return facts.mark(KUBEFLOW + "job-name") if ours else ""


def _kubeflow_rank(facts: Facts) -> str:
    """A master is 0 and the workers count from 1; in an elastic job no pod has a fixed rank."""
    kind, index = (
        facts.mark(KUBEFLOW + "replica-type").lower(),
        facts.mark(KUBEFLOW + "replica-index"),
    )
    if kind == "master":
        return "0"
    place = _rank(index)
    if kind == "worker" and place is not None and "-master-" in facts.literal("MASTER_ADDR"):
        return str(place + 1)
    return ""


def _lws_job(facts: Facts) -> str:
    """Each group of the set is a job of its own: the groups are replicas of one another.

    The leader's group is written by that controller's own webhook, which may come after this one.
    """
    name = facts.mark(LWS + "name")
    group = facts.mark(LWS + "group-index") or next(iter(facts.ordinals(name)), "")
    return f"{name}-{group}" if name and group else name


def _lws_rank(facts: Facts) -> str:
    ordinals = facts.ordinals(facts.mark(LWS + "name"))
    return facts.mark(LWS + "worker-index") or (ordinals[1] if len(ordinals) == 2 else "")


def _ray_job(facts: Facts) -> str:
    return facts.mark(RAY + "originated-from-cr-name") or facts.mark(RAY + "cluster")


def _statefulset_job(facts: Facts) -> str:
    kind, name = facts.owner
    return name if kind == "StatefulSet" else ""


def _statefulset_rank(facts: Facts) -> str:
    return facts.mark(POD_INDEX) or next(iter(facts.ordinals(facts.owner[1])), "")


CONTROLLERS: Sequence[Controller] = (
    Controller("LeaderWorkerSet", _lws_job, _lws_rank),
    Controller("JobSet; TrainJob", _mark(JOBSET + "jobset-name"), _jobset_rank),
    Controller("MPIJob", _mpijob_job, _mark(KUBEFLOW + "replica-index")),
    Controller("PyTorchJob and kin", _mark(KUBEFLOW + "job-name"), _kubeflow_rank),
    Controller("Ray", _ray_job, _untold),
    Controller("Volcano", _mark(VOLCANO + "job-name"), _mark(VOLCANO + "task-index")),
    Controller("Job", _mark("batch.kubernetes.io/job-name"), _mark(INDEX)),
    Controller("Job before 1.27", _mark("job-name"), _mark(INDEX)),
    Controller("StatefulSet", _statefulset_job, _statefulset_rank),
)
"""In order of precedence: a JobSet's pods are a Job's pods too, and so on."""


def membership(
    pod: Pod, watched: Sequence[Container], *, annotated: str | None, name: str, fallback: str
) -> Membership:
    """Resolves job and rank.

    Args:
        pod: The pod under review.
        watched: The containers that will be watched.
        annotated: The job that the pod's annotation names; it wins.
        name: The pod's name, as far as it is known.
        fallback: The job where neither container, controller nor owner names one; empty where
            that is not known yet, and then the result's may be empty.
    """
    owner = _owner(pod)
    facts = Facts({**pod.annotations, **pod.labels}, name, owner, watched)
    job, rank = next(((j, c.rank) for c in CONTROLLERS if (j := c.job(facts))), ("", _untold))
    names = (annotated or "", facts.literal("JOB_NAME"), job, owner[1], fallback)
    return Membership(next(filter(None, map(_usable, names)), ""), _rank(rank(facts)))


def _usable(name: str) -> str:
    """What the ``job`` annotation may hold; owners' names are not validated by the API server."""
    name = name.strip()[:MAX_JOB].strip()
    return name if name.isprintable() else ""


def _owner(pod: Pod) -> tuple[str, str]:
    owners = items(pod.metadata.get("ownerReferences"), "/metadata/ownerReferences")
    owner = next((o for o in owners if o.get("controller") is True), owners[0] if owners else {})
    kind, name = text(owner.get("kind")), text(owner.get("name"))
    template_hash = pod.labels.get("pod-template-hash", "")
    if kind == "ReplicaSet" and template_hash:
        name = name.removesuffix("-" + template_hash)
    return kind, name


def _rank(told: str) -> int | None:
    return int(told) if told.isascii() and told.isdigit() and len(told) <= 7 else None
