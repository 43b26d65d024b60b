"""Reads small kernel files whole, the cheap way."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

from sidecar.sources.errors import ExhaustedError

CHUNK = 1 << 16
SMALL = 1 << 12


def read(path: str, *, limit: int = 1 << 20) -> bytes:
    """Returns the file's content, at most `limit` bytes.

    A file of several records (mountinfo, numa_maps, net/dev) is told a page at a time, so that
    only an empty answer is its end (fs/seq_file.c).

    Raises:
        OSError: it cannot be opened or read; a process that ends meanwhile is ESRCH.
        ExhaustedError: no descriptor is left.
    """
    return _read(path, limit, one_record=False)


def read_record(path: str) -> bytes:
    """Returns the content of a file that the kernel tells at once, such as /proc/<pid>/stat.

    Saves the second call that finds the end of any other file.

    Raises:
        OSError: as `read`.
    """
    return _read(path, 1 << 20, one_record=True)


def names(folder: str) -> list[str]:
    """Returns what is in a folder.

    Raises:
        OSError: it cannot be listed.
        ExhaustedError: no descriptor is left.
    """
    try:
        return os.listdir(folder)
    except OSError as e:
        _raise(e)


def _raise(error: OSError) -> NoReturn:
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        raise ExhaustedError(f"{error.filename}: {error.strerror}") from error
    raise error


def _read(path: str, limit: int, *, one_record: bool) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        _raise(e)
    try:
        data = os.read(descriptor, min(SMALL, limit))
        if one_record and len(data) < SMALL:
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
