"""What an API server does with a pod: ask the webhook over TLS, and apply the patch it answers."""

import base64
import copy
import http.client
import json
import socket
import ssl
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonpatch
import trustme

SERVICE = "kitty-webhook.kitty-system.svc"
TLS_PORT = 8443
METRICS_PORT = 8080
REQUEST_TIMEOUT_S = 2.0  # as the shipped webhook configuration says


class AdmissionError(RuntimeError):
    """The webhook could not be asked, or its answer is not one an API server accepts."""


@dataclass(frozen=True)
class Answer:
    """An allowed request.

    Attributes:
        pod: The pod with the patch applied.
        operations: Number of patch operations.
        warnings: For the user who created the pod.
        duration_s: From the request to the answer, TLS handshake included.
    """

    pod: dict[str, Any]
    operations: int
    warnings: tuple[str, ...]
    duration_s: float


def write_certificate(directory: Path) -> tuple[Path, Path, ssl.SSLContext]:
    """Make a certificate for the webhook's service.

    Returns:
        Paths of certificate and key, and a context that trusts their authority alone.
    """
    authority = trustme.CA()
    leaf = authority.issue_cert(SERVICE)
    certificate, key = directory / "tls.crt", directory / "tls.key"
    leaf.cert_chain_pems[0].write_to_path(certificate)
    leaf.private_key_pem.write_to_path(key)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return certificate, key, context


def webhook_pod(certificate: Path, key: Path) -> dict[str, Any]:
    """Return the manifest of the webhook's own pod."""
    flags = {
        "--tls-cert": certificate,
        "--tls-key": key,
        "--bind": f"$(POD_IP):{TLS_PORT}",
        "--metrics-bind": f"$(POD_IP):{METRICS_PORT}",
    }
    pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
    container = {
        "name": "webhook",
        "image": "kitty-webhook",
        "args": ["serve", *(f"{flag}={value}" for flag, value in flags.items())],
        "env": [{"name": "POD_IP", "valueFrom": pod_ip}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "kitty-webhook-0", "namespace": "kitty-system"},
        "spec": {"nodeName": "control-plane", "containers": [container]},
    }


def wait_until_ready(address: str, *, timeout_s: float) -> None:
    """Wait until the webhook's ``/readyz`` answers 200.

    Raises:
        AdmissionError: It did not within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        connection = http.client.HTTPConnection(address, METRICS_PORT, timeout=1)
        try:
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException) as error:
            last: Exception | None = error
        else:
            last = None
        finally:
            connection.close()
        if time.monotonic() > deadline:
            raise AdmissionError(f"the webhook is not ready after {timeout_s:.0f} s: {last}")
        time.sleep(0.05)


def review(pod: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """Return the AdmissionReview for the creation of a pod, as a controller's arrives."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": str(uuid.uuid4()),
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": namespace,
            "operation": "CREATE",
            "userInfo": {
                "username": "system:serviceaccount:kubeflow:training-operator",
                "groups": ["system:serviceaccounts", "system:authenticated"],
            },
            "object": pod,
            "oldObject": None,
            "dryRun": False,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    }


def admit(
    pod: Mapping[str, Any], namespace: str, *, address: str, context: ssl.SSLContext
) -> Answer:
    """Ask the webhook about a pod.

    Args:
        pod: The manifest; it is not changed.
        namespace: Where it is created.
        address: The webhook pod's, as a service would resolve it.
        context: Trusts the webhook's certificate authority.

    Raises:
        AdmissionError: No answer, or not a valid one.
    """
    question = review(pod, namespace)
    start = time.monotonic()
    try:
        answer = _post(json.dumps(question).encode(), address=address, context=context)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise AdmissionError(f"the webhook gave no answer: {error!r}") from error
    duration = time.monotonic() - start
    response = answer.get("response", {})
    if response.get("uid") != question["request"]["uid"]:
        raise AdmissionError("the answer's uid is not the request's")
    if response.get("allowed") is not True:
        raise AdmissionError(f"the webhook refused the pod: {response.get('status')}")
    operations = []
    if "patch" in response:
        if response.get("patchType") != "JSONPatch":
            raise AdmissionError(f"patchType {response.get('patchType')!r} with a patch")
        operations = json.loads(base64.b64decode(response["patch"], validate=True))
    return Answer(
        pod=jsonpatch.apply_patch(copy.deepcopy(dict(pod)), operations),
        operations=len(operations),
        warnings=tuple(response.get("warnings", ())),
        duration_s=duration,
    )


def _post(body: bytes, *, address: str, context: ssl.SSLContext) -> dict[str, Any]:
    connection = http.client.HTTPSConnection(
        SERVICE, TLS_PORT, timeout=REQUEST_TIMEOUT_S, context=context
    )
    # The service's name is what the certificate must carry; its address is known without DNS.
    connection.sock = context.wrap_socket(
        socket.create_connection((address, TLS_PORT), timeout=REQUEST_TIMEOUT_S),
        server_hostname=SERVICE,
    )
    try:
        connection.request(
            "POST",
            f"/mutate?timeout={REQUEST_TIMEOUT_S:.0f}s",
            body=body,
            headers={"Content-Type": "application/json", "Accept": "application/json, */*"},
        )
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}: {text[:200]!r}")
    return dict(json.loads(text))
