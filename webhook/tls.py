"""The server's TLS context, built anew when its files change."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

    from webhook.threads import Threads

log = logging.getLogger("kitty.webhook")

STALLED = 3.0
"""Seconds that a client has for its handshake, for each request, and to take the answer."""
SHORT = 0.02
"""Seconds after which a thread that waits for a client is replaced."""
CROWDED = 0.25
"""Seconds that a client may keep a thread waiting while others are waiting for a thread."""

Stamp = tuple[tuple[int, int, int], ...]


class Waiting:
    """The clients that keep a thread waiting, oldest first.

    Attributes:
        threads: Whose they are.
    """

    threads: Threads | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[BoundedSocket, float] = {}

    def wait(self, client: BoundedSocket, event: int, deadline: float) -> None:
        """Waits until the client is ready.

        Raises:
            TimeoutError: It is not by the deadline.
        """
        poll = select.poll()
        poll.register(client, event)
        # Nearly all are ready in a moment, for which nobody needs to take the thread's place.
        if poll.poll(SHORT * 1000):
            return
        with self._lock:
            self._since[client] = time.monotonic()
        try:
            left = min(deadline - time.monotonic(), STALLED)
            with self.threads.lent() if self.threads else contextlib.nullcontext():
                ready = left > 0 and poll.poll(left * 1000)
        finally:
            with self._lock:
                self._since.pop(client, None)
        if not ready:
            raise TimeoutError("the client took too long")

    def make_room(self, places: int) -> None:
        """Hangs up on as many of the clients that have waited longest."""
        before = time.monotonic() - CROWDED
        with self._lock:
            late = [client for client, since in self._since.items() if since < before][:places]
            for client in late:
                del self._since[client]
                client.hang_up()


WAITING = Waiting()


_UNUSED = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def forget_errors() -> None:
    """Empties the thread's queue of OpenSSL's errors.

    Python 3.13 leaves a system error in it (``PySSL_SetError``, Modules/_ssl.c): the thread's next
    connection would be told that it is broken when it only has to wait.
    """
    with contextlib.suppress(ssl.SSLError):
        _UNUSED.set_ciphers("none")  # refused, upon which Python clears the queue


class BoundedSocket(ssl.SSLSocket):
    """A socket that never blocks for ever, and never for long in all.

    SO_RCVTIMEO would not do: a blocking SSLSocket tries again when it strikes. A timeout of each
    read alone would not either: a client that sends a byte now and then never meets it. So the
    socket itself never blocks, whatever gunicorn sets, and the waiting is done here.
    """

    _deadline = math.inf
    """When the request must have arrived; none while nothing is served."""

    def settimeout(self, value: float | None) -> None:
        """Leaves the socket without one: each change lets another thread have the interpreter."""
        del value
        if self.gettimeout() != 0.0:
            super().settimeout(0.0)

    def setblocking(self, flag: bool) -> None:
        """The worker calls it as it begins to serve the connection: the clock starts."""
        self.settimeout(0.0)
        self._deadline = time.monotonic() + STALLED if flag else math.inf

    def do_handshake(self, block: bool = False) -> None:
        """Shakes hands within the time that a client has."""
        del block
        deadline = time.monotonic() + STALLED
        while True:
            try:
                return super().do_handshake()
            except ssl.SSLWantReadError:
                WAITING.wait(self, select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                WAITING.wait(self, select.POLLOUT, deadline)
            except OSError:
                forget_errors()
                raise

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receives what is there by the deadline.

        Raises:
            TimeoutError: There was nothing.
        """
        while time.monotonic() < self._deadline:
            try:
                return super().recv(buflen, flags)
            except (ssl.SSLWantReadError, BlockingIOError):
                WAITING.wait(self, select.POLLIN, self._deadline)
            except ssl.SSLWantWriteError:
                WAITING.wait(self, select.POLLOUT, self._deadline)
            except OSError:
                forget_errors()
                raise
        raise TimeoutError("the request took too long to arrive")

    def arrived(self, buflen: int) -> bytes | None:
        """Receives without waiting: empty where the stream has ended, None where nothing came.

        Raises:
            OSError: There is nothing to come; or TLS has to write first, which may take waiting.
        """
        try:
            return super().recv(buflen)
        except (ssl.SSLWantReadError, BlockingIOError):
            return None
        except OSError:
            forget_errors()
            raise

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Sends what the socket takes at once."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            raise
        except OSError:
            forget_errors()
            raise

    def soon(self, deadline: float) -> bool:
        """Whether something arrives by the deadline; past it, whether something is there."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def taken(self, data: bytes) -> int:
        """Sends without waiting; how many bytes."""
        try:
            return self.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return 0

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """Sends all of it, or fails when the client does not take it in time.

        Raises:
            TimeoutError: It did not.
        """
        left = memoryview(data).cast("B")
        deadline = time.monotonic() + STALLED
        while left:
            try:
                left = left[self.send(left, flags) :]
            except (ssl.SSLWantWriteError, BlockingIOError):
                WAITING.wait(self, select.POLLOUT, deadline)
            except ssl.SSLWantReadError:
                WAITING.wait(self, select.POLLIN, deadline)

    def hang_up(self) -> None:
        """Ends the connection under the thread that waits for it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self, socket.SHUT_RDWR)


class ReloadingContext:
    """A TLS context of two files that someone else may replace at any time.

    New connections get the new certificate; those that are open go on. Files that do not fit each
    other, as seen half-way through a replacement, leave the last good pair in place.

    Args:
        certificate: Path of the chain, PEM.
        key: Path of the private key, PEM; may be the same file.
    """

    def __init__(self, certificate: str, key: str) -> None:
        self._certificate = certificate
        self._key = key
        self._lock = threading.Lock()
        self._stamp: Stamp | None = None
        self._context: ssl.SSLContext | None = None

    def current(self) -> ssl.SSLContext:
        """The context of the files as they are now, or of the last good pair.

        Raises:
            OSError: There never was a good pair (ssl.SSLError is one of these).
        """
        try:
            stamp = self._look()
            if stamp == self._stamp and self._context:
                return self._context
            with self._lock:
                return self._load(stamp)
        except OSError as error:
            if self._context is None:
                raise
            log.warning("the certificate on disk cannot be used, the last one stays: %s", error)
            return self._context

    def _look(self) -> Stamp:
        stats = (os.stat(self._certificate), os.stat(self._key))
        return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in stats)

    def _load(self, stamp: Stamp) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = BoundedSocket
        # Without a password OpenSSL would ask for one on the terminal and wait.
        context.load_cert_chain(self._certificate, self._key, password="")
        self._context, self._stamp = context, stamp
        return context
