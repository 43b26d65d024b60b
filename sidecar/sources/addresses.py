"""Addresses of the agent's network namespace, by the kernel's rtnetlink interface.

Source: rtnetlink(7); include/uapi/linux/if_addr.h (ifaddrmsg, IFA_LOCAL, IFA_ADDRESS).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

from sidecar.sources.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
_MESSAGE = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")


class InterfaceAddress(NamedTuple):
    """One address and the index of the device that has it."""

    address: str
    device: int


def addresses() -> list[InterfaceAddress]:
    """Returns all addresses of the namespace, IPv4 and IPv6, loopback's included.

    Raises:
        SourceError: netlink is denied or did not answer.
    """
    try:
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        ) as netlink:
            netlink.settimeout(2)
            netlink.bind((0, 0))
            size = _HEADER.size + _MESSAGE.size
            header = _HEADER.pack(size, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0)
            netlink.send(header + _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
            return list(_answers(netlink))
    except OSError as e:
        raise SourceError(f"rtnetlink: {e.strerror or e}") from e


def reachable(found: list[InterfaceAddress]) -> list[str]:
    """Returns the addresses by which peers may know the pod.

    Loopback's are left out, and link-local ones unless there is nothing else.
    """
    parsed = {entry.address: ipaddress.ip_address(entry.address) for entry in found}
    outside = [text for text, ip in parsed.items() if not ip.is_loopback]
    return [text for text in outside if not parsed[text].is_link_local] or outside


def _answers(netlink: socket.socket) -> Iterator[InterfaceAddress]:
    while True:
        data = netlink.recv(1 << 16)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind = _HEADER.unpack_from(data, at)[:2]
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                raise OSError(code, errno.errorcode.get(code, "error"))
            if length < _HEADER.size:
                break
            if kind == _RTM_NEWADDR:
                yield from parse_address(data[at + _HEADER.size : at + length])
            at += (length + 3) & ~3


def parse_address(message: bytes) -> Iterator[InterfaceAddress]:
    """Yields the address of one RTM_NEWADDR message: an ifaddrmsg and attributes.

    The local address counts; on a point-to-point device IFA_ADDRESS is the other end's.
    """
    if len(message) < _MESSAGE.size:
        return
    family, _, _, _, index = _MESSAGE.unpack_from(message)
    size = {socket.AF_INET: 4, socket.AF_INET6: 16}.get(family)
    found: dict[int, bytes] = {}
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = message[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    raw = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if raw is not None and len(raw) == size:
        yield InterfaceAddress(socket.inet_ntop(family, raw), index)
