"""Parser of a network namespace's devices: /proc/<pid>/net/dev.

Source: net/core/net-procfs.c.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """What one network device counted since it was made."""

    received_bytes: int
    received_packets: int
    received_errors: int
    received_drops: int
    transmitted_bytes: int
    transmitted_packets: int
    transmitted_errors: int
    transmitted_drops: int


def of_the_machine(proc: str = "/proc") -> bool:
    """Tells whether the reader's network namespace is the machine's own (hostNetwork).

    Only that one has the row of the network core's budget (net/core/sysctl_net_core.c).
    """
    return os.path.exists(f"{proc}/sys/net/core/netdev_budget")


def parse_devices(data: bytes) -> dict[str, DeviceTotals]:
    """Parses net/dev, in the order of the file.

    Sample row: `  eth0: 942817723 26037 0 0 0 0 0 0 1616783 15223 0 0 0 0 0 0`: bytes, packets,
    errors, drops and four more received, then the same sent. Rows of another form are ignored.
    """
    found = {}
    for line in data.splitlines():
        name, colon, row = line.rpartition(b":")
        fields = row.split()
        if not colon or len(fields) < 12 or not all(_decimal(field) for field in fields[:12]):
            continue
        numbers = [int(field) for field in fields[:12]]
        found[name.strip().decode("utf-8", "replace")] = DeviceTotals(*numbers[:4], *numbers[8:12])
    return found


def _decimal(field: bytes) -> bool:
    return field.isdigit() and len(field) <= 20
