"""Measures a TCP connection between two pods by its own means, on the standard library alone.

``serve`` echoes short messages, and answers a long one with its digest. ``ask HOST PINGS BYTES``
prints a JSON object: the shortest and the median round trip of the messages (seconds), and, of
one long message, segments sent and sent again (TCP_INFO), bits a second, and ``intact``.
"""

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import time
from statistics import median

PORT = 7007
HEADER = struct.Struct("!I")
TCP_INFO_SIZE = 192
TOTAL_RETRANS = 100  # struct tcp_info, include/uapi/linux/tcp.h
DATA_SEGS_OUT = 156


def read(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(1 << 20, size - len(parts)))
        if not part:
            raise ConnectionError
        parts += part
    return bytes(parts)


def serve() -> None:
    with socket.create_server(("", PORT)) as listener:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock, contextlib.suppress(OSError):
                while True:
                    (size,) = HEADER.unpack(read(sock, HEADER.size))
                    sock.sendall(hashlib.sha256(read(sock, size)).digest())


def ask(host: str, pings: int, size: int) -> dict[str, float]:
    with socket.create_connection((host, PORT), timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(pings):
            start = time.monotonic()
            sock.sendall(HEADER.pack(1) + b"x")
            read(sock, 32)
            trips.append(time.monotonic() - start)
        answer = {"shortest": min(trips), "median": median(trips)}
        if size:
            data = os.urandom(size)
            start = time.monotonic()
            sock.sendall(HEADER.pack(size) + data)
            intact = read(sock, 32) == hashlib.sha256(data).digest()
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)
            answer |= {
                "bits_per_second": 8 * size / (time.monotonic() - start),
                "intact": intact,
                "again": struct.unpack_from("I", info, TOTAL_RETRANS)[0],
                "segments": struct.unpack_from("I", info, DATA_SEGS_OUT)[0],
            }
        return answer


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
