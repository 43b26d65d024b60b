"""TCP sockets of the agent's network namespace, by the kernel's sock_diag netlink interface.

Source: sock_diag(7); include/uapi/linux/inet_diag.h (inet_diag_req_v2, inet_diag_msg),
include/uapi/linux/tcp.h (struct tcp_info), net/core/sock_diag.c (destroy groups).
"""

from __future__ import annotations

import errno
import socket
import struct
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
_COUNTERS = struct.Struct("=100xI16xQQ20xI8xQQQ16xQ")
_RTT = struct.Struct("=I")

_tuple = tuple.__new__  # a NamedTuple's own constructor costs as much as the rest of a socket

SOCKET_LIMIT = 65536
"""Sockets read in one dump; a namespace with more is served by its first ones."""


class TcpCounters(NamedTuple):
    """What one socket counted in its life; a field is None where the kernel is too old for it.

    Attributes:
        retransmitted_segments: tcpi_total_retrans, 32 bits wide.
        delivered_bytes: tcpi_bytes_acked.
        received_bytes: tcpi_bytes_received.
        sent_segments: tcpi_data_segs_out, segments with data, repeated ones too; 32 bits wide.
        busy: microseconds with data to send (tcpi_busy_time).
        receiver_limited: microseconds stopped by the peer's window (tcpi_rwnd_limited).
        buffer_limited: microseconds stopped by the send buffer (tcpi_sndbuf_limited).
        retransmitted_bytes: tcpi_bytes_retrans.
    """

    retransmitted_segments: int
    delivered_bytes: int
    received_bytes: int
    sent_segments: int
    busy: int
    receiver_limited: int
    buffer_limited: int
    retransmitted_bytes: int


COUNTERS_SINCE = {
    "retransmitted_segments": 104,
    "delivered_bytes": 128,
    "received_bytes": 136,
    "sent_segments": 160,
    "busy": 176,
    "receiver_limited": 184,
    "buffer_limited": 192,
    "retransmitted_bytes": 216,
}
"""Length that struct tcp_info must have to hold each counter."""


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


def counters(info: bytes) -> TcpCounters:
    """Reads the counters of a struct tcp_info; missing ones read as 0 (see COUNTERS_SINCE)."""
    if len(info) < _COUNTERS.size:
        info = info.ljust(_COUNTERS.size, b"\0")
    return TcpCounters._make(_COUNTERS.unpack_from(info))


def counter_bytes(info: bytes) -> bytes:
    """Returns the part of a struct tcp_info that changes whenever a counter does."""
    return info[100:216]


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

    @property
    def hears_closings(self) -> bool:
        """Whether the final counters of closed sockets arrive (needs CAP_NET_ADMIN)."""
        return self._closings is not None

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
    """Yields the sockets of one datagram.

    Args:
        buffer: holds the datagram.
        size: its length in bytes.
        layouts: of messages by their length; most sockets of a namespace share one, so that the
            attributes need no walk.
    """
    at = 0
    while at + _BODY <= size:
        length, kind = _LENGTH_AND_KIND.unpack_from(buffer, at)
        if length < _HEADER.size:
            return
        if kind == _SOCK_DIAG_BY_FAMILY and _BODY <= length <= size - at:
            layout = layouts.get(length)
            fields = layout.form.unpack_from(buffer, at) if layout else ()
            if layout is None or fields[-2] != layout.attribute:
                layout = layouts[length] = _layout(buffer, at, at + length)
                fields = layout.form.unpack_from(buffer, at)
            yield _tuple(TcpSocket, (*fields[:-2], fields[-1]))
        at += (length + 3) & ~3


class _Layout(NamedTuple):
    """Where a message has what: `form` reads a TcpSocket, the last but one is `attribute`."""

    form: struct.Struct
    attribute: bytes


def _layout(buffer: bytearray, message: int, end: int) -> _Layout:
    offset, span = _find_info(buffer, message, end)
    if not span:
        return _Layout(struct.Struct(f"{_MESSAGE_FORM}0s0s"), b"no struct tcp_info")
    form = struct.Struct(f"{_MESSAGE_FORM}{offset - _BODY}x4s{span - _ATTRIBUTE.size}s")
    return _Layout(form, _ATTRIBUTE.pack(span, _INFO))


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
