"""Network devices and addresses of the pod's network namespace."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sidecar.sources.addresses import reachable
from sidecar.sources.errors import SourceError
from sidecar.sources.files import read
from sidecar.sources.netdev import parse_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from sidecar.pod import Pod
    from sidecar.sources.addresses import InterfaceAddress
    from sidecar.sources.netdev import DeviceTotals

DEVICES = 8
"""Devices with series. With hostNetwork the namespace holds a device for every pod of the node."""
ADDRESSES = 16
LOOPBACK = "lo"

COUNTERS = {
    "received_bytes": ("kitty_network_receive_bytes", "Bytes that the device received."),
    "received_packets": ("kitty_network_receive_packets", "Packets that the device received."),
    "received_errors": ("kitty_network_receive_errors", "Faulty packets received."),
    "received_drops": ("kitty_network_receive_drops", "Packets received and dropped."),
    "transmitted_bytes": ("kitty_network_transmit_bytes", "Bytes that the device sent."),
    "transmitted_packets": ("kitty_network_transmit_packets", "Packets that the device sent."),
    "transmitted_errors": ("kitty_network_transmit_errors", "Packets that could not be sent."),
    "transmitted_drops": ("kitty_network_transmit_drops", "Packets dropped before they were sent."),
}


@dataclass(frozen=True, slots=True)
class _Latest:
    devices: Mapping[str, DeviceTotals] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    left_out: int = 0


class NetdevCollector:
    """Reads net/dev and the addresses of the network namespace that the containers share.

    Devices are those with an address, or all but loopback where addresses cannot be had.

    Args:
        pod: the pod.
        addresses: returns the addresses of the agent's namespace, which is the pod's.
        device_name: returns the name of the device with an index.
        proc: where /proc is.
    """

    name = "netdev"
    interval = 2.0

    def __init__(
        self,
        pod: Pod,
        *,
        addresses: Callable[[], list[InterfaceAddress]],
        device_name: Callable[[int], str] = socket.if_indextoname,
        proc: str = "/proc",
    ) -> None:
        self._pod = pod
        self._addresses = addresses
        self._device_name = device_name
        self._proc = proc
        self._latest = _Latest()

    def sample(self) -> None:
        """Reads once; OSError where the devices cannot be read."""
        devices = parse_devices(read(f"{self._proc}/self/net/dev"))
        devices.pop(LOOPBACK, None)
        try:
            found = self._addresses()
        except SourceError:
            found = []
        addressed = {self._name(entry.device) for entry in found}
        chosen = [name for name in devices if name in addressed or not found]
        outside = reachable(found)
        self._latest = _Latest(
            devices={name: devices[name] for name in chosen[:DEVICES]},
            addresses=tuple(outside[:ADDRESSES]),
            left_out=len(chosen[DEVICES:]) * len(COUNTERS) + len(outside[ADDRESSES:]),
        )

    @property
    def left_out(self) -> int:
        """Samples of devices and addresses beyond the bounds."""
        return self._latest.left_out

    def _name(self, index: int) -> str:
        try:
            return self._device_name(index)
        except OSError:
            return ""

    def collect(self) -> Iterator[Metric]:
        """Yields eight counters a device, and kitty_pod_address_info for every address."""
        latest, node, job = self._latest, self._pod.config.node, self._pod.view.job
        for attribute, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["device", "node", "job"])
            for device, totals in latest.devices.items():
                counter.add_metric([device, node, job], getattr(totals, attribute))
            yield counter
        info = GaugeMetricFamily(
            "kitty_pod_address_info",
            "Addresses by which other pods may know this one.",
            labels=["address", "node", "job"],
        )
        for address in latest.addresses:
            info.add_metric([address, node, job], 1)
        yield info
