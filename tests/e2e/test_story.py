"""From a label to a Prometheus query: a job of four pods, and what is seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from tests.e2e import scraping, workloads
from tests.e2e.install import ROOT
from tests.e2e.kube import (
    PREFIX,
    Json,
    Kube,
    Sample,
    all_ready,
    job_of,
    outcome,
    pod_of,
    port_of,
    sidecars,
    status_of,
)
from tests.e2e.scraping import Database

RANKS = 4


@dataclass(frozen=True)
class Story:
    """The namespace, its job called llm, and the pods that stand beside it."""

    kube: Kube
    namespace: str

    def ranks(self) -> list[Json]:
        """List the job's pods in order of their completion index."""
        return self.kube.pods(self.namespace, "job-name=llm")

    def others(self) -> list[Json]:
        """List a pod with a native sidecar, where the cluster knows them, and two of the host."""
        return self.kube.pods(self.namespace, "beside=llm")


@pytest.fixture(scope="module")
def story(kube: Kube, namespace: Callable[..., str], trainer_image: str) -> Story:
    team = namespace("team-a")
    kube.kubectl("label", "namespace", team, f"{PREFIX}inject=true")
    trainer = {name: (ROOT / "lab" / name).read_text() for name in ("trainer.py", "loader.py")}
    kube.api.create(
        f"/api/v1/namespaces/{team}/configmaps",
        {"metadata": {"name": "trainer"}, "data": trainer},
    )
    pod = pod_of(
        "llm",
        ["python3", "-c", workloads.RING],
        image=trainer_image,
        volumes=[{"name": "trainer", "configMap": {"name": "trainer"}}],
    )
    container = pod["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": "trainer", "mountPath": "/trainer/lab"}]
    container["env"] = [
        {"name": "WORLD_SIZE", "value": str(RANKS)},
        {"name": "MASTER_PORT", "value": "29500"},
        {"name": "TRAINER_GRADIENT_BYTES", "value": str(1 << 16)},
    ]
    job = job_of(pod, completions=RANKS, parallelism=RANKS, completionMode="Indexed")
    kube.api.create(f"/apis/batch/v1/namespaces/{team}/jobs", job)
    talk = ["python3", "-c", workloads.TALK]
    beside = [
        pod_of(f"host-{i}", talk, image=trainer_image, labels={"beside": "llm"}, hostNetwork=True)
        for i in range(2)
    ]
    if kube.native(team):
        notes = {"native-sidecar": "true"}
        labels = {"beside": "llm"}
        beside.append(pod_of("native", talk, image=trainer_image, labels=labels, annotations=notes))
    for one in beside:
        kube.api.create(f"/api/v1/namespaces/{team}/pods", one)
    made = Story(kube, team)
    kube.wait(
        "every pod ready",
        lambda: (
            len(made.ranks()) == RANKS
            and all(all_ready(pod) for pod in [*made.ranks(), *made.others()])
        ),
    )
    master = made.ranks()[0]["status"]["podIP"]
    for rank in made.ranks():
        script = f"echo {master} >/tmp/new && mv /tmp/new /tmp/master"
        kube.execute(team, rank["metadata"]["name"], script)
    kube.wait("steps on every rank", lambda: all(_steps(made, pod) > 20 for pod in made.ranks()))
    return made


def _steps(story: Story, pod: Json) -> int:
    path = f"/api/v1/namespaces/{story.namespace}/pods/{pod['metadata']['name']}/log"
    return story.kube.text(f"{path}?container=trainer&tailLines=2000").count('"step"')


def test_every_pod_was_given_one_sidecar(story: Story) -> None:
    for pod in [*story.ranks(), *story.others()]:
        assert len(sidecars(pod)) == 1
        assert pod["spec"].get("shareProcessNamespace") is True
        assert pod["metadata"]["labels"][f"{PREFIX}injected"] == "true"
    for pod in story.ranks():
        states = pod["status"]["containerStatuses"]
        natives = pod["status"].get("initContainerStatuses", [])
        assert [state["ready"] for state in [*states, *natives]] == [True, True]


def test_native_sidecar_is_an_init_container(story: Story) -> None:
    natives = [pod for pod in story.others() if pod["metadata"]["name"] == "native"]
    if not natives:
        pytest.skip("this cluster does not know native sidecars")
    (last,) = natives[0]["spec"]["initContainers"]
    assert (last["name"], last["restartPolicy"]) == ("kitty", "Always")


def test_trainer_was_not_kept_waiting(story: Story) -> None:
    """An ordinary sidecar starts after it, and a native one has no probe to wait for."""
    for pod in [*story.ranks(), *story.others()]:
        (sidecar,) = sidecars(pod)
        assert not {"startupProbe", "readinessProbe", "livenessProbe"} & set(sidecar)
        status = pod["status"]
        every = [*status["containerStatuses"], *status.get("initContainerStatuses", [])]
        started = {state["name"]: state["state"]["running"]["startedAt"] for state in every}
        print(pod["metadata"]["name"], started)
        if not status.get("initContainerStatuses"):
            assert started["trainer"] <= started["kitty"]


def test_each_sidecar_reports_its_own_rank_and_nothing_else(story: Story) -> None:
    for index, pod in enumerate(story.ranks()):
        page = story.kube.wait("a rank's page", partial(_page_of, story, pod))
        ranked = [s for s in page if "rank" in s.labels]
        assert {s.labels["rank"] for s in ranked} == {str(index)}
        jobs = {s.labels["job"] for s in page if not _runtime(s)}
        assert jobs == {"llm"}
        name = pod["metadata"]["name"]
        script = "for p in /proc/[0-9]*; do grep -qsa trainer $p/cmdline && echo ${p#/proc/}; done"
        own = set(story.kube.execute(story.namespace, name, script).split())
        assert {s.labels["pid"] for s in page if s.name == "proc_vm_rss"} <= own
        assert len([s for s in page if s.name == "proc_vm_rss"]) == 1


def _page_of(story: Story, pod: Json) -> list[Sample]:
    """Return a page once the network's figures are on it."""
    page = story.kube.page(pod)
    names = {s.name for s in page if "rank" in s.labels}
    return page if {"proc_vm_rss", "kitty_tcp_srtt_seconds"} <= names else []


def _runtime(sample: Sample) -> bool:
    """Tell whether a sample is about the agent's own interpreter."""
    return sample.name.startswith(("python_", "process_"))


def test_hosts_pods_share_a_node_and_no_port(story: Story) -> None:
    hosts = [pod for pod in story.others() if pod["spec"].get("hostNetwork")]
    assert len(hosts) == 2
    ports = {(pod["spec"]["nodeName"], port_of(pod)) for pod in hosts}
    assert len(ports) == 2
    for pod in hosts:
        assert "ports" not in sidecars(pod)[0]


@pytest.fixture(
    scope="module", params=[scraping.PROMETHEUS, scraping.VICTORIA], ids=lambda k: k.name
)
def database(
    request: pytest.FixtureRequest,
    kube: Kube,
    namespace: Callable[..., str],
    trainer_image: str,
    story: Story,
) -> Iterator[Database]:
    kind: scraping.Kind = request.param
    home = namespace(kind.name)
    with scraping.database(kube, kind, home, trainer_image, story.namespace) as made:
        yield made


def test_database_finds_every_sidecar(story: Story, database: Database) -> None:
    """Native ones, ordinary ones, and two on the host's network of one node."""
    wanted = {pod["metadata"]["name"] for pod in [*story.ranks(), *story.others()]}
    up = f'up{{namespace="{story.namespace}"}} == 1'

    def found() -> bool:
        return {series["metric"]["pod"] for series in database.ask(up)} == wanted

    story.kube.wait("every target up", found)
    every = database.ask(f'up{{namespace="{story.namespace}"}}')
    assert len(every) == len(wanted), "a sidecar is one target"


def test_database_returns_every_family(story: Story, database: Database) -> None:
    """By job, rank, pod and namespace; and the job has one name."""
    for index, pod in enumerate(story.ranks()):
        complete = partial(_all_there, story, database, pod, index)
        story.kube.wait(f"every family of rank {index}", complete)
    team = f'namespace="{story.namespace}"'
    assert not database.ask(f'{{{team},exported_job!=""}}')
    assert not database.ask(f'{{{team},rank!="",job="llm",pod!~"llm-.*"}}')


def _all_there(story: Story, database: Database, pod: Json, index: int) -> bool:
    """Tell whether all that is on a pod's page can be asked for."""
    page = [sample for sample in story.kube.page(pod) if not _runtime(sample)]
    by_rank = {sample.name for sample in page if "rank" in sample.labels}
    by_pod = {sample.name for sample in page} - by_rank
    assert by_rank
    assert by_pod
    name = pod["metadata"]["name"]
    by = f'namespace="{story.namespace}",pod="{name}",job="llm"'
    ranked = database.ask(f'{{{by},rank="{index}"}}')
    every = database.ask(f"{{{by}}}")
    return by_rank <= _names(ranked) and by_pod <= _names(every)


def _names(series: list[Json]) -> set[str]:
    return {one["metric"]["__name__"] for one in series}


def test_job_completes(story: Story) -> None:
    kube, team = story.kube, story.namespace
    for pod in story.ranks():
        kube.execute(team, pod["metadata"]["name"], "touch /tmp/stop")
    path = f"/apis/batch/v1/namespaces/{team}/jobs/llm"
    ended = kube.wait("the end of the job", lambda: outcome(kube.api.get(path)))
    assert ended[0] == "Complete"
    assert {status_of(pod)["profile"] for pod in story.ranks()} == {"privileged"}
