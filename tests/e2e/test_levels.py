"""Pods come up at every Pod Security level, with what the level admits, and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.e2e import workloads
from tests.e2e.install import Install
from tests.e2e.kube import (
    PREFIX,
    Json,
    Kube,
    Sample,
    all_ready,
    pod_of,
    restricted,
    sidecars,
    status_of,
)

ENFORCE = "pod-security.kubernetes.io/enforce"
PODS = {
    "baseline": {"known": {"runAsUser": 65532}, "unknown": {}},
    "restricted": {
        "known": restricted(),
        "unknown": {key: value for key, value in restricted().items() if key != "runAsUser"},
    },
}
SHAPES = [(level, name) for level, pods in PODS.items() for name in pods]


@pytest.fixture(scope="module")
def levels(kube: Kube, namespace: Callable[..., str], trainer_image: str) -> dict[str, str]:
    """Return a namespace for each level; in each run pods whose user is known, and not."""
    made = {}
    for level, pods in PODS.items():
        made[level] = namespace(level)
        kube.kubectl(
            "label", "namespace", made[level], f"{PREFIX}inject=true", f"{ENFORCE}={level}"
        )
        for name, security in pods.items():
            command = ["python3", "-c", workloads.TALK]
            pod = pod_of(name, command, image=trainer_image, security=security)
            kube.api.create(f"/api/v1/namespaces/{made[level]}/pods", pod)
    return made


@pytest.mark.parametrize(("level", "name"), SHAPES)
def test_pod_runs_with_an_unprivileged_sidecar(
    kube: Kube, levels: dict[str, str], level: str, name: str
) -> None:
    pod = _running(kube, levels[level], name)
    (sidecar,) = sidecars(pod)
    assert status_of(pod)["profile"] == "unprivileged"
    assert sidecar["securityContext"]["privileged"] is False


@pytest.mark.parametrize(("level", "name"), SHAPES)
def test_round_trip_time_is_reported_without_any_privilege(
    kube: Kube, levels: dict[str, str], level: str, name: str
) -> None:
    pod = _running(kube, levels[level], name)
    page = kube.wait("the kernel's RTT", partial(_with_rtt, kube, pod))
    assert all(0 < s.value < 1 for s in page if s.name == "kitty_tcp_srtt_seconds")


def _running(kube: Kube, namespace: str, name: str) -> Json:
    def ready() -> Json | None:
        pod = kube.pod(namespace, name)
        return pod if all_ready(pod) else None

    pod: Json = kube.wait(f"{namespace}/{name} ready", ready)
    return pod


def _with_rtt(kube: Kube, pod: Json) -> list[Sample]:
    page = kube.page(pod)
    return page if any(s.name == "kitty_tcp_srtt_seconds" for s in page) else []


def test_who_opts_out_is_left_alone(kube: Kube, levels: dict[str, str]) -> None:
    pod = pod_of("out", ["true"], image="out", labels={f"{PREFIX}inject": "false"})
    made = kube.try_pod(levels["baseline"], pod)
    assert not sidecars(made)
    assert "shareProcessNamespace" not in made["spec"]
    assert not any(key.startswith(PREFIX) for key in made["metadata"].get("annotations", {}))


def test_system_pods_are_left_alone(kube: Kube, install: Install) -> None:
    reviews = install.reviews()
    pod = pod_of("system", ["true"], image="system", labels={f"{PREFIX}inject": "true"})
    made = kube.try_pod("kube-system", pod)
    assert not sidecars(made)
    assert install.reviews() == reviews


@pytest.fixture
def baseline_by_default(install: Install) -> Iterator[None]:
    install.apply("baseline", default_level="baseline")
    yield
    install.apply()


def test_default_level_holds_where_a_namespace_says_nothing(
    kube: Kube, namespace: Callable[..., str], trainer_image: str, baseline_by_default: None
) -> None:
    home = namespace("default-level")
    kube.kubectl("label", "namespace", home, f"{PREFIX}inject=true")
    pod = pod_of("quiet", ["python3", "-c", workloads.TALK], image=trainer_image)
    kube.api.create(f"/api/v1/namespaces/{home}/pods", pod)
    assert status_of(_running(kube, home, "quiet"))["profile"] == "unprivileged"
