"""RDMA ports that the pod can use, and by which transport its data moves.

RDMA passes TCP by: without these families a pod that trains over it would look idle.
Counters are those of a port. Where several pods share a port they share its counters too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sidecar.collectors.base import Reason, UnavailableError
from sidecar.sources.rdma import EVENTS
from sidecar.sources.tcp_counters import TcpCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from sidecar.pod import Pod
    from sidecar.sources.descriptors import DescriptorTable
    from sidecar.sources.rdma import RdmaFS, RdmaPort
    from sidecar.sources.sockets import SocketTable

PORTS = 16
"""Ports with series of their own; events are summed over all."""
WINDOW = 10.0
"""Seconds over which the transport is judged."""
MOVED = 64 << 10
"""Bytes in a window from which data moves; keeping a rendezvous alive takes less."""
_EVENTS = frozenset(EVENTS)
_TCP_BYTES = tuple(TcpCounters._fields.index(n) for n in ("delivered_bytes", "received_bytes"))


@dataclass(frozen=True, slots=True)
class _Latest:
    ports: tuple[RdmaPort, ...] = ()
    events: Mapping[str, int] = field(default_factory=dict)
    mode: str = ""
    transport: str = ""
    left_out: int = 0


class RdmaCollector:
    """Reads /sys/class/infiniband, and the socket table for the share of TCP."""

    name = "rdma"
    interval = 2.0

    def __init__(
        self,
        pod: Pod,
        rdma: RdmaFS,
        descriptors: DescriptorTable,
        sockets: SocketTable | None,
        *,
        proc: str = "/proc",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pod = pod
        self._rdma = rdma
        self._descriptors = descriptors
        self._sockets = sockets
        self._proc = proc
        self._latest = _Latest()
        self._traffic = _Traffic(clock)
        self._events = _Events()

    def sample(self) -> None:
        """Reads once.

        Raises:
            UnavailableError: there is RDMA, but not to be told which devices are the pod's.
        """
        shared = self._rdma.shared()
        files = self._rdma.devices()
        try:
            granted = self._granted(files) if shared is not False else set(files.values())
        except PermissionError as e:
            self._latest = _Latest()
            raise UnavailableError(
                Reason.PERMISSION, "/proc/<pid>/root is denied: SYS_PTRACE would allow it"
            ) from e
        ports = self._rdma.ports(granted)
        self._latest = _Latest(
            ports=tuple(ports[:PORTS]),
            events=self._events.totals(ports),
            left_out=sum(
                (port.transmitted is not None) + (port.received is not None)
                for port in ports[PORTS:]
            ),
            mode={True: "shared", False: "exclusive", None: ""}[shared],
            transport=self._traffic.transport(self._used_bytes(ports, files), self._tcp_bytes()),
        )

    @property
    def left_out(self) -> int:
        """Samples of ports beyond the bound."""
        return self._latest.left_out

    def _granted(self, files: Mapping[str, str]) -> set[str]:
        """Returns the devices whose files are in a watched container."""
        found = set()
        for pid in {pid for rank in self._pod.view.ranks for pid in rank.heads}:
            for path, device in files.items():
                try:
                    os.lstat(f"{self._proc}/{pid}/root{path}")
                except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
                    continue
                found.add(device)
        return found

    def _used_bytes(self, ports: list[RdmaPort], files: Mapping[str, str]) -> dict[str, int] | None:
        """Returns the bytes of each port that a process has open; None if one does not count."""
        opened = {
            files[path]
            for pid in self._pod.view.rank_of
            if (held := self._descriptors.get(pid)) is not None
            for path in held.devices & files.keys()
        }
        found = {}
        for port in ports:
            if port.device in opened:
                if port.transmitted is None or port.received is None:
                    return None
                found[f"{port.device}/{port.port}"] = port.transmitted + port.received
        return found

    def _tcp_bytes(self) -> dict[str, int] | None:
        snapshot = self._sockets.snapshot if self._sockets else None
        if snapshot is None:
            return None
        return {
            name: sum(ranked.totals[index] for index in _TCP_BYTES)
            for name, ranked in snapshot.ranks.items()
        }

    def collect(self) -> Iterator[Metric]:
        """Yields bytes by port, events of all ports, the scope and the transport."""
        latest, node, job = self._latest, self._pod.config.node, self._pod.view.job
        transmitted = CounterMetricFamily(
            "kitty_rdma_transmitted_bytes",
            "Bytes that the RDMA port sent, for whichever pod.",
            labels=["device", "port", "node", "job"],
        )
        received = CounterMetricFamily(
            "kitty_rdma_received_bytes",
            "Bytes that the RDMA port received, for whichever pod.",
            labels=["device", "port", "node", "job"],
        )
        for port in latest.ports:
            if port.transmitted is not None:
                transmitted.add_metric([port.device, port.port, node, job], port.transmitted)
            if port.received is not None:
                received.add_metric([port.device, port.port, node, job], port.received)
        events = CounterMetricFamily(
            "kitty_rdma_events",
            "Errors, retransmissions and signs of congestion of the pod's RDMA ports, by the"
            " driver's name for them.",
            labels=["event", "node", "job"],
        )
        for name, count in latest.events.items():
            events.add_metric([name, node, job], count)
        scope = GaugeMetricFamily(
            "kitty_rdma_namespace_info",
            "Whether every network namespace of the node sees every RDMA device (shared).",
            labels=["mode", "node", "job"],
        )
        if latest.mode:
            scope.add_metric([latest.mode, node, job], 1)
        transport = GaugeMetricFamily(
            "kitty_transport_info",
            "By what most of the pod's data moved in the last 10 s: tcp, rdma, or none.",
            labels=["transport", "node", "job"],
        )
        if latest.transport and self._pod.view.watched:
            transport.add_metric([latest.transport, node, job], 1)
        yield from (transmitted, received, events, scope, transport)


class _Events:
    """Sums events over ports that come, go, refuse a counter for a while, and are reset.

    A sum that fell would read as one that began anew, with all it holds as growth.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, str, str], int] = {}
        self._totals: dict[str, int] = {}

    def totals(self, ports: list[RdmaPort]) -> dict[str, int]:
        """Returns the sums of the events that some of the ports have."""
        known = frozenset(self._totals)
        there = set()
        for port in ports:
            for name in port.counters.keys() & _EVENTS:
                key, count = (port.device, port.port, name), port.counters[name]
                # What a port that comes later counted before is nothing that happens now.
                before = self._before.get(key, count if name in known else 0)
                grown = count - before if count >= before else count
                self._totals[name] = self._totals.get(name, 0) + grown
                self._before[key] = count
                there.add(name)
        return {name: self._totals[name] for name in EVENTS if name in there}


class _Traffic:
    """Tells by what data moved, from counters that come and go with their ports and ranks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before: tuple[dict[str, int] | None, dict[str, int] | None] | None = None
        self._moved: deque[tuple[float, int | None, int | None]] = deque()

    def transport(self, rdma: dict[str, int] | None, tcp: dict[str, int] | None) -> str:
        """Returns the transport of the last window, empty where it cannot be told."""
        now = self._clock()
        if self._before is not None:
            before_rdma, before_tcp = self._before
            self._moved.append((now, _growth(before_rdma, rdma), _growth(before_tcp, tcp)))
        self._before = rdma, tcp
        while self._moved and now - self._moved[0][0] >= WINDOW:
            self._moved.popleft()
        if not self._moved:
            return ""
        by_rdma = _sum([moved for _, moved, _ in self._moved])
        by_tcp = _sum([moved for _, _, moved in self._moved])
        if by_rdma is not None and by_rdma >= max(MOVED, by_tcp or 0):
            return "rdma"
        if by_rdma is None or by_tcp is None:
            return ""
        return "tcp" if by_tcp >= MOVED else "none"


def _growth(before: dict[str, int] | None, now: dict[str, int] | None) -> int | None:
    if before is None or now is None:
        return None
    return sum(max(0, count - before[name]) for name, count in now.items() if name in before)


def _sum(moved: list[int | None]) -> int | None:
    known = [each for each in moved if each is not None]
    return sum(known) if len(known) == len(moved) else None
