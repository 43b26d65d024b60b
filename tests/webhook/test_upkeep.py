"""Certificates and versions, kept in a cluster: a real API server, or a peer that speaks REST."""

from __future__ import annotations

import base64
import datetime as dt
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from tests.webhook.kubeobjects import namespace_body, webhook_configuration
from tests.webhook.restpeer import Peer, running_peer
from tests.webhook.support import Files, review_of, running_server
from webhook.certificates import LEAF_LIFETIME, expiry, service_names
from webhook.cluster import WEBHOOKS, Cluster, ClusterError, oldest, parse_version, versions
from webhook.metrics import Metrics
from webhook.upkeep import (
    INTERVAL,
    Report,
    SelfSigned,
    Task,
    Upkeep,
    in_child,
    keep_ca_bundle,
    run_task,
    write_atomically,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.webhook.kube import ApiServer

OWN = SelfSigned(
    namespace="kitty-system", service="hook", secret="tls", webhook_config="kitty-self-signed"
)
SECRET = f"/api/v1/namespaces/{OWN.namespace}/secrets/{OWN.secret}"
CONFIG = f"{WEBHOOKS}/{OWN.webhook_config}"
NOW = dt.datetime.now(dt.UTC)
HOST = service_names(OWN.service, OWN.namespace)[0]


def configuration() -> dict[str, Any]:
    service = {"namespace": OWN.namespace, "name": OWN.service}
    return webhook_configuration(
        lambda path: {"service": service | {"path": path}}, name=OWN.webhook_config
    )


@pytest.fixture
def peer(tmp_path: Path, tls: Files) -> Iterator[Peer]:
    with running_peer(tmp_path, tls) as running:
        running.put(CONFIG, configuration())
        yield running


@pytest.fixture
def cluster(peer: Peer) -> Iterator[Cluster]:
    connected = Cluster.connect(kubeconfig=str(peer.kubeconfig))
    yield connected
    connected.close()


def bundles(found: dict[str, Any]) -> set[str | None]:
    return {entry["clientConfig"].get("caBundle") for entry in found["webhooks"]}


def keep(cluster: Cluster, now: dt.datetime = NOW) -> Report:
    return run_task(Task(self_signed=OWN), connect=lambda: cluster, now=now)


def test_the_first_run_makes_the_secret_and_fills_the_ca_bundle(
    peer: Peer, cluster: Cluster
) -> None:
    report = keep(cluster)
    assert report.errors == []
    assert report.patched is True
    assert report.pem
    assert report.expires == expiry(report.pem.encode()).timestamp()
    assert bundles(peer.objects[CONFIG]) == {peer.objects[SECRET]["data"]["ca.crt"]}
    again = keep(cluster)
    assert (again.pem, again.patched) == (report.pem, False)


def test_an_empty_secret_made_by_the_installer_is_filled(peer: Peer, cluster: Cluster) -> None:
    peer.put(SECRET, {"metadata": {"name": "tls", "labels": {"app": "kitty"}}})
    assert keep(cluster).errors == []
    assert peer.objects[SECRET]["metadata"]["labels"] == {"app": "kitty"}
    assert set(peer.objects[SECRET]["data"]) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}


def test_a_secret_of_rubbish_is_made_anew(peer: Peer, cluster: Cluster) -> None:
    peer.put(SECRET, {"metadata": {"name": "tls"}, "data": {"tls.crt": "eA=="}})
    assert keep(cluster).pem


def test_a_blanked_ca_bundle_is_put_back(peer: Peer, cluster: Cluster) -> None:
    keep(cluster)
    peer.put(CONFIG, configuration())
    assert keep(cluster).patched is True
    assert None not in bundles(peer.objects[CONFIG])


def test_a_foreign_ca_bundle_in_one_entry_is_put_right(peer: Peer, cluster: Cluster) -> None:
    keep(cluster)
    found = peer.objects[CONFIG]
    found["webhooks"][1]["clientConfig"]["caBundle"] = base64.b64encode(b"theirs").decode()
    peer.put(CONFIG, found)
    assert keep(cluster).patched is True
    assert bundles(peer.objects[CONFIG]) == {peer.objects[SECRET]["data"]["ca.crt"]}


def test_entries_that_moved_meanwhile_are_left_for_the_next_run(
    peer: Peer, cluster: Cluster
) -> None:
    """A patch goes by place; the entry there must still be the one that was read."""

    def reorder(method: str, _path: str) -> int:
        if method == "PATCH":
            peer.objects[CONFIG]["webhooks"].reverse()
        return 0

    peer.refuse = reorder
    report = keep(cluster)
    assert ["webhook configuration" in error for error in report.errors] == [True]
    assert bundles(peer.objects[CONFIG]) == {None}


def test_replicas_that_start_together_agree(peer: Peer) -> None:
    def replica(_: int) -> str | None:
        own = Cluster.connect(kubeconfig=str(peer.kubeconfig))
        try:
            return keep(own).pem
        finally:
            own.close()

    with ThreadPoolExecutor(6) as pool:
        served = set(pool.map(replica, range(6)))
    assert len(served) == 1
    assert None not in served


def test_a_renewed_certificate_is_stored_for_all_replicas(peer: Peer, cluster: Cluster) -> None:
    before = keep(cluster).pem
    later = NOW + LEAF_LIFETIME * 0.7
    after = keep(cluster, later).pem
    assert after != before
    assert keep(cluster, later).pem == after


def test_a_missing_configuration_is_reported_and_the_certificate_served(
    peer: Peer, cluster: Cluster
) -> None:
    del peer.objects[CONFIG]
    report = keep(cluster)
    assert report.pem
    assert ["webhook configuration" in error for error in report.errors] == [True]


@pytest.mark.parametrize("status", [403, 500])
def test_a_refused_secret_is_reported(status: int, peer: Peer, cluster: Cluster) -> None:
    peer.refuse = lambda _method, path: status if path.startswith("/api/v1/namespaces") else 0
    report = keep(cluster)
    assert report.pem is None
    assert "refused" in report.errors[0]


def test_an_unreachable_cluster_is_reported(tmp_path: Path) -> None:
    task = Task(kubeconfig=str(tmp_path / "none"), self_signed=OWN, versions=True)
    assert in_child(task).errors


def test_versions_of_server_and_kubelets_page_by_page(peer: Peer, cluster: Cluster) -> None:
    peer.put("/version", {"gitVersion": "v1.31.2-eks-1"})
    for i, version in enumerate(["v1.31.0", "v1.30.5+k3s1", "v1.29.9", "v1.31.1", "v1.31.1"]):
        node = {"metadata": {"name": f"n{i}"}, "status": {"nodeInfo": {"kubeletVersion": version}}}
        peer.put(f"/api/v1/nodes/n{i}", node)
    assert oldest(versions(cluster)) == (1, 29)
    peer.put("/api/v1/nodes/n9", {"metadata": {"name": "n9"}})
    assert oldest(versions(cluster)) is None  # one is unknown, so the oldest is


@pytest.mark.parametrize(
    ("text", "version"),
    [("v1.31.2-gke.1", (1, 31)), ("1.28", (1, 28)), ("", None), ("dev", None), (None, None)],
)
def test_parse_version(text: object, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version


def test_the_loop_takes_over_what_it_learns(tmp_path: Path) -> None:
    reports = [
        Report(errors=["away"]),
        Report(pem="P1", expires=5.0, patched=True, oldest=(1, 30)),
        Report(pem="P2", expires=6.0),
    ]
    asked: list[Task] = []
    now = [0.0]

    def run(task: Task) -> Report:
        asked.append(task)
        return reports[len(asked) - 1]

    metrics = Metrics(registry=CollectorRegistry())
    pem = tmp_path / "tls.pem"
    upkeep = Upkeep(
        task=Task(self_signed=OWN, versions=True),
        pem=str(pem),
        metrics=metrics,
        run=run,
        clock=lambda: now[0],
    )
    sample = metrics.registry.get_sample_value
    assert sample("kitty_webhook_certificate_expiry_timestamp_seconds") is None
    assert upkeep.once() < INTERVAL  # soon again after a failure
    assert upkeep.once() == INTERVAL
    assert (upkeep.oldest, pem.read_text()) == ((1, 30), "P1")
    assert pem.stat().st_mode & 0o777 == 0o600
    now[0] = 1.0
    upkeep.once()
    assert (upkeep.oldest, pem.read_text()) == ((1, 30), "P2")
    assert [task.versions for task in asked] == [True, True, False]
    assert sample("kitty_webhook_certificate_expiry_timestamp_seconds") == 6.0
    assert sample("kitty_webhook_upkeep_errors_total") == 1
    assert sample("kitty_webhook_ca_bundle_restored_total") == 1
    assert sample("kitty_webhook_oldest_kubernetes_info", {"version": "1.30"}) == 1


def test_a_file_that_holds_the_same_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(str(path), b"a")
    before = path.stat().st_ino
    write_atomically(str(path), b"a")
    assert path.stat().st_ino == before
    write_atomically(str(path), b"b")
    assert path.read_bytes() == b"b"


def serve_flags(kubeconfig: Path) -> list[str]:
    flags = ["--self-signed", "--kubeconfig", str(kubeconfig)]
    for name, value in vars(OWN).items():
        flags += [f"--{name.replace('_', '-')}", value]
    return flags


POD = {"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "c"}]}}


def test_serve_self_signed(peer: Peer, tmp_path: Path) -> None:
    """The real command: reachable by the Service's name with the CA from the configuration."""
    peer.put("/version", {"gitVersion": "v1.31.0"})
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with running_server(tmp_path, *serve_flags(peer.kubeconfig), context=context) as server:
        (bundle,) = bundles(peer.objects[CONFIG])
        assert bundle
        trusting = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
        server.context = trusting
        trusting.check_hostname = False  # this test asks for localhost
        response = server.review(review_of(POD))
        assert response["patch"]
        patch = base64.b64decode(response["patch"]).decode()
        assert '"restartPolicy":"Always"' in patch  # native: the version was learned
        assert server.metric('kitty_webhook_oldest_kubernetes_info{version="1.31"}') == 1


def test_it_serves_but_is_not_ready_without_its_cluster(peer: Peer, tmp_path: Path) -> None:
    peer.refuse = lambda _method, _path: 403
    context = ssl.create_default_context()
    flags = serve_flags(peer.kubeconfig)
    with running_server(tmp_path, *flags, context=context, ready="/healthz") as server:
        status, text = server.get("/readyz")
        assert status == 503
        assert "certificate" in text


def test_a_real_api_server_keeps_it_all(api_server: ApiServer) -> None:
    api = api_server.cluster
    api.create("/api/v1/namespaces", namespace_body(OWN.namespace, inject=None))
    api.create(WEBHOOKS, configuration())
    try:
        report = keep(api)
        assert report.errors == []
        assert bundles(api.get(CONFIG)) == {api.get(SECRET)["data"]["ca.crt"]}
        again = keep(api)
        assert (again.pem, again.patched) == (report.pem, False)
        assert keep_ca_bundle(api, OWN.webhook_config, report.pem.encode() if report.pem else b"")
        assert keep(api).patched is True
        assert oldest(versions(api)) == api_server.version
        child = in_child(
            Task(kubeconfig=str(api_server.kubeconfig), self_signed=OWN, versions=True)
        )
        assert (child.pem, child.errors) == (report.pem, [])
        assert child.oldest == api_server.version
        with pytest.raises(ClusterError) as caught:
            api.get("/api/v1/namespaces/none")
        assert caught.value.status == 404
    finally:
        api.delete(CONFIG)


def test_a_certificate_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    metrics = Metrics(registry=CollectorRegistry())
    folder = tmp_path / "later"
    upkeep = Upkeep(
        task=Task(self_signed=OWN),
        pem=str(folder / "tls.pem"),
        metrics=metrics,
        run=lambda _task: Report(pem="P"),
    )
    assert upkeep.once() < INTERVAL
    assert metrics.registry.get_sample_value("kitty_webhook_upkeep_errors_total") == 1
    folder.mkdir()
    assert upkeep.once() == INTERVAL
    assert (folder / "tls.pem").read_text() == "P"


def test_a_missing_certificate_is_named_once(tmp_path: Path) -> None:
    path = str(tmp_path / "none.pem")

    def connect() -> Cluster:
        raise ClusterError(0, "nothing is asked of it")

    report = run_task(Task(certificate=path), connect=connect, now=NOW)
    assert report.errors == [f"{path}: No such file or directory"]
