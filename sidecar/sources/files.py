"""Reads small kernel files whole, the cheap way."""

from __future__ import annotations

import os

CHUNK = 1 << 16
SMALL = 1 << 12


def read(path: str, *, limit: int = 1 << 20) -> bytes:
    """Returns the file's content, at most `limit` bytes.

    Raises:
        OSError: it cannot be opened or read; a process that ends meanwhile is ESRCH.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = os.read(descriptor, min(SMALL, limit))
        if len(data) < SMALL:
            return data
        parts = [data]
        size = len(data)
        while data and size < limit:
            data = os.read(descriptor, min(CHUNK, limit - size))
            parts.append(data)
            size += len(data)
        return b"".join(parts)
    finally:
        os.close(descriptor)
