"""Which pods are reviewed: each once or not at all, by its labels and its namespace's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.e2e.install import Install
from tests.e2e.kube import PREFIX, Json, Kube, pod_of, restricted, sidecars, status_of

INJECT = (None, "true", "false", "other")
LEVELS = (None, "privileged", "baseline", "restricted")


@pytest.fixture(scope="module")
def namespaces(kube: Kube, namespace: Callable[..., str]) -> dict[tuple[str | None, ...], str]:
    made: dict[tuple[str | None, ...], str] = {}
    for inject, level in product(INJECT, LEVELS):
        labels = {}
        if inject:
            labels["kitty.k10s.dev__inject"] = inject
        if level:
            labels["pod-security.kubernetes.io__enforce"] = level
        made[inject, level] = namespace(f"select-{inject}-{level}".lower(), **labels)
    return made


def probe(labels: dict[str, str], **spec: Any) -> Json:
    """Return a pod that every level admits."""
    security = restricted()
    return pod_of("probe", ["true"], image="probe", labels=labels, security=security, **spec)


@pytest.mark.parametrize("of_namespace", INJECT)
@pytest.mark.parametrize("level", LEVELS)
def test_a_pod_is_reviewed_once_or_not_at_all(
    kube: Kube,
    install: Install,
    namespaces: dict[tuple[str | None, ...], str],
    of_namespace: str | None,
    level: str | None,
) -> None:
    home = namespaces[of_namespace, level]
    for of_pod in INJECT:
        labels = {f"{PREFIX}inject": of_pod} if of_pod else {}
        pod = probe(labels, automountServiceAccountToken=False)
        before = install.reviews()
        made = kube.try_pod(home, pod)
        wanted = of_pod == "true" or (of_pod != "false" and of_namespace == "true")
        assert install.reviews() - before == int(wanted), of_pod
        assert len(sidecars(made)) == int(wanted), of_pod
        if wanted:
            high = level in (None, "privileged")
            assert status_of(made)["profile"] == ("privileged" if high else "unprivileged")


def test_a_pod_with_its_accounts_token_is_reviewed_once(
    kube: Kube, install: Install, namespaces: dict[tuple[str | None, ...], str]
) -> None:
    """The sidecar has the mount that the server would add, and the pod then send once more."""
    before = install.reviews()
    made = kube.try_pod(namespaces["true", None], probe({}))
    (sidecar,) = sidecars(made)
    assert sidecar["volumeMounts"] == made["spec"]["containers"][0]["volumeMounts"]
    assert len(sidecar["volumeMounts"]) == 1
    assert install.reviews() - before == 1
