"""Decodes a PNG: 8 bits a channel, RGB or RGBA, not interlaced, as browsers write them.

Format: https://www.w3.org/TR/png/, sections 5 and 9.
"""

import struct
import zlib
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Image:
    """Rows of bytes, `channels` a pixel."""

    width: int
    height: int
    channels: int
    rows: list[bytes]

    def colours(self, every: int = 1) -> Counter[tuple[int, int, int]]:
        """Return how often each colour is there, in every so manyth row."""
        found: Counter[tuple[int, int, int]] = Counter()
        for row in self.rows[::every]:
            n = self.channels
            found.update(zip(row[0::n], row[1::n], row[2::n], strict=True))
        return found


def decode(data: bytes) -> Image:
    """Return the picture."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, parts, header = 8, [], b""
    while place < len(data):
        (size,) = struct.unpack_from(">I", data, place)
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        place += 12 + size
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            parts.append(body)
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[colour]
    return Image(
        width, height, channels, _rows(zlib.decompress(b"".join(parts)), width, height, channels)
    )


def _rows(raw: bytes, width: int, height: int, channels: int) -> list[bytes]:
    size = width * channels
    before, rows = bytearray(size), []
    for number in range(height):
        start = number * (size + 1)
        row = bytearray(raw[start + 1 : start + 1 + size])
        if raw[start] == 2:  # most rows of a page
            row = bytearray((here + up) & 255 for here, up in zip(row, before, strict=True))
        else:
            _unfilter(raw[start], row, before, channels)
        rows.append(bytes(row))
        before = row
    return rows


def _unfilter(kind: int, row: bytearray, above: bytearray, n: int) -> None:
    for place in range(len(row)) if kind else ():
        left = row[place - n] if place >= n else 0
        up = above[place]
        corner = above[place - n] if place >= n else 0
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up) // 2
        else:
            middle = left + up - corner
            guess = min((left, up, corner), key=lambda value: abs(middle - value))
        row[place] = (row[place] + guess) & 255
