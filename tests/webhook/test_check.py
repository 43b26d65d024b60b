"""``kitty-webhook check``: every finding, against a peer that speaks REST and a real API server."""

from __future__ import annotations

import base64
import json
import ssl
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from tests.webhook.kubeobjects import CONFIGURATION, namespace_body, webhook_configuration
from tests.webhook.restpeer import Peer, running_peer
from tests.webhook.support import Files, running_server, wait_until
from webhook.cli import main
from webhook.cluster import WEBHOOKS
from webhook.config import Config
from webhook.decision import Origin
from webhook.inject import Target, inject
from webhook.profiles import Level

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.webhook.kube import ApiServer
    from tests.webhook.support import Server

INJECT = "kitty.k10s.dev/inject"
Findings = list[dict[str, str]]


def pod(name: str, namespace: str = "ml", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {}, "annotations": {}},
        "spec": {"containers": [{"name": "c", "image": "i"}], "nodeName": "n1", **spec},
        "status": {"phase": "Running"},
    }


def injected(body: dict[str, Any]) -> dict[str, Any]:
    inject(body, Target(Config(), Level.PRIVILEGED, None), origin=Origin(uid="same"))
    return body


@pytest.fixture
def peer(tmp_path: Path, tls: Files, server: Server) -> Iterator[Peer]:
    """A cluster in which everything is well: a namespace, a pod, the running webhook."""
    bundle = base64.b64encode(tls.root.read_bytes()).decode()
    body = webhook_configuration(
        lambda path: {"url": f"https://127.0.0.1:{server.port}{path}", "caBundle": bundle}
    )
    with running_peer(tmp_path, tls) as running:
        running.put(f"{WEBHOOKS}/{CONFIGURATION}", body)
        running.put("/api/v1/namespaces/ml", namespace_body("ml", inject="true"))
        running.put("/version", {"gitVersion": "v1.31.0"})
        running.on_create = lambda _path, made: (
            injected(made) if made["metadata"]["labels"][INJECT] == "true" else made
        )
        put(running, injected(pod("well")))
        yield running


def put(peer: Peer, body: dict[str, Any]) -> None:
    metadata = body["metadata"]
    peer.put(f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}", body)


@pytest.fixture
def check(peer: Peer, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; gives its status and the findings of a severity."""

    def run(severity: str = "problem") -> tuple[int, Findings]:
        status = main(["check", "--kubeconfig", str(peer.kubeconfig), "--json"])
        report = json.loads(capsys.readouterr().out)
        found = [f for f in report["findings"] if f["severity"] == severity]
        assert report["problems"] == len(
            [f for f in report["findings"] if f["severity"] == "problem"]
        )
        return status, found

    return run


def the_one(found: Findings, about: str) -> str:
    assert [f["check"] for f in found] == [about], found
    return f"{found[0]['subject']}: {found[0]['message']}"


def test_a_cluster_in_which_all_is_well(check: Any) -> None:
    status, problems = check()
    assert (status, problems) == (0, [])
    checks = {finding["check"] for finding in check("ok")[1]}
    assert {"configuration", "endpoint", "versions", "labels", "pods", "dry-run"} <= checks


def test_text_for_people(peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--kubeconfig", str(peer.kubeconfig)]) == 0
    out = capsys.readouterr().out
    assert "0 problems" in out
    assert "namespace ml: a pod is injected and admitted" in out


def test_no_configuration(peer: Peer, check: Any) -> None:
    del peer.objects[f"{WEBHOOKS}/{CONFIGURATION}"]
    status, problems = check()
    assert status == 1
    assert "is not installed" in the_one(problems, "configuration")


def change_clients(peer: Peer, **parts: Any) -> None:
    path = f"{WEBHOOKS}/{CONFIGURATION}"
    body = peer.objects[path]
    for entry in body["webhooks"]:
        entry["clientConfig"] |= parts
    peer.put(path, body)


def test_a_blank_ca_bundle(peer: Peer, check: Any) -> None:
    change_clients(peer, caBundle="")
    _, problems = check()
    assert {f["check"] for f in problems} == {"configuration"}
    assert all("caBundle is empty" in f["message"] for f in problems)


def test_a_ca_bundle_of_another_authority(peer: Peer, check: Any, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    other = base64.b64encode(Files.make(folder).root.read_bytes()).decode()
    change_clients(peer, caBundle=other)
    assert "does not fit the served certificate" in the_one(check()[1], "endpoint")


def test_a_ca_bundle_of_rubbish(peer: Peer, check: Any) -> None:
    change_clients(peer, caBundle=base64.b64encode(b"rubbish").decode())
    assert "unreadable" in the_one(check()[1], "endpoint")


def test_nothing_answers(peer: Peer, check: Any) -> None:
    change_clients(peer, url="https://127.0.0.1:1/mutate")
    assert "cannot be reached" in the_one(check()[1], "endpoint")


def test_a_service_without_endpoints(peer: Peer, check: Any) -> None:
    path = f"{WEBHOOKS}/{CONFIGURATION}"
    body = peer.objects[path]
    for entry in body["webhooks"]:
        del entry["clientConfig"]["url"]
        entry["clientConfig"]["service"] = {"name": "hook", "namespace": "kitty-system"}
    peer.put(path, body)
    assert "no ready endpoint" in the_one(check()[1], "endpoint")
    slices = "/apis/discovery.k8s.io/v1/namespaces/kitty-system/endpointslices"
    peer.put(f"{slices}/a", {"endpoints": [{"conditions": {"ready": True}}]})
    assert check()[1] == []


def test_a_certificate_that_is_only_seen_in_its_secret(
    peer: Peer, tls: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a machine that cannot reach the Service."""
    path = f"{WEBHOOKS}/{CONFIGURATION}"
    body = peer.objects[path]
    for entry in body["webhooks"]:
        del entry["clientConfig"]["url"]
        entry["clientConfig"]["service"] = {"name": "hook", "namespace": "kitty-system"}
    peer.put(path, body)
    slices = "/apis/discovery.k8s.io/v1/namespaces/kitty-system/endpointslices"
    peer.put(f"{slices}/a", {"endpoints": [{"conditions": {"ready": True}}]})

    def asked(certificate: bytes) -> tuple[int, str]:
        data = {"tls.crt": base64.b64encode(certificate).decode()}
        peer.put("/api/v1/namespaces/kitty-system/secrets/tls", {"data": data})
        status = main(["check", "--kubeconfig", str(peer.kubeconfig), "--secret", "tls"])
        return status, capsys.readouterr().out

    status, out = asked(tls.cert.read_bytes())
    assert status == 0
    assert "trusted by every caBundle" in out
    stranger = trustme.CA().issue_cert("127.0.0.1").cert_chain_pems[0].bytes()
    status, out = asked(stranger)
    assert status == 1
    assert "does not hold the CA" in out
    assert "unreadable" in asked(b"rubbish")[1]


def test_a_failure_policy_that_stops_pods(peer: Peer, check: Any) -> None:
    path = f"{WEBHOOKS}/{CONFIGURATION}"
    body = peer.objects[path]
    body["webhooks"][0]["failurePolicy"] = "Fail"
    peer.put(path, body)
    assert "failurePolicy" in the_one(check()[1], "configuration")


def test_old_and_unknown_versions(peer: Peer, check: Any) -> None:
    status = {
        "nodeInfo": {"kubeletVersion": "v1.28.3"},
        "images": [{"names": [Config().image]}],
    }
    node = {"metadata": {"name": "n"}, "status": status}
    peer.put("/api/v1/nodes/n", node)
    assert "oldest is 1.28: ordinary sidecars" in the_one(check("note")[1], "versions")
    node["status"]["nodeInfo"]["kubeletVersion"] = "?"  # type: ignore[index] # plain JSON
    peer.put("/api/v1/nodes/n", node)
    assert "cannot be read" in the_one(check("note")[1], "versions")


def test_a_level_that_limits_the_profile(peer: Peer, check: Any) -> None:
    body = namespace_body("ml", inject="true", level="restricted")
    peer.put("/api/v1/namespaces/ml", body)
    assert "lowered to unprivileged" in the_one(check("note")[1], "level")


def test_pods_that_run_without_a_sidecar(peer: Peer, check: Any) -> None:
    put(peer, pod("missed"))
    put(peer, pod("finished") | {"status": {"phase": "Succeeded"}})
    declined = pod("declined")
    declined["metadata"]["labels"][INJECT] = "false"
    put(peer, declined)
    skipped = pod("skipped")
    skipped["metadata"]["annotations"]["kitty.k10s.dev/status"] = '{"skipped":"windows-pod"}'
    put(peer, skipped)
    mirror = pod("mirror")
    mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "x"
    put(peer, mirror)
    assert the_one(check()[1], "pods").startswith("pod ml/missed: runs without a sidecar")
    assert "skipped: windows-pod" in the_one(check("note")[1], "pods")


def test_pods_labelled_themselves_count_in_any_namespace(peer: Peer, check: Any) -> None:
    peer.put("/api/v1/namespaces/other", namespace_body("other", inject=None))
    missed = pod("missed", "other")
    missed["metadata"]["labels"][INJECT] = "true"
    put(peer, missed)
    put(peer, pod("unlabelled", "other"))
    system = pod("system", "kube-system")
    system["metadata"]["labels"][INJECT] = "true"
    peer.put("/api/v1/namespaces/kube-system", namespace_body("kube-system", inject=None))
    put(peer, system)
    assert "pod other/missed" in the_one(check()[1], "pods")


def test_a_sidecar_of_another_version(peer: Peer, check: Any) -> None:
    old = injected(pod("old"))
    status = json.loads(old["metadata"]["annotations"]["kitty.k10s.dev/status"])
    status["version"] = "0.0.1"
    old["metadata"]["annotations"]["kitty.k10s.dev/status"] = json.dumps(status)
    put(peer, old)
    assert "version 0.0.1" in the_one(check("note")[1], "pods")


def test_label_values_that_count_as_absent(peer: Peer, check: Any) -> None:
    peer.put("/api/v1/namespaces/typo", namespace_body("typo", inject="True"))
    odd = injected(pod("odd"))
    odd["metadata"]["labels"][INJECT] = "yes"
    put(peer, odd)
    _, problems = check()
    assert [f["subject"] for f in problems] == ["namespace typo", "pod ml/odd"]
    assert 'inject="True" counts as absent; allowed: true, false' in problems[0]["message"]


def test_host_ports_that_collide(peer: Peer, check: Any) -> None:
    put(peer, injected(pod("one", hostNetwork=True)))
    put(peer, injected(pod("two", hostNetwork=True)))
    put(peer, injected(pod("elsewhere", hostNetwork=True, nodeName="n2")))
    assert "pod ml/one and pod ml/two" in the_one(check()[1], "ports")


def test_a_status_of_the_users_own_making_stops_nothing(peer: Peer, check: Any) -> None:
    odd = injected(pod("odd", hostNetwork=True))
    for n, value in enumerate(('{"port": []}', '{"port": {}, "version": [], "skipped": 1}', "[")):
        odd["metadata"]["name"] = f"odd-{n}"
        odd["metadata"]["annotations"]["kitty.k10s.dev/status"] = value
        put(peer, odd)
    assert not [f for f in check()[1] if f["check"] in ("ports", "pods")]


def test_a_container_of_the_users_own_is_no_sidecar(peer: Peer, check: Any) -> None:
    named = pod("named")
    named["spec"]["containers"].append({"name": "kitty", "image": "i"})
    status = '{"version":"0.1.0","skipped":"container-name-taken"}'
    named["metadata"]["annotations"]["kitty.k10s.dev/status"] = status
    put(peer, named)
    assert "skipped: container-name-taken" in the_one(check("note")[1], "pods")


def test_a_webhook_that_does_not_answer(peer: Peer, check: Any) -> None:
    peer.on_create = lambda _path, made: made
    assert "no webhook answered" in the_one(check()[1], "dry-run")


def test_a_namespace_that_would_refuse_injected_pods(peer: Peer, check: Any) -> None:
    def admit(_path: str, made: Any) -> Any:
        return made if len(made["spec"]["containers"]) == 1 else "exceeded quota"

    peer.on_create = admit
    message = the_one(check()[1], "dry-run")
    assert "no webhook answered" in message
    assert "exceeded quota" in message
    peer.on_create = lambda _path, made: (
        "exceeded quota" if made["metadata"]["labels"][INJECT] == "true" else made
    )
    assert "refuses injected pods: exceeded quota" in the_one(check()[1], "dry-run")


def test_a_namespace_that_refuses_every_pod_cannot_be_judged(peer: Peer, check: Any) -> None:
    peer.on_create = lambda _path, _made: "no pods here"
    assert "cannot be judged" in the_one(check("note")[1], "dry-run")


def test_one_refused_list_does_not_hide_the_rest(peer: Peer, check: Any) -> None:
    peer.refuse = lambda _method, path: 403 if path == "/api/v1/pods" else 0
    assert "refused with 403" in the_one(check()[1], "pods")
    assert "dry-run" in {f["check"] for f in check("ok")[1]}


def test_no_kubeconfig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--kubeconfig", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == (
        f"kitty-webhook check: no usable kubeconfig: {tmp_path}/none does not exist; "
        "name one by --kubeconfig or KUBECONFIG\n"
    )


@pytest.mark.parametrize(
    ("variable", "tried"),
    [
        (None, ["{home}/.kube/config"]),
        ("", ["{home}/.kube/config"]),
        ("{home}/a:{home}/b", ["{home}/a", "{home}/b"]),
    ],
)
def test_which_kubeconfig_was_tried(
    variable: str | None,
    tried: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As kubectl looks for it; the same for machines."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if variable is not None:
        monkeypatch.setenv("KUBECONFIG", variable.format(home=tmp_path))
    assert main(["check", "--json"]) == 1
    out, err = capsys.readouterr()
    why = " and ".join(f"{path.format(home=tmp_path)} does not exist" for path in tried)
    error = f"no usable kubeconfig: {why}; name one by --kubeconfig or KUBECONFIG"
    assert json.loads(out) == {"error": error}
    assert err == f"kitty-webhook check: {error}\n"


@pytest.mark.parametrize("text", ["junk", "a: b: c", "[]", "", "clusters: 1"])
def test_a_kubeconfig_of_rubbish(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    assert main(["check", "--kubeconfig", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"kitty-webhook check: no usable kubeconfig: {path}: ")
    assert said.endswith("; name one by --kubeconfig or KUBECONFIG\n")
    assert said.count("\n") == 1


def test_a_real_cluster(
    api_server: ApiServer, tls: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The webhook away, then there; a LimitRange that refuses; all by the server's own dry runs."""
    api, name = api_server.cluster, "check-real"
    flags = [
        "check",
        "--kubeconfig",
        str(api_server.kubeconfig),
        "--webhook-config",
        name,
        "--json",
    ]

    def found(status: int) -> dict[str, str]:
        assert main(flags) == status
        report = json.loads(capsys.readouterr().out)
        return {
            f"{f['check']} {f['subject']}": f"{f['severity']} {f['message']}"
            for f in report["findings"]
            if "golden" not in f["subject"]
        }

    for space, level in (("check-a", None), ("check-b", "restricted")):
        api.create("/api/v1/namespaces", namespace_body(space, inject="true", level=level))
    limits = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "small"},
        "spec": {"limits": [{"type": "Container", "max": {"memory": "100Mi"}}]},
    }
    context = ssl.create_default_context(cafile=str(tls.root))
    files = ("--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
    with running_server(tmp_path, *files, context=context) as server:
        bundle = base64.b64encode(tls.root.read_bytes()).decode()
        body = webhook_configuration(
            lambda path: {"url": f"https://127.0.0.1:{server.port}{path}", "caBundle": bundle},
            name=name,
        )
        assert "not installed" in found(1)[f"configuration {name}"]
        api.create(WEBHOOKS, body)
        try:
            wait_until(lambda: main(flags) == 0)
            capsys.readouterr()
            there = found(0)
            assert there["dry-run namespace check-a"].startswith("ok")
            assert there["dry-run namespace check-b"].startswith("ok")
            assert "lowered" in there["level namespace check-b"]
            api.create("/api/v1/namespaces/check-a/limitranges", limits)
            wait_until(lambda: main(flags) == 1)
            capsys.readouterr()
            assert "maximum memory usage" in found(1)["dry-run namespace check-a"]
        finally:
            api.delete(f"{WEBHOOKS}/{name}")
