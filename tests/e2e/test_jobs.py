"""A job ends as it would have ended without kitty, however its pods and sidecars fare."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.e2e import workloads
from tests.e2e.kube import PREFIX, Json, Kube, job_of, outcome, pod_of, sidecars

POLICIES = ("Never", "OnFailure")
LIFECYCLES = ("native", "ordinary")
FATES = {
    "ends": workloads.SLEEP.format(seconds=3),
    "agent-killed": workloads.KILL_AGENT,
    "fails": "raise SystemExit(3)",
}
VARIANTS = list(product(FATES, LIFECYCLES, POLICIES))


@pytest.fixture(scope="module")
def ended(kube: Kube, namespace: Callable[..., str], trainer_image: str) -> dict[str, list[Json]]:
    """Run all jobs at once, each in its variant; those called plain are without a sidecar.

    Returns:
        By the job's name: the job when it had ended, and the last state seen of its pods.
    """
    labelled = namespace("jobs")
    kube.kubectl("label", "namespace", labelled, f"{PREFIX}inject=true")
    plain = namespace("jobs-plain")
    native = kube.native(labelled)
    homes: dict[str, str] = {}
    for fate, lifecycle, policy in VARIANTS:
        if lifecycle == "native" and not native:
            continue
        name = f"{fate}-{lifecycle}-{policy}".lower()
        homes[name] = labelled
        wanted = lifecycle == "native"
        _start(kube, labelled, _job(name, fate, policy, image=trainer_image, native=wanted))
    for policy in POLICIES:
        name = f"fails-plain-{policy}".lower()
        homes[name] = plain
        _start(kube, plain, _job(name, "fails", policy, image=trainer_image, native=False))
    seen: dict[str, list[Json]] = {}

    def all_ended() -> bool:
        for name, home in homes.items():
            job = kube.api.get(f"/apis/batch/v1/namespaces/{home}/jobs/{name}")
            pods = kube.pods(home, f"job-name={name}")
            seen[name] = [job, *(pods or seen.get(name, [])[1:])]
        return all(outcome(found[0]) for found in seen.values())

    kube.wait("the end of all jobs", all_ended, seconds=200)
    return seen


def _start(kube: Kube, home: str, job: Json) -> None:
    kube.api.create(f"/apis/batch/v1/namespaces/{home}/jobs", job)


def _job(name: str, fate: str, policy: str, *, image: str, native: bool) -> Json:
    pod = pod_of(
        name,
        ["python3", "-c", FATES[fate]],
        image=image,
        annotations={"native-sidecar": "true" if native else "false"},
        security={"runAsUser": 0},
    )
    pod["spec"]["restartPolicy"] = policy
    return job_of(pod)


@pytest.mark.parametrize(("fate", "lifecycle", "policy"), VARIANTS)
def test_job_ends_as_without_kitty(
    ended: dict[str, list[Json]], fate: str, lifecycle: str, policy: str
) -> None:
    name = f"{fate}-{lifecycle}-{policy}".lower()
    if name not in ended:
        pytest.skip("this cluster does not know native sidecars")
    job, pod = ended[name][:2]
    assert len(sidecars(pod)) == 1
    if fate == "fails":
        assert outcome(job) == outcome(ended[f"fails-plain-{policy}".lower()][0])
        return
    assert outcome(job) == ("Complete", "")
    states = [
        *pod["status"]["containerStatuses"],
        *pod["status"].get("initContainerStatuses", []),
    ]
    assert {state["name"]: state["restartCount"] for state in states} == {"kitty": 0, "trainer": 0}
