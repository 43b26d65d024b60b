"""TCP sockets of the agent's network namespace, by the kernel's sock_diag netlink interface.

Source: sock_diag(7); include/uapi/linux/inet_diag.h (inet_diag_req_v2, inet_diag_msg),
include/uapi/linux/tcp.h (struct tcp_info), net/core/sock_diag.c (destroy groups).
"""

from __future__ import annotations

import errno
import socket
import struct
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from sidecar.sources.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

ESTABLISHED, LISTEN, TIME_WAIT = 1, 10, 6
STATES = {
    1: "established",
    2: "syn_sent",
    3: "syn_recv",
    4: "fin_wait1",
    5: "fin_wait2",
    6: "time_wait",
    7: "close",
    8: "close_wait",
    9: "last_ack",
    10: "listen",
    11: "closing",
    12: "new_syn_recv",
}
"""Names of include/net/tcp_states.h."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST_DUMP = 0x301
_INFO = 2
_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP = 270, 1
_DESTROY_GROUPS = (1, 3)  # SKNLGRP_INET_TCP_DESTROY, SKNLGRP_INET6_TCP_DESTROY
_SO_RCVBUFFORCE = 33
_ALL_BUT_TIME_WAIT = 0xFFF & ~(1 << TIME_WAIT)

_HEADER = struct.Struct("=IHHII")
_LENGTH_AND_KIND = struct.Struct("=IH")
_MESSAGE_FORM = "=16xBB2x4s16s16s4xQ4xIIxxxxI"
_ATTRIBUTE = struct.Struct("=HH")
_DONE = _HEADER.size + 4
_BODY = struct.calcsize(_MESSAGE_FORM)
_RTT = struct.Struct("=I")

SOCKET_LIMIT = 65536
"""Sockets read in one dump; a namespace with more is served by its first ones."""


class TcpSocket(NamedTuple):
    """One socket as the kernel tells it.

    Attributes:
        family: AF_INET or AF_INET6.
        state: a key of STATES.
        ports: local and remote port, two bytes each in network order.
        local: address in network order, 16 bytes; an IPv4 address is the first four.
        remote: same.
        cookie: the kernel's number for the socket, never used twice.
        receive_queue: bytes not yet read; of a listener: connections to accept.
        send_queue: bytes not yet acknowledged; of a listener: its backlog.
        inode: 0 while no process holds the socket.
        info: struct tcp_info as long as this kernel has it; empty for a listener.
    """

    family: int
    state: int
    ports: bytes
    local: bytes
    remote: bytes
    cookie: int
    receive_queue: int
    send_queue: int
    inode: int
    info: bytes

    @property
    def key(self) -> bytes:
        """Ports and addresses, 36 bytes: names the connection within its namespace."""
        return self.ports + self.local + self.remote


_socket = partial(tuple.__new__, TcpSocket)
"""A NamedTuple's own constructor costs as much as the rest of reading a socket."""


def smoothed_rtt(info: bytes) -> int:
    """Returns tcpi_rtt in microseconds, 0 before the first sample."""
    return int(_RTT.unpack_from(info, 68)[0]) if len(info) >= 72 else 0


def address(family: int, raw: bytes) -> str:
    """Returns the address as text; an IPv4-mapped one as IPv4."""
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[:4])
    if raw[:12] == b"\0" * 10 + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)


class SockDiag:
    """Dumps all TCP sockets but those in TIME-WAIT, and hears of closed ones.

    Attributes:
        overruns: times that more connections closed between two calls than the kernel keeps.
    """

    def __init__(self) -> None:
        self._requests: socket.socket | None = None
        self._closings: socket.socket | None = None
        self._buffer = bytearray(1 << 16)
        self._sequence = 0
        self.overruns = 0

    def close(self) -> None:
        """Closes the netlink sockets."""
        for each in (self._requests, self._closings):
            if each is not None:
                each.close()
        self._requests = self._closings = None

    def sockets(self) -> list[TcpSocket]:
        """Returns the namespace's sockets, IPv4 and IPv6.

        Raises:
            SourceError: the kernel has no sock_diag, refused or did not answer.
        """
        requests = self._requests or self._connect()
        found: list[TcpSocket] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                self._dump(requests, family, found)
            except OSError as e:
                # A kernel without IPv6 has none of its sockets either.
                if family == socket.AF_INET6 and e.errno in {errno.ENOENT, errno.EAFNOSUPPORT}:
                    continue
                raise SourceError(f"sock_diag: {e.strerror or e}") from e
        return found

    def closed(self) -> Iterator[TcpSocket]:
        """Yields the sockets closed since the last call with their final counters."""
        while self._closings is not None:
            try:
                size = self._closings.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise SourceError(f"sock_diag closings: {e.strerror}") from e
                self.overruns += 1
                continue
            yield from _messages(self._buffer, size, {})

    def _connect(self) -> socket.socket:
        try:
            requests, closings = _netlink(), _netlink()
        except OSError as e:
            raise SourceError(f"netlink sock_diag: {e.strerror}") from e
        requests.settimeout(2)
        try:
            for group in _DESTROY_GROUPS:
                closings.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, group)
            closings.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 2 << 20)
            self._closings = closings
        except OSError:
            closings.close()
        self._requests = requests
        return requests

    def _dump(self, requests: socket.socket, family: int, found: list[TcpSocket]) -> None:
        self._sequence += 1
        request = struct.pack(
            "=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ALL_BUT_TIME_WAIT
        )
        size = _HEADER.size + len(request)
        header = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, self._sequence, 0)
        requests.send(header + request)
        layouts: dict[int, _Layout] = {}
        while True:
            size = requests.recv_into(self._buffer)
            kind, _, sequence = _HEADER.unpack_from(self._buffer)[1:4]
            if sequence != self._sequence:
                continue  # the rest of a dump that was given up
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", self._buffer, _HEADER.size)[0]
                raise OSError(code, errno.errorcode.get(code, "error"))
            if len(found) < SOCKET_LIMIT:
                found.extend(_messages(self._buffer, size, layouts))
            if _HEADER.unpack_from(self._buffer, size - _DONE)[:2] == (_DONE, _NLMSG_DONE):
                return


def _netlink() -> socket.socket:
    made = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    )
    made.bind((0, 0))
    return made


def _messages(buffer: bytearray, size: int, layouts: dict[int, _Layout]) -> Iterator[TcpSocket]:
    """Yields the sockets of one datagram; those of one layout in a row are read at once.

    Args:
        buffer: holds the datagram.
        size: its length in bytes.
        layouts: of messages by their length; most sockets of a namespace share one, so that the
            attributes need no walk.
    """
    at = 0
    while at + _BODY <= size:
        length, kind = _LENGTH_AND_KIND.unpack_from(buffer, at)
        step = (length + 3) & ~3
        if length < _HEADER.size:
            return
        alike = 1
        if kind == _SOCK_DIAG_BY_FAMILY and length >= _BODY and step <= size - at:
            row = memoryview(buffer)[at : size - (size - at) % step]
            layout = layouts.get(length)
            if layout is None or layout.head.unpack_from(row) != layout.heads:
                layout = layouts[length] = _layout(buffer, at, length)
            heads = layout.head.iter_unpack(row)
            alike = sum(1 for _ in takewhile(layout.heads.__eq__, heads)) or 1
            yield from map(_socket, islice(layout.form.iter_unpack(row), alike))
        at += alike * step


class _Layout(NamedTuple):
    """Where messages have what: `form` reads a TcpSocket of those of which `head` reads `heads`."""

    form: struct.Struct
    head: struct.Struct
    heads: tuple[object, ...]


def _layout(buffer: bytearray, message: int, length: int) -> _Layout:
    offset, span = _find_info(buffer, message, message + length)
    step = (length + 3) & ~3
    if not span:  # no head can tell it from one that has the attribute: read alone
        form = struct.Struct(f"{_MESSAGE_FORM}0s{step - _BODY}x")
        return _Layout(form, struct.Struct(f"={step}x"), (None,))
    after = step - offset - span
    form = struct.Struct(f"{_MESSAGE_FORM}{offset + 4 - _BODY}x{span - 4}s{after}x")
    head = struct.Struct(f"=IH{offset - 6}xHH{step - offset - 4}x")
    return _Layout(form, head, (length, _SOCK_DIAG_BY_FAMILY, span, _INFO))


def _find_info(buffer: bytearray, message: int, end: int) -> tuple[int, int]:
    at = message + _BODY
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(buffer, at)
        if kind == _INFO and _ATTRIBUTE.size <= length <= end - at:
            return at - message, length
        if length < _ATTRIBUTE.size:
            break
        at += (length + 3) & ~3
    return 0, 0
