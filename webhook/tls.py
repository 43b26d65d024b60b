"""The server's TLS context, built anew when its files change."""

from __future__ import annotations

import logging
import math
import os
import ssl
import threading
import time

log = logging.getLogger("kitty.webhook")

STALLED = 3.0
"""Seconds that a client has for its handshake, and for each request, before it loses its thread."""

Stamp = tuple[tuple[int, int, int], ...]


class _BoundedSocket(ssl.SSLSocket):
    """A socket that never blocks for ever, and never for long in all.

    SO_RCVTIMEO would not do: a blocking SSLSocket tries again when it strikes. A timeout of each
    read alone would not either: a client that sends a byte now and then never meets it.

    The timeout of the socket is set once and then left alone: each change lets another thread
    have the interpreter, and gunicorn makes five of them in a request.
    """

    _deadline = math.inf
    """When the request must have arrived; none while nothing is served."""

    def settimeout(self, value: float | None) -> None:
        if self._deadline == math.inf:
            super().settimeout(STALLED if value is None else value)

    def setblocking(self, flag: bool) -> None:
        """The worker calls it as it begins to serve the connection: the clock starts."""
        if self.gettimeout() != STALLED:
            super().settimeout(STALLED)
        self._deadline = time.monotonic() + STALLED if flag else math.inf

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receives what is there by the deadline.

        Raises:
            TimeoutError: There was nothing.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        if left > STALLED * 0.9:  # what is served at once pays for no timeout of its own
            return super().recv(buflen, flags)
        super().settimeout(left)
        try:
            return super().recv(buflen, flags)
        finally:
            super().settimeout(STALLED)


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
        context.sslsocket_class = _BoundedSocket
        # Without a password OpenSSL would ask for one on the terminal and wait.
        context.load_cert_chain(self._certificate, self._key, password="")
        self._context, self._stamp = context, stamp
        return context
