"""The Kubernetes API, as raw JSON: the only module that imports the client (46 MB with it)."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from webhook.pod import JsonObject

TIMEOUT = 10
_PAGE = 250
_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})")
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class ClusterError(Exception):
    """The API refused or could not be asked.

    Attributes:
        status: The HTTP status; 0 where there was no answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """A client of one API server.

    Args:
        client: The kubernetes package's ApiClient.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    def connect(cls, *, kubeconfig: str | None = None, context: str | None = None) -> Cluster:
        """Connects as the kubeconfig says, or else as the pod's service account.

        Args:
            kubeconfig: Path; None for KUBECONFIG, the home directory's, or the pod's own.
            context: A context of it; None for the current one.

        Raises:
            ClusterError: There is no usable configuration; the text says which was tried.
        """
        from kubernetes import client, config  # noqa: PLC0415 -- 36 MB that serving does without

        configuration = client.Configuration()
        in_pod = kubeconfig is None and context is None and _in_pod()
        files = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        try:
            if in_pod:
                config.load_incluster_config(  # type: ignore[no-untyped-call] # theirs
                    client_configuration=configuration
                )
            else:
                config.load_kube_config(  # type: ignore[no-untyped-call] # theirs
                    config_file=files, context=context, client_configuration=configuration
                )
        except Exception as error:  # the client's own reader stumbles in many ways over rubbish
            why = f"the pod's service account: {error}" if in_pod else _unusable(files, error)
            message = f"no usable kubeconfig: {why}; name one by --kubeconfig or KUBECONFIG"
            raise ClusterError(0, message) from error
        return cls(client.ApiClient(configuration))

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def get(self, path: str, **query: str) -> JsonObject:
        """Reads one object.

        Raises:
            ClusterError: As for every method.
        """
        return self._request("GET", path, query=query)

    def items(self, path: str, **query: str) -> Iterator[JsonObject]:
        """Reads a list page by page."""
        query = {**query, "limit": str(_PAGE)}
        while True:
            page = self._request("GET", path, query=query)
            yield from page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return
            query["continue"] = token

    def create(self, path: str, body: JsonObject, *, dry_run: bool = False) -> JsonObject:
        """Creates an object; with dry_run the server only says what would become of it."""
        query = {"dryRun": "All"} if dry_run else {}
        return self._request("POST", path, body=body, query=query)

    def replace(self, path: str, body: JsonObject) -> JsonObject:
        """Replaces an object; its resourceVersion makes a concurrent change a 409."""
        return self._request("PUT", path, body=body)

    def delete(self, path: str, **query: str) -> None:
        """Deletes an object."""
        self._request("DELETE", path, query=query)

    def patch(self, path: str, operations: list[JsonObject]) -> JsonObject:
        """Applies a JSON Patch."""
        return self._request(
            "PATCH", path, body=operations, content_type="application/json-patch+json"
        )

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> JsonObject:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        configuration = self._client.configuration
        from urllib3.exceptions import HTTPError  # noqa: PLC0415 -- comes with the client

        try:
            request = self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=list(configuration.auth_settings()),
            )
            response = self._client.call_api(*request, _request_timeout=TIMEOUT)
            data = response.read()
            answer = json.loads(data)
        except (HTTPError, OSError, self._api_exception()) as error:
            raise ClusterError(0, f"{method} {path}: {error}") from error
        except ValueError as error:
            raise ClusterError(response.status, f"{method} {path}: no JSON") from error
        if not 200 <= response.status <= 299:
            raise ClusterError(response.status, str(answer.get("message") or response.status))
        return answer if isinstance(answer, dict) else {}

    @staticmethod
    def _api_exception() -> type[Exception]:
        from kubernetes.client import ApiException  # noqa: PLC0415 -- as above

        exception: type[Exception] = ApiException
        return exception


def _unusable(files: str, error: Exception) -> str:
    """What is wrong with the files of a kubeconfig; theirs names none of those that are missing."""
    paths = [os.path.expanduser(path) for path in files.split(os.pathsep) if path]
    if not any(map(os.path.exists, paths)):
        return " and ".join(f"{path} does not exist" for path in paths) or "none is named"
    return f"{' and '.join(paths)}: {' '.join(str(error).split())}"


def _in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and not os.environ.get("KUBECONFIG")


def parse_version(text: object) -> tuple[int, int] | None:
    """Major and minor of a version such as ``v1.31.2-eks-1``; None where it is none."""
    match = _VERSION.match(text) if isinstance(text, str) else None
    return (int(match[1]), int(match[2])) if match else None


def versions(cluster: Cluster) -> dict[str, tuple[int, int] | None]:
    """The versions of the server and of every kubelet.

    Returns:
        By name (``server``, or the node's); None where one cannot be read.

    Raises:
        ClusterError: The API refused.
    """
    found = {"server": parse_version(cluster.get("/version").get("gitVersion"))}
    for node in cluster.items("/api/v1/nodes"):
        info = (node.get("status") or {}).get("nodeInfo") or {}
        name = str((node.get("metadata") or {}).get("name"))
        found[name] = parse_version(info.get("kubeletVersion"))
    return found


def oldest(found: Mapping[str, tuple[int, int] | None]) -> tuple[int, int] | None:
    """The oldest of them; None where one is not known."""
    known = [version for version in found.values() if version is not None]
    return min(known) if known and len(known) == len(found) else None
