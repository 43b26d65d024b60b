"""Joins the namespace's TCP sockets to the ranks that hold them.

The kernel counts by socket, users think by rank: a socket belongs to the process whose
descriptor table holds its inode, and through it to a rank. What a socket counted stays with its
rank after it closed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from sidecar.sources.sockdiag import (
    LISTEN,
    SOCKET_LIMIT,
    STATES,
    TcpSocket,
    address,
    smoothed_rtt,
)
from sidecar.sources.tcp_counters import TcpCounters, growth, moved, unpack, vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sidecar.attribution import PodView
    from sidecar.sources.descriptors import DescriptorTable
    from sidecar.sources.sockdiag import SockDiag

PEERS = 16
"""Peer addresses of a rank that have series of their own."""
OTHER = "other"
CANDIDATES = 1024
"""Peers without series whose traffic is remembered to see whether they became busy."""
BUSIER = 1 << 16
"""Bytes by which such a peer must have outgrown twice the least busy one of those with series."""
HALVING = 128
"""Rounds in which what counts as busy fades to half: after a restart peers have new addresses."""
GRACE = 2
"""Rounds that a socket may be missing before it is taken for closed: its final counters come a
moment after it left the kernel's table."""
MISSING = 4096
"""Sockets remembered that left the kernel's table while a process may hold them on, as one that
its peer reset: their end comes when the process closes them."""
WALK_EVERY = 60
"""Rounds after which descriptors are walked again though no socket came or went: processes pass
sockets on."""

ZERO = TcpCounters(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class PeerSockets:
    """A rank's traffic with one peer address, or with all the rest as `other`."""

    totals: TcpCounters
    smoothed_rtt: float | None
    """Seconds, mean over the open connections; None without any."""


@dataclass(frozen=True, slots=True)
class RankSockets:
    """The sockets of one rank; of the pod itself under the empty rank."""

    totals: TcpCounters = ZERO
    closed_read: int = 0
    """Closed connections whose final counters were read."""
    closed_unread: int = 0
    """Closed connections that count only up to the reading before, at first at least."""
    send_queue: int = 0
    receive_queue: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    smoothed_rtt_mean: float | None = None
    smoothed_rtt_max: float | None = None
    peers: Mapping[str, PeerSockets] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SocketSnapshot:
    """The namespace's sockets as of one reading.

    Attributes:
        send_queue: bytes not yet acknowledged, all sockets of the namespace.
        ranks: by rank text.
        rank_of: rank text of each open connection by TcpSocket.key; connections of other
            containers are not in it.
        info_length: bytes of struct tcp_info on this kernel (see COUNTERS_SINCE).
        sockets: all of the namespace but the agent's own.
        overruns: times that more connections closed between two readings than the kernel keeps.
    """

    send_queue: int
    ranks: Mapping[str, RankSockets]
    rank_of: Mapping[bytes, str]
    info_length: int
    sockets: tuple[TcpSocket, ...] = ()
    overruns: int = 0


class _Connection:
    """One socket through its life."""

    __slots__ = (
        *("closed", "counted", "inode", "key", "missed", "owner", "peer", "pending", "ports"),
        *("remote", "resolved", "seen"),
    )

    def __init__(self, sock: TcpSocket) -> None:
        self.meet(sock)
        self.inode = sock.inode
        self.owner: str | None = None
        self.resolved = False
        self.counted: int | None = None
        """Its latest counters as a vector; None for a listener."""
        self.pending = 0
        """What it counted while nobody of the pod was known to hold it."""
        self.closed = False
        self.seen = 0
        self.missed = False

    def meet(self, sock: TcpSocket) -> None:
        """Takes the other end from the socket: a descriptor may be connected again."""
        self.ports, self.remote = sock.ports, sock.remote
        self.key = sock.key
        self.peer = address(sock.family, sock.remote)


class _Ledger:
    """What one rank's sockets counted, closed ones included."""

    def __init__(self) -> None:
        self.peers: dict[str, int] = {}
        """Vectors of counters."""
        self.other = 0
        self.volumes: dict[str, int] = {}
        """Bytes by peer, faded; of the peers with series and of CANDIDATES others."""
        self.closed_read = 0
        self.closed_unread = 0

    def add(self, peer: str, grown: int) -> None:
        if peer in self.peers or len(self.peers) < PEERS:
            self.peers[peer] = self.peers.get(peer, 0) + grown
        else:
            self.other += grown
        if peer in self.volumes or peer in self.peers or len(self.volumes) < PEERS + CANDIDATES:
            self.volumes[peer] = self.volumes.get(peer, 0) + moved(grown)

    def promote(self) -> None:
        """Gives the busiest peer of the rest a series of its own if it outgrew the least busy.

        Both sides stay counters: the one that leaves goes on in `other`, the one that comes
        starts anew.
        """
        rest = self.volumes.keys() - self.peers.keys()
        if not rest:
            return
        busiest = max(rest, key=lambda peer: self.volumes[peer])
        least = min(self.peers, key=lambda peer: self.volumes.get(peer, 0))
        if self.volumes[busiest] > 2 * self.volumes.get(least, 0) + BUSIER:
            self.other += self.peers.pop(least)
            self.peers[busiest] = 0

    def fade(self) -> None:
        """Halves what the peers count as busy with; who is forgotten makes room."""
        self.volumes = {peer: n // 2 for peer, n in self.volumes.items() if n > 1}


def is_scrape(key: bytes, own_port: bytes) -> bool:
    """Whether a connection (`TcpSocket.key`) is one of the agent's own port, at either end."""
    # A peer's port of the same number is the peer's own affair.
    return key.startswith(own_port) or (key[2:4] == own_port and key[4:20] == key[20:36])


class SocketTable:
    """Reads the namespace's sockets and keeps what their ranks counted.

    Args:
        diag: the kernel's sockets.
        descriptors: who holds which socket.
        view: returns the pod's processes.
        own_port: returns the port of the agent's own /metrics: scrapes are not the pod's traffic.
        shared: whether the network namespace is the machine's (hostNetwork): a socket that no
            process of the pod is seen to hold is then another pod's.
    """

    def __init__(
        self,
        diag: SockDiag,
        descriptors: DescriptorTable,
        *,
        view: Callable[[], PodView],
        own_port: Callable[[], int] = lambda: 0,
        shared: bool = False,
    ) -> None:
        self._diag = diag
        self._descriptors = descriptors
        self._view = view
        self._own_port = own_port
        self._unheld = None if shared else ""
        self._open: dict[int, _Connection] = {}
        self._ended: deque[TcpSocket] = deque(maxlen=SOCKET_LIMIT)
        """Closings that are still to be counted: their holders could not be looked up."""
        self._missing: dict[int, _Connection] = {}
        self._ledgers: dict[str, _Ledger] = {}
        self._walked: PodView | None = None
        self._walk_due = 0
        self._round = 0
        self._info_length = 0
        self.snapshot: SocketSnapshot | None = None

    def refresh(self) -> None:
        """Reads once; `snapshot` is then new.

        Raises:
            SourceError: the kernel's sockets cannot be read; the snapshot is then None.
            ExhaustedError: the holders of new sockets cannot be looked up now.
        """
        self._round += 1
        try:
            sockets = self._diag.sockets()
            self._ended.extend(self._diag.closed())
        except Exception:
            self.snapshot = None
            raise
        own_port = self._own_port().to_bytes(2, "big")
        # Nearly all sockets have another port: the quick question comes first.
        sockets = [s for s in sockets if own_port not in s[2] or not is_scrape(s.key, own_port)]
        # The kernel tells as much of one socket as of another.
        self._info_length = next(
            (len(sock.info) for sock in (*sockets, *self._ended) if sock.info), self._info_length
        )
        self._doubt()
        connections = self._follow(sockets)
        self._resolve()
        while self._ended:
            sock = self._ended.popleft()
            if not is_scrape(sock.key, own_port):
                self._close(sock)
        self._forget()
        for ledger in self._ledgers.values():
            if self._round % HALVING == 0:
                ledger.fade()
            ledger.promote()
        self.snapshot = self._snapshot(sockets, connections)

    def _doubt(self) -> None:
        if self._walked is not self._view():
            # A process that is new may hold what nobody held before.
            for connection in self._open.values():
                if connection.owner is None:
                    connection.resolved = False

    def _follow(self, sockets: Iterable[TcpSocket]) -> list[_Connection]:
        """Counts what each socket did since the round before; returns their connections."""
        connections: list[_Connection] = []
        grown_by: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        known, now = self._open, self._round
        # Ten thousand times twice a second: fields are taken apart once.
        for sock in sockets:
            _, state, ports, _, remote, cookie, _, _, inode, info = sock
            connection = known.get(cookie)
            if connection is None:
                connection = self._missing.pop(cookie, None) or _Connection(sock)
                known[cookie] = connection
            connections.append(connection)
            connection.seen = now
            if remote != connection.remote or ports != connection.ports:
                connection.meet(sock)
            if inode:
                connection.inode = inode
            if state != LISTEN:
                counted = vector(info)
                if counted != connection.counted:
                    grown = growth(counted, connection.counted or 0)
                    connection.counted = counted
                    if connection.owner is None:
                        connection.pending += grown
                    else:
                        grown_by[connection.owner][connection.peer] += grown
        for owner, peers in grown_by.items():
            ledger = self._ledger(owner)
            for peer, grown in peers.items():
                ledger.add(peer, grown)
        return connections

    def _resolve(self) -> None:
        view = self._view()
        waiting = [c for c in self._open.values() if not c.resolved and c.inode]
        if not waiting and self._walked is view and self._round < self._walk_due:
            return
        pids = sorted(
            {*view.rank_of, *view.watched}, key=lambda pid: (view.processes[pid].start, pid)
        )
        self._descriptors.walk(pids)
        self._walked, self._walk_due = view, self._round + WALK_EVERY
        owners: dict[int, str] = {}
        for pid in pids:
            held = self._descriptors.get(pid)
            if held is not None:
                rank = view.rank_of.get(pid)
                for inode in held.sockets:
                    # An inherited socket is its oldest holder's.
                    owners.setdefault(inode, rank.rank if rank else "")
        for connection in self._open.values():
            if connection.resolved and connection.owner is not None:
                # From here on it counts for whom it was passed to.
                connection.owner = owners.get(connection.inode, connection.owner)
        # Without the right to look into processes all is the pod's, or its only rank's.
        fallback = None
        if self._descriptors.denied and self._unheld is not None:
            fallback = view.ranks[0].rank if len(view.ranks) == 1 else ""
        for connection in waiting:
            self._own(connection, owners.get(connection.inode, fallback))

    def _own(self, connection: _Connection, owner: str | None) -> None:
        connection.owner, connection.resolved = owner, True
        if owner is not None and connection.pending:
            self._ledger(owner).add(connection.peer, connection.pending)
            connection.pending = 0

    def _ledger(self, owner: str) -> _Ledger:
        ledger = self._ledgers.get(owner)
        if ledger is None:
            ledger = self._ledgers[owner] = _Ledger()
        return ledger

    def _close(self, sock: TcpSocket) -> None:
        known = self._open.pop(sock.cookie, None) or self._missing.pop(sock.cookie, None)
        final = vector(sock.info)
        if not final and (known is None or known.counted is None):
            return
        connection = known or _Connection(sock)
        connection.closed = True
        if final:  # none are left of one that the process itself reset
            connection.pending += growth(final, connection.counted or 0)
            if connection.resolved:
                self._own(connection, connection.owner)
        if not connection.resolved:
            # Shorter than a round: nobody saw who held it, so it is the pod's.
            self._own(connection, self._unheld)
        if connection.owner is not None and not connection.missed:
            ledger = self._ledger(connection.owner)
            ledger.closed_read += bool(final)
            ledger.closed_unread += not final

    def _forget(self) -> None:
        gone = [cookie for cookie, c in self._open.items() if self._round - c.seen >= GRACE]
        for cookie in gone:
            connection = self._open.pop(cookie)
            if not connection.resolved:
                self._own(connection, self._unheld)
            if (
                connection.owner is not None
                and connection.counted is not None
                and not connection.missed
            ):
                self._ledger(connection.owner).closed_unread += 1
            connection.missed = True
            self._missing[cookie] = connection
        while len(self._missing) > MISSING:
            del self._missing[next(iter(self._missing))]
        ranks = {rank.rank for rank in self._view().ranks}
        for name in self._ledgers.keys() - ranks - {""}:
            del self._ledgers[name]

    def _snapshot(
        self, sockets: Sequence[TcpSocket], connections: Iterable[_Connection]
    ) -> SocketSnapshot:
        send_queue = 0
        rank_of: dict[bytes, str] = {}
        gauges: dict[str, _Gauges] = defaultdict(_Gauges)
        for sock, connection in zip(sockets, connections, strict=True):
            if sock.state != LISTEN:
                send_queue += sock.send_queue
            owner = connection.owner
            if owner is not None and not connection.closed:
                rank_of[connection.key] = owner
                gauges[owner].add(sock, connection.peer)
        names = gauges.keys() | self._ledgers.keys()
        return SocketSnapshot(
            send_queue=send_queue,
            ranks={
                name: gauges.get(name, _Gauges()).with_ledger(self._ledgers.get(name, _Ledger()))
                for name in names
            },
            rank_of=rank_of,
            info_length=self._info_length,
            sockets=tuple(sockets),
            overruns=self._diag.overruns,
        )


class _Gauges:
    """Sums over one rank's open sockets."""

    __slots__ = ("receive_queue", "rtts", "send_queue", "states")

    def __init__(self) -> None:
        self.send_queue = 0
        self.receive_queue = 0
        self.states: dict[int, int] = defaultdict(int)
        self.rtts: dict[str, list[int]] = defaultdict(list)
        """Smoothed round-trip times in microseconds, by peer."""

    def add(self, sock: TcpSocket, peer: str) -> None:
        _, state, _, _, _, _, receive_queue, send_queue, _, info = sock
        self.states[state] += 1
        if state == LISTEN:
            return
        self.send_queue += send_queue
        self.receive_queue += receive_queue
        rtt = smoothed_rtt(info)
        if rtt:
            self.rtts[peer].append(rtt)

    def with_ledger(self, ledger: _Ledger) -> RankSockets:
        peers = {
            peer: PeerSockets(unpack(totals), _mean(self.rtts.get(peer, ())))
            for peer, totals in ledger.peers.items()
        }
        if ledger.other:
            rest = [self.rtts[peer] for peer in self.rtts.keys() - peers.keys()]
            peers[OTHER] = PeerSockets(unpack(ledger.other), _mean([*chain(*rest)]))
        rtts = [*chain(*self.rtts.values())]
        return RankSockets(
            totals=unpack(ledger.other + sum(ledger.peers.values())),
            closed_read=ledger.closed_read,
            closed_unread=ledger.closed_unread,
            send_queue=self.send_queue,
            receive_queue=self.receive_queue,
            states={STATES.get(state, "unknown"): n for state, n in self.states.items()},
            smoothed_rtt_mean=_mean(rtts),
            smoothed_rtt_max=max(rtts) / 1e6 if rtts else None,
            peers=peers,
        )


def _mean(rtts: Sequence[int]) -> float | None:
    return sum(rtts) / len(rtts) / 1e6 if rtts else None
