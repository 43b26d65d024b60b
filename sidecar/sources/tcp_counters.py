"""The counters of struct tcp_info, all of a socket's in one integer.

A socket's counters are cut out of the kernel's record as one number, each in a lane of its own:
one subtraction then tells what all of them grew by, and one addition sums them up. That is what
makes ten thousand busy sockets affordable twice a second.

Source: include/uapi/linux/tcp.h of the Linux kernel.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class TcpCounters(NamedTuple):
    """What sockets counted in their lives.

    Attributes:
        retransmitted_segments: tcpi_total_retrans, 32 bits wide in the kernel.
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

_BEGIN, _END = 100, 216
_LANES = struct.Struct("<Q12xQQ20xQ4xQQQ16xQ")
"""Where the counters lie from _BEGIN on. What lies between them is masked out, so that the two of
32 bits have room to grow in sums."""
_NARROW = TcpCounters(32, 64, 64, 32, 64, 64, 64, 64)
_MASK = int.from_bytes(_LANES.pack(*((1 << bits) - 1 for bits in _NARROW)), "little")
_GUARDS = int.from_bytes(_LANES.pack(*(1 << min(bits, 63) for bits in _NARROW)), "little")
"""A bit above each counter, from which a lane that fell borrows instead of from its neighbour."""
_LANE = (1 << 64) - 1


def vector(info: bytes) -> int:
    """Returns the counters of a struct tcp_info; missing ones read as 0 (see COUNTERS_SINCE)."""
    return int.from_bytes(info[_BEGIN:_END], "little") & _MASK


def unpack(vector: int) -> TcpCounters:
    """Returns the counters of a vector, or of a sum of vectors."""
    return TcpCounters._make(_LANES.unpack(vector.to_bytes(_LANES.size, "little")))


def pack(counters: TcpCounters) -> int:
    """Returns a vector."""
    return int.from_bytes(_LANES.pack(*counters), "little")


def moved(vector: int) -> int:
    """Returns the bytes delivered and received."""
    return (vector >> 160 & _LANE) + (vector >> 224 & _LANE)


def growth(new: int, old: int) -> int:
    """Returns what was counted between two vectors of one socket; counters of 32 bits wrap.

    A socket that was disconnected to be connected again begins anew: all of `new` is growth then.
    """
    grown = (new | _GUARDS) - old
    if grown & _GUARDS == _GUARDS:
        return grown ^ _GUARDS
    changes = [
        change % (1 << 32) if bits == 32 else change
        for change, bits in zip(
            (a - b for a, b in zip(unpack(new), unpack(old), strict=True)), _NARROW, strict=True
        )
    ]
    restarted = any(
        change < 0 or (bits == 32 and change >= 1 << 31)
        for change, bits in zip(changes, _NARROW, strict=True)
    )
    return new if restarted else pack(TcpCounters._make(changes))
