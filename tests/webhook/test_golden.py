"""Golden pods: the same pairs through the server, the offline command and a real API server."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import ssl
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.webhook.golden import make
from tests.webhook.kubeobjects import namespace_body, plain, webhook_configuration
from tests.webhook.support import (
    Files,
    Golden,
    Server,
    golden_pairs,
    patched,
    review_of,
    running_server,
    wait_until,
)
from webhook.check import probe_pod
from webhook.cli import main
from webhook.cluster import WEBHOOKS, ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.webhook.kube import ApiServer
    from webhook.profiles import Level

PAIRS = golden_pairs()
DEFAULT = [pair for pair in PAIRS if not pair.config_text.strip("{}\n") and not pair.oldest]
NATIVE = [pair for pair in PAIRS if pair.name in {"native", "native-beside-another"}]


def named(pairs: list[Golden]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", pairs, ids=[pair.name for pair in pairs])


@named(PAIRS)
def test_each_pair_is_what_the_code_makes(pair: Golden) -> None:
    said, after = make(pair)
    assert after == pair.after
    assert said == {"outcome": pair.outcome, "warnings": pair.warnings}


@named(PAIRS)
def test_reviewing_the_result_changes_nothing(pair: Golden) -> None:
    again = Golden(**{**vars(pair), "pod": pair.after})
    said, after = make(again)
    assert after == pair.after
    assert said["outcome"] == ("already-injected" if pair.outcome == "injected" else pair.outcome)


@named(DEFAULT)
def test_the_server_makes_it(pair: Golden, server: Server) -> None:
    review = review_of(pair.pod, uid=pair.uid, namespace=pair.namespace)
    response = server.review(review, pair.path)
    assert response["uid"] == pair.uid
    assert response["allowed"] is True
    assert patched(pair.pod, response) == pair.after
    assert response.get("warnings", []) == pair.warnings
    assert all(len(warning) <= 120 for warning in response.get("warnings", []))


@named(PAIRS)
def test_the_offline_command_makes_it(
    pair: Golden, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, config = tmp_path / "pod.yaml", tmp_path / "config.yaml"
    manifest.write_text(yaml.safe_dump(pair.pod))
    config.write_text(pair.config_text)
    flags = ["--config", str(config)]
    flags += ["--level", pair.level.value] if pair.level else []
    flags += ["--kubernetes", "{}.{}".format(*pair.oldest)] if pair.oldest else []
    assert main(["inject", "-f", str(manifest), *flags]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out) == pair.after
    for warning in pair.warnings:
        assert warning in err


def namespace_of(level: Level | None) -> str:
    return f"golden-{level or 'none'}"


@contextlib.contextmanager
def registered(
    api: ApiServer, tls: Files, folder: Path, *flags: str, name: str, lifecycle: str
) -> Iterator[None]:
    """A webhook that the API server calls by url, in the order of its name."""
    context = ssl.create_default_context(cafile=str(tls.root))
    files = ("--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
    with running_server(folder, *files, *flags, context=context) as running:
        bundle = base64.b64encode(tls.root.read_bytes()).decode()
        body = webhook_configuration(
            lambda path: {"url": f"https://127.0.0.1:{running.port}{path}", "caBundle": bundle},
            name=name,
        )
        api.cluster.create(WEBHOOKS, body)
        try:
            wait_until(lambda: lifecycle in made_of_a_probe(api))
            yield
        finally:
            api.cluster.delete(f"{WEBHOOKS}/{body['metadata']['name']}")


def made_of_a_probe(api: ApiServer) -> str:
    """The status of a dry-run pod: a new webhook is heard of by the server after a moment."""
    path = f"/api/v1/namespaces/{namespace_of(None)}/pods"
    pod = api.cluster.create(path, probe_pod(inject_label="true"), dry_run=True)
    return str(pod["metadata"].get("annotations", {}).get("kitty.k10s.dev/status"))


@pytest.fixture(scope="module")
def namespaces(api_server: ApiServer) -> None:
    for level in {pair.level for pair in PAIRS}:
        body = namespace_body(namespace_of(level), inject="true", level=level)
        api_server.cluster.create("/api/v1/namespaces", body)


@pytest.fixture(scope="module")
def default_webhook(
    api_server: ApiServer,
    namespaces: None,
    tls: Files,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("default")
    with registered(api_server, tls, folder, name="kitty-webhook", lifecycle="ordinary"):
        yield


def through_the_api(api: ApiServer, pair: Golden) -> None:
    """Creates the pod, reads it back, and compares with the golden one as the API stores it."""
    path = f"/api/v1/namespaces/{namespace_of(pair.level)}/pods"

    def moved(pod: dict[str, Any]) -> dict[str, Any]:
        pod = copy.deepcopy(pod)
        pod["metadata"]["namespace"] = namespace_of(pair.level)
        return pod

    name = api.cluster.create(path, moved(pair.pod))["metadata"]["name"]
    try:
        stored = api.cluster.get(f"{path}/{name}")
    finally:
        api.cluster.delete(f"{path}/{name}", gracePeriodSeconds="0")
    wanted = api.cluster.create(path, moved(pair.after), dry_run=True)
    assert plain(stored) == plain(wanted)


@named(DEFAULT)
def test_a_real_api_server_stores_it(
    pair: Golden, api_server: ApiServer, default_webhook: None
) -> None:
    if "resources" in pair.pod["spec"] and api_server.version < (1, 34):
        pytest.skip("this API server has no pod-level resources yet")
    through_the_api(api_server, pair)


def test_a_real_api_server_stores_native_sidecars(
    api_server: ApiServer, default_webhook: None, tls: Files, tmp_path: Path
) -> None:
    """A second webhook comes first, by its name; the other one then finds the sidecar there."""
    config = tmp_path / "config.yaml"
    config.write_text("native-sidecar: true\n")
    flags = ("--config", str(config))
    with registered(api_server, tls, tmp_path, *flags, name="a-native", lifecycle="native"):
        for pair in NATIVE:
            through_the_api(api_server, pair)


def test_a_real_api_server_takes_a_job_that_a_label_tells(
    api_server: ApiServer, namespaces: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    container = {"name": "trainer", "image": "train:1"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "nightly"},
        "spec": {"schedule": "0 2 * * *", "jobTemplate": {"spec": {"template": template}}},
    }
    path = tmp_path / "cron.yaml"
    path.write_text(yaml.safe_dump(manifest))
    assert main(["inject", "-f", str(path)]) == 0
    injected = yaml.safe_load(capsys.readouterr().out)
    where = f"/apis/batch/v1/namespaces/{namespace_of(None)}/cronjobs"
    stored = api_server.cluster.create(where, injected, dry_run=True)
    pod = stored["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (told,) = (e for e in pod["containers"][-1]["env"] if e["name"] == "KITTY_JOB_LABEL")
    path_of_it = told["valueFrom"]["fieldRef"]["fieldPath"]
    assert path_of_it == "metadata.labels['batch.kubernetes.io/job-name']"


def test_the_api_server_refuses_what_the_levels_would(
    api_server: ApiServer, namespaces: None
) -> None:
    """Otherwise the tests above would say nothing about Pod Security."""
    privileged = next(pair for pair in PAIRS if pair.name == "plain").after
    pod = json.loads(json.dumps(privileged))
    pod["metadata"]["namespace"] = "golden-baseline"
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        api_server.cluster.create("/api/v1/namespaces/golden-baseline/pods", pod, dry_run=True)
