"""A review straight from the bytes of its request to those of its answer.

An API server always writes the same few header fields. Where nothing else is said, gunicorn and
Flask have nothing to decide, and take three times as long as the review. Every other request is
theirs.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

from gunicorn.util import http_date

SMALL = 64 * 1024
"""Bytes of a body at most: a larger one would hold up those behind it."""
_END = b"\r\n\r\n"
_VERSION = b"HTTP/1.1"
_KNOWN = frozenset(
    b"host user-agent accept accept-encoding authorization content-type content-length"
    b" traceparent tracestate".split()
)
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
    if end < 0:
        return None
    first, *lines = data[:end].split(b"\r\n")
    method, _, rest = first.partition(b" ")
    target, _, version = rest.partition(b" ")
    if method != b"POST" or version != _VERSION or not target.isascii():
        return None
    fields = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        fields[name.lower()] = value
        if not colon:
            return None
    length = fields.get(b"content-length", b"").strip(b" ")
    start = end + len(_END)
    # A field that is given twice is one too few here; isdigit knows ASCII's alone in bytes.
    if (
        len(fields) != len(lines)
        or not fields.keys() <= _KNOWN
        or not 0 < len(length) < 6
        or not length.isdigit()
    ):
        return None
    if b"host" not in fields or not len(data) - start == int(length) <= SMALL:
        return None
    return Post(target.partition(b"?")[0].decode(), data[start:])


def answer(body: bytes) -> bytes:
    """The response with a JSON body, as one piece: each write wakes the client up."""
    head = (
        f"{_OK}Date: {http_date()}\r\nConnection: keep-alive\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
