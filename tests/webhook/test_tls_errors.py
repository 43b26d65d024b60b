"""Errors of one TLS connection and of the next."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from webhook.tls import BoundedSocket, ReloadingContext

if TYPE_CHECKING:
    from tests.webhook.support import Files


def test_a_broken_connection_is_not_told_to_the_next_one_of_the_thread(
    tls: Files, client_context: ssl.SSLContext
) -> None:
    context = ReloadingContext(str(tls.cert), str(tls.key)).current()
    with contextlib.ExitStack() as stack:

        def pair() -> tuple[ssl.SSLSocket, BoundedSocket]:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            plain = socket.create_connection(listener.getsockname(), 20)
            accepted = listener.accept()[0]
            with ThreadPoolExecutor(1) as pool:
                wrap = partial(client_context.wrap_socket, server_hostname="localhost")
                shaking = pool.submit(wrap, plain)
                served = context.wrap_socket(
                    accepted, server_side=True, do_handshake_on_connect=False
                )
                served.do_handshake()
                client = stack.enter_context(shaking.result())
            assert isinstance(served, BoundedSocket)
            return client, stack.enter_context(served)

        (gone, broken), (_, waiting) = pair(), pair()
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()  # by a reset
        assert broken.soon(time.monotonic() + 20)
        with contextlib.suppress(ConnectionResetError):  # Python 3.11 calls it an end
            assert broken.arrived(1) == b""
        assert waiting.arrived(1) is None
        with pytest.raises((BrokenPipeError, ssl.SSLEOFError)):
            broken.send(b"x")
        assert waiting.arrived(1) is None
