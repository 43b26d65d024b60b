"""Vectors of 64-bit counters as one integer: cheap to subtract, add and hand between threads.

A map value that is an array of u64 counters is read as one little-endian integer. Counters
only grow, so that one subtraction gives the growth of all of them without a borrow between
neighbours, and sums of growths stay within their lanes for as long as a 64-bit counter does.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_LANE = (1 << 64) - 1
SLACK = 256
"""Keys that are remembered beside those that the map has."""


def first(vector: int) -> int:
    """The first counter."""
    return vector & _LANE


def second(vector: int) -> int:
    """The second counter."""
    return vector >> 64 & _LANE


def unpack(vector: int, length: int) -> tuple[int, ...]:
    """All `length` counters."""
    return struct.unpack(f"<{length}Q", vector.to_bytes(8 * length, "little"))


@cache
def _guards(length: int) -> int:
    """The highest bit of every lane: a lane that fell borrows from it, not from its neighbour."""
    return int.from_bytes(struct.pack("<Q", 1 << 63) * -(-length // 8), "little")


class Ledger:
    """Turns totals into growth since they were last seen, for every key of a map."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[bytes, int]] = {}  # content, round of change
        self._round = 0

    def begin(self) -> None:
        """Starts a round of readings."""
        self._round += 1

    def grown(self, key: bytes, content: bytes) -> int:
        """What was added since the last round; 0 where nothing was.

        A counter that fell means that the map let the entry go and started anew.
        """
        content = content.rstrip(b"\0")  # most connections have few samples, in low lanes
        before = self._seen.get(key)
        if before is not None and before[0] == content:
            return 0
        self._seen[key] = (content, self._round)
        totals = int.from_bytes(content, "little")
        if before is None:
            return totals
        guards = _guards(max(len(content), len(before[0])))
        grown = (totals | guards) - int.from_bytes(before[0], "little")
        return grown ^ guards if grown & guards == guards else totals

    def end(self, there: Collection[bytes]) -> None:
        """Ends a round: forgets the keys that the map let go by itself, once they are many.

        Args:
            there: the keys that the map has.
        """
        if len(self._seen) > len(there) + SLACK:
            kept = set(there)
            self._seen = {key: seen for key, seen in self._seen.items() if key in kept}

    def forget(self, key: bytes) -> None:
        """Starts anew with a key, whose entry was taken out of the map."""
        self._seen.pop(key, None)

    def idle(self, rounds: int) -> list[bytes]:
        """Forgets, and returns, the keys that did not change for that many rounds."""
        last = self._round - rounds
        keys = [key for key, (_, changed) in self._seen.items() if changed < last]
        for key in keys:
            del self._seen[key]
        return keys
