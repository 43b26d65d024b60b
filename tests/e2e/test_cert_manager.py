"""The overlay for cert-manager, with a Secret and a caBundle as cert-manager would write them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator

import pytest
import trustme
import yaml

from tests.e2e.install import CONFIGURATION, ROOT, Install
from tests.e2e.kube import PREFIX, SYSTEM, Kube, pod_of, sidecars

OVERLAY = ROOT / "manifests" / "overlays" / "cert-manager"
RIGHTS = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/roles/kitty-webhook"


@pytest.fixture
def authority(install: Install, kube: Kube) -> Iterator[trustme.CA]:
    made = trustme.CA()
    leaf = made.issue_cert(f"kitty-webhook.{SYSTEM}.svc")
    data = {
        "tls.crt": b"".join(blob.bytes() for blob in leaf.cert_chain_pems),
        "tls.key": leaf.private_key_pem.bytes(),
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": "kitty-webhook-cert", "namespace": SYSTEM},
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }
    install.remove()
    rendered = yaml.safe_load_all(kube.kubectl("kustomize", str(OVERLAY)))
    ours = [one for one in rendered if not one["apiVersion"].startswith("cert-manager.io/")]
    kube.apply(*sorted(ours, key=lambda one: one["kind"] != "Namespace"), secret)
    yield made
    kube.kubectl("delete", "-k", install.overlay("default"), "--ignore-not-found")
    install.apply()


def test_webhook_serves_what_it_is_given_and_may_do_no_more(
    authority: trustme.CA, install: Install, kube: Kube, namespace: Callable[..., str]
) -> None:
    bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
    entries = kube.api.get(CONFIGURATION)["webhooks"]
    paths = [f"/webhooks/{i}/clientConfig/caBundle" for i in range(len(entries))]
    kube.api.patch(CONFIGURATION, [{"op": "add", "path": p, "value": bundle} for p in paths])
    install.rolled_out()
    home = namespace("cert-manager")
    kube.kubectl("label", "namespace", home, f"{PREFIX}inject=true")
    pod = pod_of("probe", ["true"], image="probe")
    assert sidecars(kube.wait("a pod's review", lambda: kube.try_pod(home, pod)))
    assert not kube.exists(RIGHTS)
    account = f"--as=system:serviceaccount:{SYSTEM}:kitty-webhook"
    assert kube.kubectl("auth", "can-i", "list", "nodes", account).strip() == "yes"
    listed = kube.kubectl("auth", "can-i", "--list", account, "-n", SYSTEM)
    assert "secrets" not in listed
    assert "webhookconfigurations" not in listed
