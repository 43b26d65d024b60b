"""The server: gunicorn with one threaded worker, TLS that reloads, and the health listener."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import socket
import ssl
import sys
import tempfile
import threading
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from gunicorn.app.base import BaseApplication

from webhook.glance import in_pod
from webhook.tls import STALLED, ReloadingContext
from webhook.upkeep import Task, Upkeep, write_atomically

if TYPE_CHECKING:
    from flask import Flask
    from gunicorn.config import Config as GunicornConfig

    from webhook.config import Config

log = logging.getLogger("kitty.webhook")

KEEP_ALIVE = 120
"""Seconds; the API server keeps an idle connection for 90 and must be the one to close it."""
THREADS = 4
"""More of them take the interpreter from each other, and the slowest reviews get slower."""


_M_ARENA_MAX = -8
_ARENAS = 2
"""Heaps of the allocator for all threads: with one for each, a burst of handshakes costs 20 MB."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What ``serve`` was asked for.

    Attributes:
        config: The webhook's configuration.
        bind: HOST:PORT of the TLS listener.
        metrics_bind: Host and port of the second listener.
        task: What is kept up beside serving. Its ``certificate`` and ``self_signed`` say which
            of the two ways the server gets its certificate.
        key: Path of the certificate's private key; None where it is self-signed.
    """

    config: Config
    bind: str
    metrics_bind: tuple[str, int]
    task: Task
    key: str | None


class _HealthServer(ThreadingMixIn, WSGIServer):
    """A WSGI server on a socket that the parent bound: a new worker takes it over as it is."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: Any) -> None:
        super().__init__(listener.getsockname()[:2], _QuietHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(app)


class _QuietHandler(WSGIRequestHandler):
    timeout = STALLED

    def log_message(self, *args: Any) -> None:
        """Scrapes and probes are no news."""


class _Server(BaseApplication):  # type: ignore[misc] # gunicorn ships no types
    """gunicorn, configured by arguments alone; the arbiter never imports Flask."""

    def __init__(self, serving: Serving, health: socket.socket, own: str) -> None:
        self._serving = serving
        self._health = health
        self._own = own
        self._certificate = serving.task.certificate or own
        self._tls = ReloadingContext(self._certificate, serving.key or own)
        super().__init__()

    def load_config(self) -> None:
        """Gives gunicorn its settings."""
        settings: dict[str, Any] = {
            "bind": self._serving.bind,
            "workers": 1,
            "worker_class": "webhook.worker.Worker",
            "threads": THREADS,
            "keepalive": KEEP_ALIVE,
            "timeout": 30,
            "graceful_timeout": 20,
            "worker_tmp_dir": "/dev/shm" if os.access("/dev/shm", os.W_OK) else None,  # noqa: S108 -- gunicorn's heartbeat file must not block on a disk
            "control_socket_disable": True,
            # No proxy stands in front of it: nobody's headers say who or where it is.
            "forwarded_allow_ips": "",
            "forwarder_headers": "",
            "certfile": self._certificate,
            "keyfile": self._serving.key or self._own,
            "ssl_context": lambda _config, _default: self._tls.current(),
            "post_worker_init": lambda _worker: self._start_beside(),
            "loglevel": "warning",
            "proc_name": "kitty-webhook",
        }
        cfg: GunicornConfig = self.cfg
        for name, value in settings.items():
            cfg.set(name, value)

    def load(self) -> Flask:
        """Builds the application, in the worker."""
        from prometheus_client import CollectorRegistry, disable_created_metrics  # noqa: PLC0415

        from webhook.app import mutate_app  # noqa: PLC0415
        from webhook.metrics import Metrics  # noqa: PLC0415
        from webhook.reviewer import Reviewer  # noqa: PLC0415

        disable_created_metrics()  # type: ignore[no-untyped-call] # theirs
        self._metrics = Metrics(registry=CollectorRegistry())
        task = self._serving.task
        own = self._own if task.self_signed else None
        glance = in_pod(task.self_signed.webhook_config) if task.self_signed else None
        self._upkeep = Upkeep(
            task=task, pem=own, metrics=self._metrics, glance=glance.bundles if glance else None
        )
        reviewer = Reviewer(
            config=self._serving.config,
            metrics=self._metrics,
            oldest=lambda: self._upkeep.oldest,
        )
        return mutate_app(reviewer, self._metrics)

    def _start_beside(self) -> None:
        from webhook.app import health_app  # noqa: PLC0415

        server = _HealthServer(self._health, health_app(self._metrics, ready=self._missing))
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
        self._upkeep.start()
        # What is loaded stays: without this the collector walks all of it every few reviews.
        # What a review makes is freed by its reference counts.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)

    def _missing(self) -> str:
        try:
            self._tls.current()
        except (OSError, ssl.SSLError) as error:
            return f"certificate: {error}"
        # Pods reviewed before the versions are known would get ordinary sidecars.
        if self._serving.task.versions and not self._upkeep.looked:
            return "a first look at the cluster's versions"
        return ""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, for IPv4 and IPv6 alike where the host is ``::``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6()
    )


def _few_arenas() -> None:
    """Tells glibc (malloc.h, mallopt); other C libraries have no arenas."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, _ARENAS)


def serve(serving: Serving) -> int:
    """Serves until SIGTERM.

    Returns:
        The exit status.
    """
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    _few_arenas()
    try:
        health = listen(*serving.metrics_bind)
    except OSError as error:
        host, port = serving.metrics_bind
        log.error("cannot listen on %s:%d: %s", host, port, error)  # noqa: TRY400 -- the text says it all
        return 1
    log.info("serving reviews on %s, metrics on %s:%d", serving.bind, *health.getsockname()[:2])
    with tempfile.TemporaryDirectory(prefix="kitty-webhook-") as private:
        own = os.path.join(private, "tls.pem")
        # gunicorn wants to see the file at once; until it holds a certificate, readyz says so.
        write_atomically(own, b"")
        _Server(serving, health, own).run()
    return 0
