"""Raw round-trip times: net_tcp_rtt_us, kitty_tcp_rtt_seconds and the matrix of peers.

Samples come from the first hook of `ebpf.rtt.HOOKS` that attaches and delivers. They are
counted per connection in the kernel; connections belong to ranks by the socket join.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import (
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)

from sidecar.collectors.base import Reason, UnavailableError
from sidecar.ebpf import lanes, rtt
from sidecar.ebpf.selection import HookSelection
from sidecar.sources.sockets import is_scrape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from sidecar.ebpf.loader import Loader
    from sidecar.pod import Pod
    from sidecar.sources.cgroup_mounts import CgroupFS
    from sidecar.sources.sockets import SocketSnapshot, SocketTable

LABELS = ("rank", "node", "job")
KEEP_SECONDS = 5.0
"""How long a window's mean is served when later windows had no samples."""
UNKNOWN_SECONDS = 2.0
"""After that long a connection that no socket dump showed is taken for the pod's own."""
PEERS = 16
PEERS_KEPT = 1024
OWNERS_KEPT = 4096
# Every second power of two of the kernel's slots, coarser at the end: 12 buckets with +Inf.
_EXPORTED_US = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 262144)


@dataclass(slots=True)
class _Pending:
    since: float
    vector: int


@dataclass(frozen=True, slots=True)
class _Published:
    """What a scrape serves; replaced as a whole."""

    hook: str = ""
    raw: bool = False
    windows: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By rank: mean (us) of the latest window that had samples, and when it was."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    peers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class RttCollector:
    """Reads the hook's cells every 100 ms.

    Args:
        pod: the pod's processes.
        sockets: the socket join; without it the samples are the only rank's, or the pod's.
        load: loads eBPF programs.
        cgroups: finds the containers' control groups, for the hook that is attached to them.
        hook: `auto` or one of `ebpf.rtt.HOOKS`.
        own_port: returns the port of the agent's own /metrics, whose connections do not count.
        proc: root of procfs.
        clock: seconds, monotonic.
    """

    name = "rtt"
    interval = 0.1

    def __init__(
        self,
        pod: Pod,
        sockets: SocketTable | None,
        load: Loader,
        cgroups: CgroupFS,
        *,
        hook: str = rtt.AUTO,
        own_port: Callable[[], int] = lambda: 0,
        proc: str = "/proc",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pod = pod
        self._cgroups = cgroups
        self._sockets = sockets
        self._hooks = HookSelection(
            load,
            hook=hook,
            cgroups=self._directories,
            snapshot=lambda: sockets.snapshot if sockets else None,
            proc=proc,
            clock=clock,
        )
        self._own_port = own_port
        self._clock = clock
        self._snapshot: SocketSnapshot | None = None
        self._owners: dict[bytes, str] = {}
        self._pending: dict[bytes, _Pending] = {}
        self._ranks: dict[str, int] = {}
        self._peers: dict[str, dict[str, int]] = {}
        self._names: dict[bytes, str] = {}
        self._windows: dict[str, tuple[float, float]] = {}
        self._published = _Published()

    def sample(self) -> None:
        """Reads one window.

        Raises:
            UnavailableError: the hook that was asked for cannot be used here.
        """
        probe = self._hooks.probe()
        if probe is None:
            refused = self._hooks.refused
            if refused is not None:
                raise UnavailableError(Reason(refused.reason), refused.detail)
            raise UnavailableError(Reason.STARTING, "a hook is being loaded")
        now = self._clock()
        snapshot = self._sockets.snapshot if self._sockets else None
        grown = probe.read()
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._forget()
            self._settle(now)
        elif not grown and self._published.hook == probe.hook:
            self._hooks.watch(delivered=False)
            return
        windows: dict[str, int] = {}
        own_port = self._own_port().to_bytes(2, "big")
        for key, growth in grown:
            if is_scrape(key, own_port):
                continue
            owner = self._owner(key)
            if owner is None:
                pending = self._pending.setdefault(key, _Pending(now, 0))
                pending.vector += growth
            else:
                self._add_peer(owner, key, growth)
                windows[owner] = windows.get(owner, 0) + growth
        for owner, vector in windows.items():
            self._add(owner, vector)
            count, microseconds = lanes.first(vector), lanes.second(vector)
            if count and microseconds:  # a cell may be read while a sample is added to it
                self._windows[owner] = (microseconds / count, now)
        self._hooks.watch(delivered=bool(grown))
        self._published = _Published(
            probe.hook,
            probe.raw(),
            dict(self._windows),
            dict(self._ranks),
            {rank: dict(peers) for rank, peers in self._peers.items()},
        )

    def close(self) -> None:
        """Detaches the hook."""
        self._hooks.close()

    def latest(self) -> dict[str, tuple[float, float]]:
        """Returns each rank's mean of the latest window, in seconds, and when it ended."""
        return {rank: (mean / 1e6, when) for rank, (mean, when) in self._windows.items() if rank}

    def round_trips(self) -> dict[str, dict[str, tuple[int, float]]]:
        """Returns by rank and peer address: samples, and their sum in seconds."""
        return {
            rank: {
                peer: (lanes.first(both), lanes.second(both) / 1e6)
                for peer, both in self._busiest(rank, peers)
            }
            for rank, peers in self._published.peers.items()
        }

    def _directories(self) -> tuple[str, ...]:
        found = set()
        for pid, paths in self._pod.containers().values():
            directory = self._cgroups.unified(pid, paths)
            if directory is not None:
                found.add(directory)
        return tuple(sorted(found))

    def _owner(self, key: bytes) -> str | None:
        """The rank of a connection; empty for the pod's own, None while unknown."""
        if self._snapshot is None:
            ranks = self._pod.view.ranks
            return ranks[0].rank if len(ranks) == 1 else ""
        return self._owners.get(key)

    def _forget(self) -> None:
        """Drops ranks that are gone, and connections and names beyond the bounds."""
        alive = {rank.rank for rank in self._pod.view.ranks} | {""}
        for name in self._ranks.keys() - alive:
            del self._ranks[name]
            self._peers.pop(name, None)
        for name in self._windows.keys() - alive:
            del self._windows[name]
        if self._snapshot is not None:
            if len(self._owners) > OWNERS_KEPT + len(self._snapshot.rank_of):
                self._owners.clear()
            self._owners.update(self._snapshot.rank_of)
        if len(self._names) > OWNERS_KEPT:
            self._names.clear()

    def _settle(self, now: float) -> None:
        """Gives pending samples to whom the new socket dump says they belong."""
        snapshot = self._snapshot
        if not self._pending:
            return
        shown = {sock.key for sock in snapshot.sockets} if snapshot else set()
        for key, pending in list(self._pending.items()):
            owner = self._owner(key)
            if owner is None:
                # A connection that is there but nobody's belongs to another container; one
                # that no dump ever showed was too short to say.
                if key not in shown and now - pending.since < UNKNOWN_SECONDS:
                    continue
                owner = None if key in shown else ""
            if owner is not None:
                self._add(owner, pending.vector)
                self._add_peer(owner, key, pending.vector)
            del self._pending[key]

    def _add(self, owner: str, growth: int) -> None:
        self._ranks[owner] = self._ranks.get(owner, 0) + growth

    def _add_peer(self, owner: str, key: bytes, growth: int) -> None:
        peers = self._peers.setdefault(owner, {})
        address = key[20:]
        name = self._names.get(address)
        if name is None:
            name = self._names[address] = rtt.peer(key)
        if name in peers or len(peers) < PEERS_KEPT:
            # Peers need count and sum only.
            peers[name] = peers.get(name, 0) + (growth & (1 << 128) - 1)

    def collect(self) -> Iterator[Metric]:
        """Yields the gauge, the histogram, the matrix of peers and which hook is at work."""
        published, view, node = self._published, self._pod.view, self._pod.config.node
        yield from self._state(node, view.job)
        jobs = {"": view.job, **{rank.rank: rank.job for rank in view.ranks}}
        gauge = GaugeMetricFamily(
            "net_tcp_rtt_us",
            "Round-trip time of the rank's TCP connections in microseconds: mean of the raw "
            "samples of the latest 100 ms that had any.",
            labels=("pid", "node", "rank", "job"),
        )
        oldest = self._clock() - KEEP_SECONDS
        for rank in view.ranks:
            mean, when = published.windows.get(rank.rank, (0.0, 0.0))
            if when > oldest and rank.rank in published.windows:
                for pid in rank.heads:
                    gauge.add_metric((str(pid), node, rank.rank, rank.job), mean)
        yield gauge
        histogram = HistogramMetricFamily(
            "kitty_tcp_rtt_seconds",
            "Round-trip times of the rank's TCP connections, every sample.",
            labels=LABELS,
        )
        peers = SummaryMetricFamily(
            "kitty_tcp_peer_rtt_seconds",
            "Round-trip times between the rank and the peer address, every sample.",
            labels=(*LABELS, "peer"),
        )
        for name, vector in sorted(published.ranks.items()):
            if name not in jobs:
                continue
            labels = (name, node, jobs[name])
            samples = rtt.Samples.unpack(vector)
            histogram.add_metric(labels, _buckets(samples), sum_value=samples.sum_us / 1e6)
            for address, both in self._busiest(name, published.peers.get(name, {})):
                peers.add_metric((*labels, address), lanes.first(both), lanes.second(both) / 1e6)
        yield from (histogram, peers)

    def _state(self, node: str, job: str) -> Iterator[Metric]:
        if self._published.hook:
            way, _, name = self._published.hook.rpartition(":")
            yield InfoMetricFamily(
                "kitty_rtt_hook",
                "Where round-trip times come from; raw: single measurements, not smoothed ones.",
                value={
                    "hook": name,
                    "attached_by": way,
                    "raw": str(self._published.raw).lower(),
                    "node": node,
                    "job": job,
                },
            )
        passed = GaugeMetricFamily(
            "kitty_rtt_hook_passed_over",
            "Hooks that come first in order but are not in use, and why.",
            labels=["hook", "reason", "node", "job"],
        )
        for over in tuple(self._hooks.passed_over.values()):
            passed.add_metric([over.name, over.reason, node, job], 1)
        yield passed

    def _busiest(self, rank: str, peers: Mapping[str, int]) -> list[tuple[str, int]]:
        """The peers that the traffic families show as well, else those with most samples."""
        snapshot = self._snapshot
        ranked = snapshot.ranks.get(rank) if snapshot else None
        if ranked is not None:
            return sorted((name, both) for name, both in peers.items() if name in ranked.peers)
        most = sorted(peers.items(), key=lambda item: lanes.first(item[1]), reverse=True)
        return sorted(most[:PEERS])


def _buckets(samples: rtt.Samples) -> Sequence[tuple[str, float]]:
    edges = iter(_EXPORTED_US)
    edge = next(edges)
    buckets: list[tuple[str, float]] = []
    total = 0
    for upper, count in zip(rtt.SLOT_EDGES_US, samples.slots, strict=False):
        total += count
        if upper == edge:
            buckets.append((str(edge / 1e6), total))
            edge = next(edges, 0)
    buckets.append(("+Inf", samples.count))
    return buckets
