"""RDMA devices of the agent's network namespace: /sys/class/infiniband.

Sources: Documentation/ABI/stable/sysfs-class-infiniband; drivers/infiniband/hw/{mlx5,efa,irdma}
for hw_counters; drivers/infiniband/core/device.c for netns_mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.sources.files import names, read

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

WORD = 4
"""Bytes that port_xmit_data and port_rcv_data count in (InfiniBand 16.1.3.5), on Ethernet too."""
DIGITS = 20
"""Of the largest number of 64 bits."""
BYTES = (
    *("port_xmit_data", "port_rcv_data"),  # InfiniBand, mlx5
    *("tx_bytes", "rx_bytes"),  # EFA, MANA
    *("ip4OutOctets", "ip6OutOctets", "ip4InOctets", "ip6InOctets"),  # irdma
)
EVENTS = (
    # The port itself.
    *("symbol_error", "link_error_recovery", "link_downed", "local_link_integrity_errors"),
    *("port_rcv_errors", "port_xmit_discards", "port_xmit_wait"),
    # mlx5: lost or late packets, a slow receiver, congestion.
    *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "roce_adp_retrans"),
    *("rnr_nak_retry_err", "out_of_buffer", "req_cqe_error", "resp_cqe_error"),
    *("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"),
    # EFA.
    *("rx_drops", "retrans_pkts", "retrans_timeout_events"),
    *("impaired_remote_conn_events", "unresponsive_remote_events"),
    # irdma.
    *("tcpRetransSegs", "cnpHandled", "cnpSent", "RxECNMrkd", "ip4InDiscards"),
)
"""Counters that tell of trouble, by the names that drivers give them."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port as of one reading; a counter that the driver refuses is not in it.

    Attributes:
        device: such as mlx5_0.
        port: its number.
        counters: those of BYTES and EVENTS that it has, in `counters` or `hw_counters`.
    """

    device: str
    port: str
    counters: Mapping[str, int]

    @property
    def transmitted(self) -> int | None:
        """Bytes sent; None where the driver does not count them."""
        return self._bytes("port_xmit_data", "tx_bytes", "ip4OutOctets", "ip6OutOctets")

    @property
    def received(self) -> int | None:
        """Bytes received; None where the driver does not count them."""
        return self._bytes("port_rcv_data", "rx_bytes", "ip4InOctets", "ip6InOctets")

    def _bytes(self, words: str, efa: str, *irdma: str) -> int | None:
        if words in self.counters:
            return self.counters[words] * WORD
        if efa in self.counters:
            return self.counters[efa]
        octets = [self.counters[name] for name in irdma if name in self.counters]
        return sum(octets) if octets else None


class RdmaFS:
    """The RDMA devices below one /sys."""

    def __init__(self, sys: str = "/sys") -> None:
        self._sys = sys

    def devices(self) -> dict[str, str]:
        """Returns each device by the path of the file that gives processes access to it.

        Such as `/dev/infiniband/uverbs0`: `mlx5_0`. Empty where there is no RDMA.
        """
        folder = f"{self._sys}/class/infiniband_verbs"
        found = {}
        for name in _names(folder):
            try:
                device = read(f"{folder}/{name}/ibdev").decode("utf-8", "replace").strip()
            except OSError:
                continue
            found[f"/dev/infiniband/{name}"] = device
        return found

    def ports(self, devices: Collection[str]) -> list[RdmaPort]:
        """Returns the ports of these devices; one that fails takes no other with it."""
        folder = f"{self._sys}/class/infiniband"
        found = []
        for device in sorted(devices):
            # Counters of a device as a whole are rare and not about traffic.
            for port in _names(f"{folder}/{device}/ports"):
                counters = _counters(f"{folder}/{device}/ports/{port}")
                found.append(RdmaPort(device, port, counters))
        return found

    def shared(self) -> bool | None:
        """Returns whether every network namespace sees every device (`rdma system`).

        None where there is no RDMA.
        """
        try:
            text = read(f"{self._sys}/module/ib_core/parameters/netns_mode").strip()
        except OSError:
            return None
        return {b"Y": True, b"N": False}.get(text)


def _names(folder: str) -> list[str]:
    try:
        return sorted(names(folder))
    except OSError:
        return []


def _counters(folder: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind in ("counters", "hw_counters"):
        there = set(_names(f"{folder}/{kind}"))
        for name in (*BYTES, *EVENTS):
            if name not in there or name in found:
                continue
            try:
                text = read(f"{folder}/{kind}/{name}", limit=64).strip()
            except OSError:
                continue  # EINVAL, EIO: this driver or firmware does not have this one
            if text.isdigit() and len(text) <= DIGITS:
                found[name] = int(text)
    return found
