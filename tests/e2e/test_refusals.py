"""What stands in the way is told by the cluster in its own words; check foretells it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e import workloads
from tests.e2e.install import Install
from tests.e2e.kube import PREFIX, Json, Kube, job_of, pod_of
from tests.e2e.test_install import check

REFUSALS = {
    "quota": (
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "small"},
            "spec": {"hard": {"limits.memory": "256Mi"}},
        },
        "exceeded quota: small, requested: limits.memory=448Mi",
    ),
    "limits": (
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "narrow"},
            "spec": {"limits": [{"type": "Container", "max": {"memory": "256Mi"}}]},
        },
        "maximum memory usage per Container is 256Mi, but limit is 320Mi",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusal_names_what_is_too_small(
    kube: Kube, namespace: Callable[..., str], kind: str
) -> None:
    obstacle, words = REFUSALS[kind]
    home = namespace(kind)
    kube.kubectl("label", "namespace", home, f"{PREFIX}inject=true")
    kube.apply({**obstacle, "metadata": {**obstacle["metadata"], "namespace": home}})  # type: ignore[dict-item] # a mapping
    job = job_of(pod_of("llm", ["true"], image="none"))
    kube.wait("the obstacle in force", lambda: _in_force(kube, home, kind))
    kube.api.create(f"/apis/batch/v1/namespaces/{home}/jobs", job)
    told = kube.wait("an event", lambda: [e for e in kube.events(home) if "forbidden" in e])
    print(told[0])
    assert words in told[0]
    foretold = [line for line in check().stdout.splitlines() if f"namespace {home}" in line]
    print(foretold)
    assert any(line.startswith("problem") and "refuses injected pods" in line for line in foretold)


def _in_force(kube: Kube, home: str, kind: str) -> bool:
    if kind == "limits":
        return True
    quota = kube.api.get(f"/api/v1/namespaces/{home}/resourcequotas/small")
    return bool(quota.get("status", {}).get("used"))


@pytest.mark.parametrize("native", [True, False], ids=["native", "ordinary"])
def test_missing_image_is_told_by_the_kubelet(
    kube: Kube, namespace: Callable[..., str], trainer_image: str, *, native: bool
) -> None:
    """A native sidecar without image holds the trainer back; an ordinary one does not."""
    home = namespace(f"image-{'native' if native else 'ordinary'}")
    kube.kubectl("label", "namespace", home, f"{PREFIX}inject=true")
    if native and not kube.native(home):
        pytest.skip("this cluster does not know native sidecars")
    notes = {"image": "localhost/kitty-absent:1", "native-sidecar": str(native).lower()}
    sleep = ["python3", "-c", workloads.SLEEP.format(seconds=600)]
    pod = pod_of("llm", sleep, image=trainer_image, annotations=notes)
    kube.api.create(f"/api/v1/namespaces/{home}/pods", pod)
    told = kube.wait(
        "an event", lambda: [e for e in kube.events(home) if "localhost/kitty-absent:1" in e]
    )
    print(told)
    reason = kube.wait("the reason", lambda: _waits_for_image(kube.pod(home, "llm")))
    assert reason in ("ErrImagePull", "ImagePullBackOff")
    trainer = kube.pod(home, "llm")["status"]["containerStatuses"]
    (state,) = [s["state"] for s in trainer if s["name"] == "trainer"]
    assert ("running" in state) is not native


def _waits_for_image(pod: Json) -> str:
    status = pod.get("status", {})
    groups = ("containerStatuses", "initContainerStatuses")
    states = [state for group in groups for state in status.get(group, [])]
    for state in states:
        if state["name"] == "kitty":
            return (
                str(state["state"].get("waiting", {}).get("reason", ""))
                .replace("PodInitializing", "")
                .replace("ContainerCreating", "")
            )
    return ""


def test_check_tells_whether_the_nodes_have_the_image(install: Install) -> None:
    """Before any namespace is labelled."""
    (line,) = [line for line in check().stdout.splitlines() if line.split()[1] == "image"]
    print(line)
    assert line.startswith("ok")
    install.apply("absent", image="localhost/kitty-absent:1")
    try:
        (line,) = [line for line in check().stdout.splitlines() if line.split()[1] == "image"]
        print(line)
        assert line.startswith("note")
        assert "localhost/kitty-absent:1: is not on" in line
    finally:
        install.apply()
