"""Traffic for the scenarios: `traffic.py serve ADDRESS PORT`, `traffic.py ping ADDRESS PORT`.

`ping` keeps four connections busy with small requests; while the file named by BULK exists it
also sends as fast as it can.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

CONNECTIONS = 4
PAUSE = 0.02


def serve(address: str, port: int) -> None:
    """Echoes one byte for each kilobyte, for as many connections as come."""
    with socket.create_server((address, port)) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def ping(address: str, port: int) -> None:
    """Asks for ever."""
    for _ in range(CONNECTIONS):
        threading.Thread(target=_ask, args=(address, port), daemon=True).start()
    bulk = os.environ.get("BULK", "")
    connection: socket.socket | None = None
    while True:
        if bulk and os.path.exists(bulk):
            connection = connection or socket.create_connection((address, port))
            connection.sendall(bytes(1 << 16))
        elif connection is not None:
            connection.close()
            connection = None
        else:
            time.sleep(0.05)


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while data := connection.recv(1 << 16):
            if len(data) <= 1000:
                connection.sendall(b".")


def _ask(address: str, port: int) -> None:
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            connection.sendall(bytes(1000))
            connection.recv(1 << 16)
            time.sleep(PAUSE)


if __name__ == "__main__":
    {"serve": serve, "ping": ping}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
