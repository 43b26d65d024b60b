"""Joins the namespace's TCP sockets to the ranks that hold them.

The kernel counts by socket, users think by rank: a socket belongs to the process whose
descriptor table holds its inode, and through it to a rank. What a socket counted stays with its
rank after it closed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidecar.sources.sockdiag import (
    LISTEN,
    STATES,
    TcpCounters,
    TcpSocket,
    address,
    counter_bytes,
    counters,
    smoothed_rtt,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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

Totals = tuple[int, ...]
"""Sums of TcpCounters, field by field; no longer 32 bits wide."""
ZERO: Totals = (0,) * len(TcpCounters._fields)
_NARROW = frozenset(
    TcpCounters._fields.index(name) for name in ("retransmitted_segments", "sent_segments")
)


def plus(a: Totals, b: Totals) -> Totals:
    """Adds field by field."""
    # Written out: this runs for every busy socket twice a second.
    a0, a1, a2, a3, a4, a5, a6, a7 = a
    b0, b1, b2, b3, b4, b5, b6, b7 = b
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


def growth(new: Totals, old: Totals) -> Totals:
    """Subtracts field by field; counters of 32 bits wrap.

    A socket that was disconnected to be connected again begins anew: all of `new` is growth then.
    """
    a0, a1, a2, a3, a4, a5, a6, a7 = new
    b0, b1, b2, b3, b4, b5, b6, b7 = old
    grown = a0 - b0, a1 - b1, a2 - b2, a3 - b3, a4 - b4, a5 - b5, a6 - b6, a7 - b7
    if min(grown) >= 0:
        return grown
    wrapped = tuple(
        change % (1 << 32) if index in _NARROW else change for index, change in enumerate(grown)
    )
    if min(wrapped) < 0 or any(wrapped[index] >= 1 << 31 for index in _NARROW):
        return new
    return wrapped


@dataclass(frozen=True, slots=True)
class PeerSockets:
    """A rank's traffic with one peer address, or with all the rest as `other`."""

    totals: Totals
    smoothed_rtt: float | None
    """Seconds, mean over the open connections; None without any."""


@dataclass(frozen=True, slots=True)
class RankSockets:
    """The sockets of one rank; of the pod itself under the empty rank."""

    totals: Totals = ZERO
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
        *("counted", "inode", "key", "missed", "owner", "peer", "pending", "ports", "raw"),
        *("remote", "resolved", "seen"),
    )

    def __init__(self, sock: TcpSocket) -> None:
        self.meet(sock)
        self.inode = sock.inode
        self.owner: str | None = None
        self.resolved = False
        self.counted: Totals = ZERO
        self.pending: Totals = ZERO
        """What it counted while nobody of the pod was known to hold it."""
        self.raw = b""
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
        self.peers: dict[str, Totals] = {}
        self.other = ZERO
        self.volumes: dict[str, int] = {}
        """Bytes by peer, faded; of the peers with series and of CANDIDATES others."""
        self.closed_read = 0
        self.closed_unread = 0

    @property
    def totals(self) -> Totals:
        summed = self.other
        for totals in self.peers.values():
            summed = plus(summed, totals)
        return summed

    def add(self, peer: str, grown: Totals) -> None:
        if peer in self.peers or len(self.peers) < PEERS:
            self.peers[peer] = plus(self.peers.get(peer, ZERO), grown)
        else:
            self.other = plus(self.other, grown)
        if peer in self.volumes or peer in self.peers or len(self.volumes) < PEERS + CANDIDATES:
            self.volumes[peer] = self.volumes.get(peer, 0) + _volume(grown)

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
            self.other = plus(self.other, self.peers.pop(least))
            self.peers[busiest] = ZERO

    def fade(self) -> None:
        """Halves what the peers count as busy with; who is forgotten makes room."""
        self.volumes = {peer: n // 2 for peer, n in self.volumes.items() if n > 1}


def _scrape(sock: TcpSocket, own_port: bytes) -> bool:
    # A peer's port of the same number is the peer's own affair.
    ports = sock.ports
    return ports.startswith(own_port) or (ports.endswith(own_port) and sock.local == sock.remote)


def _volume(totals: Totals) -> int:
    return totals[1] + totals[2]


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
        """
        self._round += 1
        try:
            sockets = self._diag.sockets()
            closed = list(self._diag.closed())
        except Exception:
            self.snapshot = None
            raise
        own_port = self._own_port().to_bytes(2, "big")
        sockets = [sock for sock in sockets if not _scrape(sock, own_port)]
        closed = [sock for sock in closed if not _scrape(sock, own_port)]
        # The kernel tells as much of one socket as of another.
        self._info_length = next(
            (len(sock.info) for sock in (*sockets, *closed) if sock.info), self._info_length
        )
        self._doubt()
        self._follow(sockets)
        self._resolve()
        for sock in closed:
            self._close(sock)
        self._forget()
        for ledger in self._ledgers.values():
            if self._round % HALVING == 0:
                ledger.fade()
            ledger.promote()
        self.snapshot = self._snapshot(sockets)

    def _doubt(self) -> None:
        if self._walked is not self._view():
            # A process that is new may hold what nobody held before.
            for connection in self._open.values():
                if connection.owner is None:
                    connection.resolved = False

    def _follow(self, sockets: Iterable[TcpSocket]) -> None:
        for sock in sockets:
            connection = self._open.get(sock.cookie)
            if connection is None:
                connection = self._missing.pop(sock.cookie, None) or _Connection(sock)
                self._open[sock.cookie] = connection
            connection.seen = self._round
            if sock.remote != connection.remote or sock.ports != connection.ports:
                connection.meet(sock)
            if sock.inode:
                connection.inode = sock.inode
            if sock.state != LISTEN:
                self._count(connection, sock.info)

    def _count(self, connection: _Connection, info: bytes) -> None:
        raw = counter_bytes(info)
        if raw == connection.raw:
            return
        connection.raw = raw
        now = counters(info)
        grown = growth(now, connection.counted)
        connection.counted = now
        if connection.owner is None:
            connection.pending = plus(connection.pending, grown)
        else:
            self._ledger(connection.owner).add(connection.peer, grown)

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
        if owner is not None and connection.pending is not ZERO:
            self._ledger(owner).add(connection.peer, connection.pending)
            connection.pending = ZERO

    def _ledger(self, owner: str) -> _Ledger:
        ledger = self._ledgers.get(owner)
        if ledger is None:
            ledger = self._ledgers[owner] = _Ledger()
        return ledger

    def _close(self, sock: TcpSocket) -> None:
        known = self._open.pop(sock.cookie, None) or self._missing.pop(sock.cookie, None)
        final = any(counters(sock.info))
        if not final and (known is None or not known.raw):
            return
        connection = known or _Connection(sock)
        if final:  # none are left of one that the process itself reset
            self._count(connection, sock.info)
        if not connection.resolved:
            # Shorter than a round: nobody saw who held it, so it is the pod's.
            self._own(connection, self._unheld)
        if connection.owner is not None and not connection.missed:
            ledger = self._ledger(connection.owner)
            ledger.closed_read += final
            ledger.closed_unread += not final

    def _forget(self) -> None:
        gone = [cookie for cookie, c in self._open.items() if self._round - c.seen >= GRACE]
        for cookie in gone:
            connection = self._open.pop(cookie)
            if not connection.resolved:
                self._own(connection, self._unheld)
            if connection.owner is not None and connection.raw and not connection.missed:
                self._ledger(connection.owner).closed_unread += 1
            connection.missed = True
            self._missing[cookie] = connection
        while len(self._missing) > MISSING:
            del self._missing[next(iter(self._missing))]
        ranks = {rank.rank for rank in self._view().ranks}
        for name in self._ledgers.keys() - ranks - {""}:
            del self._ledgers[name]

    def _snapshot(self, sockets: Iterable[TcpSocket]) -> SocketSnapshot:
        send_queue = 0
        rank_of: dict[bytes, str] = {}
        gauges: dict[str, _Gauges] = {}
        for sock in sockets:
            if sock.state != LISTEN:
                send_queue += sock.send_queue
            connection = self._open.get(sock.cookie)
            owner = connection.owner if connection is not None else None
            if connection is None or owner is None:
                continue  # closed since, or not the pod's
            rank_of[connection.key] = owner
            summed = gauges.get(owner)
            if summed is None:
                summed = gauges[owner] = _Gauges()
            summed.add(sock, connection.peer)
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


class _Rtts:
    """Smoothed round-trip times in microseconds."""

    __slots__ = ("count", "largest", "total")

    def __init__(self) -> None:
        self.count = self.total = self.largest = 0

    def add(self, rtt: int) -> None:
        self.count += 1
        self.total += rtt
        self.largest = max(self.largest, rtt)

    def mean(self) -> float | None:
        return self.total / self.count / 1e6 if self.count else None


class _Gauges:
    """Sums over one rank's open sockets."""

    __slots__ = ("peer_rtts", "receive_queue", "send_queue", "states")

    def __init__(self) -> None:
        self.send_queue = 0
        self.receive_queue = 0
        self.states: dict[int, int] = {}
        self.peer_rtts: dict[str, _Rtts] = {}

    def add(self, sock: TcpSocket, peer: str) -> None:
        state = sock.state
        self.states[state] = self.states.get(state, 0) + 1
        if state == LISTEN:
            return
        self.send_queue += sock.send_queue
        self.receive_queue += sock.receive_queue
        rtt = smoothed_rtt(sock.info)
        if rtt:
            rtts = self.peer_rtts.get(peer)
            if rtts is None:
                rtts = self.peer_rtts[peer] = _Rtts()
            rtts.add(rtt)

    def _rtts(self, peers: Iterable[str]) -> _Rtts:
        summed = _Rtts()
        for peer in peers:
            rtts = self.peer_rtts.get(peer)
            if rtts is not None:
                summed.count += rtts.count
                summed.total += rtts.total
                summed.largest = max(summed.largest, rtts.largest)
        return summed

    def with_ledger(self, ledger: _Ledger) -> RankSockets:
        peers = {
            peer: PeerSockets(totals, self._rtts([peer]).mean())
            for peer, totals in ledger.peers.items()
        }
        if any(ledger.other):
            rest = self._rtts(self.peer_rtts.keys() - peers.keys())
            peers[OTHER] = PeerSockets(ledger.other, rest.mean())
        rtts = self._rtts(self.peer_rtts)
        return RankSockets(
            totals=ledger.totals,
            closed_read=ledger.closed_read,
            closed_unread=ledger.closed_unread,
            send_queue=self.send_queue,
            receive_queue=self.receive_queue,
            states={STATES.get(state, "unknown"): n for state, n in self.states.items()},
            smoothed_rtt_mean=rtts.mean(),
            smoothed_rtt_max=rtts.largest / 1e6 if rtts.count else None,
            peers=peers,
        )
