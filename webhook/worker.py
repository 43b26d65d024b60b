"""gunicorn's threaded worker, with threads only for connections that have something to say.

The stock worker keeps a thread on a new TLS connection until its first request arrives. An API
server opens more connections than it then uses: in a burst as many idle ones as there are threads
would hold up every review behind them. It also lingers on connections that it closes, up to two
seconds each and in the loop that serves all others.

Clients that stop half-way through a handshake or a request do keep a thread. Another one works in
its place meanwhile, and when there are too many, who keeps one waiting loses it.

A small review that is there as a whole waits for nobody, and is answered in the loop: the way to a
thread and back takes longer than the review.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from gunicorn.workers import gthread

from webhook.direct import answer, begun, post
from webhook.threads import Threads
from webhook.tls import CROWDED, WAITING

log = logging.getLogger("kitty.webhook")

PLACES = 64
"""Threads at most, nearly all of them waiting for clients: gunicorn's setting is how many work."""
_RECORD = 16 * 1024
_RECORDS = 32
"""How many of them the loop reads of a request: Go writes them as small as 1,200 bytes."""
_SOON = 0.001
"""Seconds that the loop waits for the rest of a request, in all."""


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
        waiting = [some for some in (self.pending_conns, self.keepalived_conns) if some]
        if self.nr_conns >= self.worker_connections and waiting:
            # Each has the same time from its last word on, and the oldest of each are in front.
            silent = min(waiting, key=lambda some: some[0].timeout).popleft()
            self.poller.unregister(silent.sock)
            self.nr_conns -= 1
            silent.close()

    def on_client_socket_readable(self, conn: Any, client: Any) -> None:
        """Answers a small review; leaves every other request to a thread."""
        said = self._answer(conn) if self.alive else None
        if said is None:
            super().on_client_socket_readable(conn, client)
            return
        if not said:
            # Part of a record, or no word of a request: the poller knows when there is more.
            return
        # With hundreds of reviews in one turn the arbiter would take the loop for a dead one.
        self.notify()
        self.keepalived_conns.remove(conn)
        try:
            rest = said[conn.sock.taken(said) :]
        except OSError as error:
            log.debug("no answer to %s: %s", conn.client, error)
            self.poller.unregister(client)
            self._leave(conn)
            return
        if rest:
            self.poller.unregister(client)
            self._busy += 1
            sent = self.tpool.submit(self._send, conn, rest)
            sent.add_done_callback(lambda f: self.method_queue.defer(self.finish_request, conn, f))
            return
        # It never left the poller.
        conn.set_timeout()
        self.keepalived_conns.append(conn)

    def _answer(self, conn: Any) -> bytes | None:
        """Reads what has arrived; what it cannot answer is left to the parser.

        Returns:
            None where a thread has to go on; empty where nothing has arrived to go on with.
        """
        data, deadline = b"", time.monotonic() + _SOON
        with contextlib.suppress(OSError):
            for _ in range(_RECORDS):
                # Everybody else waits for what this waits for.
                if not begun(data):
                    break
                piece = conn.sock.arrived(_RECORD)
                if piece is None and not data:
                    return b""
                if piece is None and conn.sock.soon(deadline):
                    # A client writes record by record.
                    continue
                if not piece:
                    break
                data += piece
                if (request := post(data)) and (body := self.wsgi.direct(*request)) is not None:
                    return answer(body)
        conn.parser.unreader.unread(data)
        return None

    def _send(self, conn: Any, rest: bytes) -> bool:
        conn.sock.sendall(rest)
        return True

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
        if fs.cancelled() or fs.exception() is not None or not fs.result():
            self._leave(conn)
        elif conn.sock.pending():
            # The rest of a record that was read in part makes the socket readable no more.
            self.enqueue_req(conn)
        else:
            super().finish_request(conn, fs)

    def _leave(self, conn: Any) -> None:
        closing = self._closers.submit(conn.close, graceful=True)
        closing.add_done_callback(lambda _: self.method_queue.defer(self._closed))

    def _closed(self) -> None:
        self.nr_conns -= 1
