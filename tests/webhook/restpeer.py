"""A small HTTPS server that speaks the few REST routes of the Kubernetes API that are needed.

It keeps objects in memory, with resource versions, conflicts, pages and JSON Patch, for machines
without a kube-apiserver.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import jsonpatch

from tests.webhook.kube import TOKEN, write_kubeconfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.webhook.support import Files


@dataclass
class Peer:
    """What the server holds and was asked.

    Attributes:
        objects: By path.
        refuse: Gives a status for a method and path, to refuse with; 0 to go on.
        on_create: Sees a pod before it is stored, as admission does.
    """

    kubeconfig: Path
    objects: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    refuse: Callable[[str, str], int] = lambda _method, _path: 0
    on_create: Callable[[str, Any], Any] = lambda _path, body: body
    version: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, path: str, body: Any) -> Any:
        self.version += 1
        body = json.loads(json.dumps(body))
        body.setdefault("metadata", {})["resourceVersion"] = str(self.version)
        self.objects[path] = body
        return body

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if status := self.refuse(method, path):
            return status, {"message": f"refused with {status}"}
        if method == "GET":
            return self._get(path, query)
        if method == "POST":
            return self._create(path, query, body)
        if path not in self.objects:
            return 404, {"message": "not found"}
        if method == "PATCH":
            body = jsonpatch.apply_patch(self.objects[path], body)
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if method == "PUT" and wanted != self.objects[path]["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        return 200, self.put(path, body)

    def _get(self, path: str, query: dict[str, str]) -> tuple[int, Any]:
        if path in self.objects:
            return 200, self.objects[path]
        if "limit" not in query:
            return 404, {"message": "not found"}
        below = [v for k, v in sorted(self.objects.items()) if k.rpartition("/")[0] == path]
        if path == "/api/v1/pods":
            below = [v for k, v in sorted(self.objects.items()) if "/pods/" in k]
        start = int(query.get("continue", "0"))
        more = {"continue": str(start + 2)} if start + 2 < len(below) else {}
        return 200, {"items": below[start : start + 2], "metadata": more}

    def _create(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        made = self.on_create(path, body)
        if isinstance(made, str):
            return 403, {"message": made}
        name = made["metadata"].get("name") or made["metadata"]["generateName"] + "x"
        if f"{path}/{name}" in self.objects:
            return 409, {"message": "already exists"}
        return (201, made) if "dryRun" in query else (201, self.put(f"{path}/{name}", made))


@contextlib.contextmanager
def running_peer(folder: Path, tls: Files) -> Iterator[Peer]:
    """Serves it on loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            url = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            status, answer = 401, {"message": "who are you"}
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                with peer.lock:
                    peer.asked.append(f"{self.command} {url.path}")
                    status, answer = peer.answer(self.command, url.path, query, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any  # noqa: N815 -- http.server's names

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    kubeconfig = write_kubeconfig(folder / "kubeconfig", server.server_port, tls.root, TOKEN)
    peer = Peer(kubeconfig)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield peer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
