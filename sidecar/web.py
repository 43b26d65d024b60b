"""Serves /metrics, /healthz and a page for people on the pod's address."""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from html import escape
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import sidecar
from sidecar.exposition import answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client import Metric

    from sidecar.pod import Pod
    from sidecar.sampler import Rounds

    App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

LOG = logging.getLogger("kitty.web")

NEXT_PORTS = 100
"""Ports tried after the wanted one where another process of the node holds it (hostNetwork)."""
CONCURRENT = 32
"""Requests served at a time; further ones wait."""
PATIENCE = 1.0
"""Seconds after which a client that has not sent its request must give its place to a new one:
clients that hang would else keep the others away."""
QUEUE_TIMEOUT = 5.0
"""Seconds that a request waits for a place where all are being answered."""
REQUEST_TIMEOUT = 10
"""Seconds that a client may take to send its request or to read the answer."""
_NOT_THE_ADDRESS = frozenset(
    {
        *(errno.EADDRINUSE, errno.EACCES),
        *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
    }
)
"""Why no socket can be had at an address that is good."""


def application(collect: Callable[[], Iterable[Metric]], pod: Pod, rounds: Sequence[Rounds]) -> App:
    """Returns the WSGI application: GET /, /metrics, /healthz."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = get(environ, start_response)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else body

    def get(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ["REQUEST_METHOD"] not in {"GET", "HEAD"}:
            return _answer(start_response, "405 Method Not Allowed", "text/plain", "only GET\n")
        if path == "/metrics":
            body, headers = answer(
                collect(),
                accept=environ.get("HTTP_ACCEPT", ""),
                accept_encoding=environ.get("HTTP_ACCEPT_ENCODING", ""),
            )
            start_response("200 OK", headers)
            return [body]
        if path == "/healthz":
            return _answer(start_response, "200 OK", "text/plain", "ok\n")
        if path == "/":
            return _answer(start_response, "200 OK", "text/html", page(pod, rounds))
        return _answer(start_response, "404 Not Found", "text/plain", "try /metrics\n")

    return app


def page(pod: Pod, rounds: Sequence[Rounds]) -> str:
    """Returns the page for people: what this is, the ranks now, how the collectors fare."""
    config, view = pod.config, pod.view
    name, node, job = (
        escape(text) or "unknown"
        for text in (f"{config.namespace}/{config.pod}".strip("/"), config.node, view.job)
    )
    ranks = _rows(
        (rank.rank or "unknown", ", ".join(map(str, rank.heads)), str(len(rank.members)))
        for rank in view.ranks
    )
    collectors = _rows(
        (r.collector.name, r.reason or "up", f"{r.interval:g} s", str(r.errors)) for r in rounds
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>kitty {escape(config.pod)}</title>
<style>body{{font:16px/1.5 sans-serif;margin:2em;max-width:60em}}table{{border-collapse:collapse}}
th,td{{text-align:left;padding:.2em 1.5em .2em 0;border-bottom:1px solid #ccc}}</style></head><body>
<h1>kitty {sidecar.__version__}</h1>
<p>This sidecar watches the training processes of its own pod and serves what it sees as
<a href="/metrics">Prometheus metrics</a>.</p>
<p>pod {name}, node {node}, job {job}</p>
<h2>Ranks</h2>
<table><tr><th>rank</th><th>process</th><th>processes in its tree</th></tr>{ranks}</table>
<h2>Collectors</h2>
<table><tr><th>collector</th><th>state</th><th>interval</th><th>errors</th></tr>{collectors}</table>
</body></html>
"""


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )


def _answer(
    start_response: Callable[..., Any], status: str, kind: str, text: str
) -> Iterable[bytes]:
    body = text.encode()
    start_response(
        status,
        [("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body)))],
    )
    return [body]


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT

    def parse_request(self) -> bool:
        """Reads the header; from then on it is the server that makes the client wait."""
        parsed = super().parse_request()
        self.server.answering(self.request)  # type: ignore[attr-defined] # Server, below
        return parsed

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the base class's name
        LOG.debug(format, *args)


class Server(ThreadingMixIn, WSGIServer):
    """One thread a request, a bounded number of them."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, app: App) -> None:
        self.address_family = family
        self._places = threading.BoundedSemaphore(CONCURRENT)
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, float] = {}
        """When each client that has not sent its request was accepted, oldest first."""
        super().__init__(address, _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Binds; an IPv6 wildcard takes IPv4 connections too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer.server_bind would look the address up in DNS.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection; without a descriptor for it the next attempt waits a little."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for the request, or closes it where no place gets free."""
        if not self._places.acquire(blocking=False):
            self._hang_up_on_oldest()
            if not self._places.acquire(timeout=QUEUE_TIMEOUT):
                self.shutdown_request(request)
                return
        with self._lock:
            self._silent[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._leave(request)
            raise

    def _hang_up_on_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._silent), None)
            if oldest is not None and time.monotonic() - self._silent[oldest] > PATIENCE:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def answering(self, request: Any) -> None:
        """Notes that a client's request is there."""
        with self._lock:
            self._silent.pop(request, None)

    def _leave(self, request: Any) -> None:
        self.answering(request)
        self._places.release()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error of ours."""
        LOG.debug("%s: request ended early: %s", client_address, sys.exception())
        del request


def listen(app: App, *, bind: str, port: int) -> Server:
    """Binds the wanted port, or one of the next where it is taken.

    Args:
        app: what to serve.
        bind: address; empty for all, IPv6 and IPv4, as also where it cannot be served.
        port: 0 for any.

    Raises:
        OSError: no socket can be had at all.
    """
    why = "taken"
    for wanted in (*range(port, min(port + NEXT_PORTS, 65536)), 0):
        try:
            server = _bound(app, bind, wanted)
        except OSError as e:
            if bind and e.errno not in _NOT_THE_ADDRESS:
                LOG.warning("address %s: %s, serving on all", bind, e.strerror)
                return listen(app, bind="", port=port)
            if e.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
            why = "not allowed" if e.errno == errno.EACCES else why
            continue
        if port and server.server_port != port:
            LOG.warning("port %d is %s, serving on %d", port, why, server.server_port)
        return server
    raise OSError(errno.EADDRINUSE, "no port is free")


def _bound(app: App, bind: str, port: int) -> Server:
    if bind:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        return Server((bind, port), family, app)
    try:
        return Server(("::", port), socket.AF_INET6, app)
    except OSError as e:
        if e.errno in {errno.EADDRINUSE, errno.EACCES}:
            raise
        return Server(("0.0.0.0", port), socket.AF_INET, app)  # noqa: S104 # pods are scraped
