"""The webhook is changed, renewed, blanked and taken away while pods are created."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable

import pytest
from cryptography import x509

from tests.e2e import workloads
from tests.e2e.install import CONFIGURATION, DEPLOYMENT, Install
from tests.e2e.kube import (
    PREFIX,
    SYSTEM,
    Json,
    Kube,
    Stream,
    all_ready,
    pod_of,
    sidecars,
)
from tests.e2e.test_install import check
from webhook import certificates
from webhook.cluster import ClusterError

SECRET = f"/api/v1/namespaces/{SYSTEM}/secrets/kitty-webhook-tls"


@pytest.fixture(scope="module")
def team(kube: Kube, namespace: Callable[..., str]) -> str:
    name = namespace("changes")
    kube.kubectl("label", "namespace", name, f"{PREFIX}inject=true")
    return name


@pytest.fixture
def probe() -> Json:
    return pod_of("probe", ["true"], image="probe")


def test_upgrade_misses_no_pod(install: Install, kube: Kube, team: str, probe: Json) -> None:
    """New settings roll through both replicas."""
    before = set(install.replicas())
    with Stream(kube, team, probe) as stream:
        stream.more(5)
        install.apply("upgrade", cpu_limit="400m")
        stream.more(5)
    assert not before & set(install.replicas())
    assert stream.missed == []
    (sidecar,) = sidecars(kube.try_pod(team, probe))
    assert sidecar["resources"]["limits"]["cpu"] == "400m"


def test_renewal_misses_no_pod(install: Install, kube: Kube, team: str, probe: Json) -> None:
    """A certificate past two thirds of its life is put in place of the one that is served."""
    secret = kube.api.get(SECRET)
    stored = certificates.from_secret(secret["data"])
    assert stored is not None
    aged = _aged(stored)
    with Stream(kube, team, probe) as stream:
        stream.more(5)
        kube.api.replace(SECRET, {**secret, "data": certificates.to_secret(aged)})
        kube.kubectl("rollout", "restart", "-n", SYSTEM, "deployment/kitty-webhook")
        install.rolled_out()
        stream.more(5)
    assert stream.missed == []
    renewed = certificates.from_secret(kube.api.get(SECRET)["data"])
    assert renewed is not None
    expiry = certificates.expiry(renewed.certificate)
    assert expiry > certificates.expiry(aged.certificate) + dt.timedelta(days=30)
    assert set(install.certificate_expiries()) == {expiry.timestamp()}


def _aged(stored: certificates.Material) -> certificates.Material:
    """Return authority and certificate made 70 of 90 days ago; what was trusted stays so."""
    names = certificates.service_names("kitty-webhook", SYSTEM)
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=70)
    return certificates._first(names, then, x509.load_pem_x509_certificates(stored.bundle))


def test_blanked_bundle_is_back_within_seconds(
    install: Install, kube: Kube, team: str, probe: Json
) -> None:
    entries = kube.api.get(CONFIGURATION)["webhooks"]
    blank = [
        {"op": "remove", "path": f"/webhooks/{i}/clientConfig/caBundle"}
        for i in range(len(entries))
    ]
    kube.api.patch(CONFIGURATION, blank)
    started = time.monotonic()
    kube.wait("caBundle in every entry", install.trusted, seconds=15)
    print(f"caBundle back after {time.monotonic() - started:.1f} s")
    kube.wait("injection", lambda: sidecars(kube.try_pod(team, probe)), seconds=15)


def test_pods_start_at_once_while_the_webhook_is_away(
    install: Install, kube: Kube, team: str, trainer_image: str
) -> None:
    """And the check lists them."""
    sleep = ["python3", "-c", workloads.SLEEP.format(seconds=600)]
    pod = pod_of("unwatched", sleep, image=trainer_image)
    kube.kubectl("scale", "-n", SYSTEM, "deployment/kitty-webhook", "--replicas=0")
    try:
        kube.wait("no replica", lambda: not install.replicas())
        started = time.monotonic()
        made = kube.api.create(f"/api/v1/namespaces/{team}/pods", pod)
        took = time.monotonic() - started
        assert not sidecars(made)
        entries = kube.api.get(CONFIGURATION)["webhooks"]
        assert took < min(entry["timeoutSeconds"] for entry in entries)
        kube.wait("the pod", lambda: all_ready(kube.pod(team, "unwatched")))
    finally:
        kube.kubectl("scale", "-n", SYSTEM, "deployment/kitty-webhook", "--replicas=2")
    install.rolled_out()
    done = check()
    assert done.returncode == 1
    assert f"pod {team}/unwatched: runs without a sidecar" in done.stdout
    assert done.stdout.strip().endswith("1 problem")


def test_deployment_is_taken_as_written(install: Install, kube: Kube) -> None:
    """Nothing that the manifests ask for was dropped or defaulted away by the server."""
    spec = kube.api.get(DEPLOYMENT)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["priorityClassName"] == "kitty-webhook"
    with pytest.raises(ClusterError):
        kube.try_pod(SYSTEM, pod_of("root", ["true"], image="x", security={"privileged": True}))
