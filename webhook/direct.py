"""A review straight from the bytes of its request to those of its answer.

An API server always writes the same few header fields. Where nothing else is said, gunicorn and
Flask have nothing to decide, and take three times as long as the review. Every other request is
theirs.
"""

from __future__ import annotations

import functools
import re
import time
from http import HTTPStatus
from typing import NamedTuple

from gunicorn.util import http_date

SMALL = 64 * 1024
"""Bytes of a body at most: a larger one would hold up those behind it."""
_MOST = 2048
"""Bytes of a head at most: heads are remembered."""
_END = b"\r\n\r\n"
_VERSION = b"HTTP/1.1"
_KNOWN = frozenset(
    b"host user-agent accept accept-encoding authorization content-type content-length"
    b" traceparent tracestate".split()
)
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""What no line may hold (RFC 9110, 5.5); for some readers a line feed alone ends one."""
_UNUSUAL = ("", 0)
_OK = f"HTTP/1.1 {HTTPStatus.OK.value} {HTTPStatus.OK.phrase}\r\n"


class Post(NamedTuple):
    """A POST that says nothing unusual.

    Attributes:
        path: Without the query.
        body: All of it.
    """

    path: str
    body: bytes


def post(data: bytes) -> Post | None:
    """Reads a request.

    Args:
        data: What has arrived.

    Returns:
        None where it is not one whole request, or not of the kind that an API server sends.
    """
    end = data.find(_END)
    if not 0 < end <= _MOST:
        return None
    start = end + len(_END)
    path, length = _head(data[:end])
    return Post(path, data[start:]) if path and len(data) - start == length else None


def begun(data: bytes) -> bool:
    """Whether more can make it a request that ``post`` reads."""
    end = data.find(_END)
    if end < 0:
        return len(data) < _MOST + len(_END)
    if not 0 < end <= _MOST:
        return False
    path, length = _head(data[:end])
    return bool(path) and len(data) - end - len(_END) < length


@functools.lru_cache(maxsize=256)
def _head(head: bytes) -> tuple[str, int]:
    """Path and length of the body; no path where anything is unusual.

    An API server's heads differ in the length alone, and a job's pods are about as long as one
    another: most have been read before.
    """
    first, *lines = head.split(b"\r\n")
    method, _, rest = first.partition(b" ")
    target, _, version = rest.partition(b" ")
    if method != b"POST" or version != _VERSION or not target.isascii():
        return _UNUSUAL
    if b"\t" in target or _CONTROLS.search(head.replace(b"\r\n", b"")):
        return _UNUSUAL
    fields = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        fields[name.lower()] = value
        if not colon:
            return _UNUSUAL
    length = fields.get(b"content-length", b"").strip(b" ")
    # A field that is given twice is one too few here; isdigit knows ASCII's alone in bytes.
    if len(fields) != len(lines) or not fields.keys() <= _KNOWN or b"host" not in fields:
        return _UNUSUAL
    if not 0 < len(length) < 6 or not length.isdigit() or int(length) > SMALL:
        return _UNUSUAL
    return target.partition(b"?")[0].decode(), int(length)


def answer(body: bytes) -> bytes:
    """The response with a JSON body, as one piece: each write wakes the client up."""
    return b"%s%d\r\n\r\n%s" % (_answer_head(int(time.time())), len(body), body)


@functools.lru_cache(maxsize=1)
def _answer_head(now: int) -> bytes:
    return (
        f"{_OK}Date: {http_date(now)}\r\nConnection: keep-alive\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()
