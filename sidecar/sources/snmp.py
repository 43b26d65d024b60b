"""Parsers of a network namespace's TCP totals: /proc/<pid>/net/snmp.

Source: net/ipv4/proc.c; meaning: RFC 4022 (RetransSegs, OutSegs) and RFC 1213.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.sources.errors import MalformedError


@dataclass(frozen=True, slots=True)
class TcpTotals:
    """TCP segments and connections of one network namespace since it was made."""

    out_segments: int
    retransmitted_segments: int
    active_opens: int
    passive_opens: int


def parse_snmp(data: bytes) -> TcpTotals:
    """Parses the two Tcp lines of net/snmp: names, then values.

    `OutSegs` leaves retransmitted segments out.

    Raises:
        MalformedError: a line or a name is missing.
    """
    lines = [line.split() for line in data.splitlines() if line.startswith(b"Tcp:")]
    try:
        names, values = lines
        row = dict(zip(names[1:], (int(value) for value in values[1:]), strict=True))
        return TcpTotals(
            out_segments=row[b"OutSegs"],
            retransmitted_segments=row[b"RetransSegs"],
            active_opens=row[b"ActiveOpens"],
            passive_opens=row[b"PassiveOpens"],
        )
    except (ValueError, KeyError) as e:
        raise MalformedError(f"net/snmp: {data[:80]!r}") from e
