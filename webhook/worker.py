"""gunicorn's threaded worker, with threads only for connections that have something to say.

The stock worker keeps a thread on a new TLS connection until its first request arrives. An API
server opens more connections than it then uses: in a burst as many idle ones as there are threads
would hold up every review behind them. It also lingers on connections that it closes, up to two
seconds each and in the loop that serves all others.

Clients that stop half-way through a handshake or a request do keep a thread. Another one works in
its place meanwhile, and when there are too many, who keeps one waiting loses it.
"""

from __future__ import annotations

import logging
import selectors
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from gunicorn.workers import gthread

from webhook.threads import Threads
from webhook.tls import CROWDED, WAITING

log = logging.getLogger("kitty.webhook")

PLACES = 64
"""Threads at most, nearly all of them waiting for clients: gunicorn's setting is how many work."""


class Worker(gthread.ThreadWorker):  # type: ignore[misc] # gunicorn ships no types
    """Accepts, waits and closes without a thread that serves."""

    def init_process(self) -> None:
        """Starts the threads that linger."""
        self._busy = 0
        self._closers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="closer")
        super().init_process()

    def get_thread_pool(self) -> Threads:
        """The threads that wait for clients or work."""
        WAITING.threads = Threads(working=self.cfg.threads, most=PLACES)
        return WAITING.threads

    def enqueue_req(self, conn: Any) -> None:
        """Gives the connection to a thread, or to the next one that is free."""
        self._busy += 1
        super().enqueue_req(conn)

    def accept(self, listener: Any) -> None:
        """Takes a connection and waits for its first byte in the poller."""
        try:
            client, address = listener.accept()
        except OSError:
            return
        self.nr_conns += 1
        connection = gthread.TConn(self.cfg, client, address, listener.getsockname())
        connection.set_timeout()
        self.pending_conns.append(connection)
        self.poller.register(
            client,
            selectors.EVENT_READ,
            partial(self.on_pending_socket_readable, connection),
        )

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """Serves what happened; at the limit the longest silent connection makes room.

        The stock worker stops accepting instead, and idle clients would lock out the API server.
        It is closed after the events, none of which can be its own any more.
        """
        crowd = self._busy - PLACES
        if crowd > 0:
            WAITING.make_room(crowd)
            timeout = min(timeout, CROWDED / 2)
        super().wait_for_and_dispatch_events(timeout)
        waiting = self.pending_conns or self.keepalived_conns
        if self.nr_conns >= self.worker_connections and waiting:
            silent = waiting.popleft()
            self.poller.unregister(silent.sock)
            self.nr_conns -= 1
            silent.close()

    def handle(self, conn: Any) -> Any:
        """Handles what arrived: a handshake, after which the poller waits again, or a request."""
        if not conn.initialized:
            try:
                conn.init()
            except OSError as error:
                log.debug("no TLS connection with %s: %s", conn.client, error)
                return False
            if not conn.sock.pending():
                return gthread._DEFER  # noqa: SLF001 -- the worker's own word for it
        return super().handle(conn)

    def finish_request(self, conn: Any, fs: Future[Any]) -> None:
        """Leaves a connection that ends to the closers; every other goes on as usual."""
        self._busy -= 1
        if not fs.cancelled() and fs.exception() is None and fs.result():
            super().finish_request(conn, fs)
            return
        closing = self._closers.submit(conn.close, graceful=True)
        closing.add_done_callback(lambda _: self.method_queue.defer(self._closed))

    def _closed(self) -> None:
        self.nr_conns -= 1
