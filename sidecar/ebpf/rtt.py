"""Raw TCP round-trip times per connection: five hooks behind one interface.

The hooks, in the order in which they are tried, and what each can see:

| name | where | needs | sees |
|---|---|---|---|
| `tcp_rtt_estimator` | fentry or kprobe | a kernel that did not inline it | every raw sample |
| `tcp_ack_update_rtt` | fentry or kprobe on its caller | fentry or kprobes | every raw sample |
| `tcp_probe` | raw tracepoint, `tcp_sock.rack` | BTF | raw samples, one segment late |
| `sock_ops` | BPF_SOCK_OPS_RTT_CB on a cgroup | cgroup v2 | connections opened from now on |
| `tcp_info` | sock_diag polling | nothing | the smoothed figure only |

Sources: net/ipv4/tcp_input.c, net/ipv4/tcp_recovery.c, include/trace/events/tcp.h and
include/uapi/linux/bpf.h of the Linux kernel.
"""

from __future__ import annotations

import os
import socket
import struct
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sidecar.ebpf import lanes
from sidecar.ebpf.loader import Attach, Candidate, Loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

AUTO = "auto"
POLLING = "tcp_info"
HOOKS = ("tcp_rtt_estimator", "tcp_ack_update_rtt", "tcp_probe", "sock_ops", POLLING)
"""Values of `KITTY_RTT_HOOK` besides `auto`, in the order in which they are tried."""

_SO_NETNS_COOKIE = 71  # include/uapi/asm-generic/socket.h, since 5.14
_FIRST_OCTAVE, _OCTAVES = 5, 16  # as in rtt.bpf.c
_LANES = 2 + 2 * _OCTAVES + 2  # count, sum_us, slots
_COUNTERS = 8 * _LANES
_MADE = slice(_COUNTERS, _COUNTERS + 8)  # made_ns of struct cell
_MAPPED = bytes(10) + b"\xff\xff"
_PORT_WORD = struct.Struct("=Q")

SLOT_EDGES_US: tuple[int, ...] = (
    1 << _FIRST_OCTAVE,
    *(
        edge
        for octave in range(_FIRST_OCTAVE, _FIRST_OCTAVE + _OCTAVES)
        for edge in (3 << (octave - 1), 2 << octave)
    ),
)
"""Upper edge (us, exclusive) of each slot of `RttCell.slots` but the last, which has none."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples added up; `slots` counts them by size, see `SLOT_EDGES_US`."""

    count: int
    sum_us: int
    slots: tuple[int, ...]

    @classmethod
    def unpack(cls, vector: int) -> Samples:
        """From what the probes return and callers may have added up (see `lanes`)."""
        count, total, *slots = lanes.unpack(vector, _LANES)
        return cls(count, total, tuple(slots))


def pack(us: int) -> int:
    """One sample as such a vector."""
    return 1 | us << 64 | 1 << 64 * (2 + bisect_right(SLOT_EDGES_US, us))


def peer(key: bytes) -> str:
    """The remote address of a connection's key, as text; an IPv4-mapped one as IPv4."""
    raw = key[20:]
    if not any(raw[4:]):
        return socket.inet_ntop(socket.AF_INET, raw[:4])
    if raw.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)


def local_port(key: bytes) -> int:
    """The local port of a connection's key."""
    return int.from_bytes(key[:2], "big")


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose connections count.

    Attributes:
        netns: inode number of the network namespace (that of `/proc/<pid>/ns/net`).
        netns_cookie: the kernel's cookie of the same (SO_NETNS_COOKIE); None before 5.14.
        cgroups: cgroup v2 directories of the watched processes, for `sock_ops`.
        host_network: the namespace is the node's: count only ports given by `own_ports`.
    """

    netns: int
    netns_cookie: int | None = None
    cgroups: tuple[str, ...] = ()
    host_network: bool = False

    @classmethod
    def own(cls, *, proc: str = "/proc", cgroups: Iterable[str] = ()) -> Scope:
        """The network namespace that the caller runs in."""
        cookie: int | None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                raw = probe.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
                cookie = int.from_bytes(raw, "little")
            except OSError:
                cookie = None
        inode = os.stat(os.path.join(proc, "self/ns/net")).st_ino
        return cls(inode, cookie, tuple(cgroups), in_host_network(proc=proc))


def in_host_network(*, proc: str = "/proc") -> bool:
    """Whether the caller's network namespace is the node's own.

    Settings of net/core/sysctl_net_core.c that are no namespace's appear in that one only.
    """
    return os.path.exists(os.path.join(proc, "sys/net/core/netdev_budget"))


def candidates(scope: Scope, *, hook: str = AUTO, after: str | None = None) -> list[Candidate]:
    """The ways to attach `hook` (`auto`: all of them), best first.

    Args:
        scope: whose connections count.
        hook: one of `HOOKS`, or `auto`.
        after: leave out this hook and those before it.
    """
    wanted: tuple[str, ...] = HOOKS if hook == AUTO else (hook,)
    if after is not None:
        wanted = tuple(h for h in wanted if HOOKS.index(h) > HOOKS.index(after))
    found: list[Candidate] = []
    for function, define, entry in (
        ("tcp_rtt_estimator", "HOOK_ESTIMATOR", "on_estimator"),
        ("tcp_ack_update_rtt", "HOOK_ACK", "on_ack"),
    ):
        if function in wanted:
            found += [
                _candidate(
                    scope,
                    f"fentry:{function}",
                    {define: 1, "FENTRY": 1},
                    (Attach(function, "fentry", function),),
                    _SOCK_OFFSETS,
                ),
                _candidate(
                    scope,
                    f"kprobe:{function}",
                    {define: 1},
                    (Attach(entry, "kprobe", function),),
                    _SOCK_OFFSETS,
                ),
            ]
    if "tcp_probe" in wanted:
        found.append(
            _candidate(
                scope,
                "tcp_probe",
                {"HOOK_TCP_PROBE": 1},
                (Attach("on_tcp_probe", "raw_tracepoint", "tcp_probe"),),
                {
                    **_SOCK_OFFSETS,
                    "OFF_RACK_MSTAMP": "tcp_sock.rack.mstamp",
                    "OFF_RACK_RTT": "tcp_sock.rack.rtt_us",
                },
            )
        )
    if "sock_ops" in wanted and scope.cgroups and scope.netns_cookie is not None:
        attach = tuple(Attach("on_sock_ops", "sock_ops", path) for path in scope.cgroups)
        defines = {"HOOK_SOCK_OPS": 1, "NETNS_COOKIE": scope.netns_cookie}
        found.append(_candidate(scope, "sock_ops", defines, attach))
    return found


_SOCK_OFFSETS = {
    "OFF_NET": "sock_common.skc_net.net",
    "OFF_INUM": "net.ns.inum",
    "OFF_NUM": "sock_common.skc_num",
    "OFF_DPORT": "sock_common.skc_dport",
    "OFF_FAMILY": "sock_common.skc_family",
    "OFF_SADDR": "sock_common.skc_rcv_saddr",
    "OFF_DADDR": "sock_common.skc_daddr",
    "OFF_SADDR6": "sock_common.skc_v6_rcv_saddr",
    "OFF_DADDR6": "sock_common.skc_v6_daddr",
}


def _candidate(
    scope: Scope,
    name: str,
    defines: Mapping[str, int],
    attach: tuple[Attach, ...],
    offsets: Mapping[str, str] | None = None,
) -> Candidate:
    everywhere = {"NETNS": scope.netns, **({"HOST_PORTS": 1} if scope.host_network else {})}
    return Candidate(
        name=name,
        source="rtt.bpf.c",
        attach=attach,
        maps=("cells", "ports", "smoothed"),
        defines={**everywhere, **defines},
        offsets=offsets or {},
    )


class RttProbe(Protocol):
    """A hook at work."""

    hook: str

    def raw(self) -> bool:
        """Whether samples are single measurements, not smoothed figures."""

    def read(self) -> list[tuple[bytes, int]]:
        """What was added since the last read: connection and vector (see `Samples.unpack`).

        A connection is named as `sources.sockdiag.TcpSocket.key` does: ports and addresses in
        network order, local first. Only connections with new samples are listed.
        """

    def close(self) -> None:
        """Detaches."""


class KernelProbe:
    """An attached eBPF hook. Reading costs 0.2 ms for 128 busy connections; not thread-safe.

    The kernel's map is an LRU: a busy node cannot grow it. Cells of connections that stay idle
    are taken out of it, so that reading costs what is busy now, not what once was.

    Args:
        loaded: what the loader handed over; owned from here on.
        idle_reads: a cell unchanged for that many reads leaves the map.
    """

    def __init__(self, loaded: Loaded, *, idle_reads: int = 100) -> None:
        self.hook = loaded.name
        self.ran = False
        """Whether the program did anything since the read before the latest: a connection that
        talks rarely gets a cell without a sample."""
        self._loaded = loaded
        self._cells = loaded.maps["cells"]
        self._ledger = lanes.Ledger()
        self._latest: tuple[bytes, bytes] | None = None
        self._idle_reads = idle_reads
        self._reads = 0
        self._delivered = False

    def raw(self) -> bool:
        """Whether samples are single measurements; False once one was a smoothed figure.

        Before its first sample `sock_ops` may turn out to be either.
        """
        unknown = self.hook == "sock_ops" and not self._delivered
        return not unknown and not any(self._loaded.maps["smoothed"].get(bytes(4)) or b"")

    def read(self) -> list[tuple[bytes, int]]:
        """See `RttProbe.read`."""
        ledger = self._ledger
        ledger.begin()
        self._reads += 1
        there = self._cells.content()
        grown = []
        self.ran = bool(there[0]) and there != self._latest
        if there != self._latest:
            self._latest = there
            cells = []
            for key, value in self._cells.split(there):
                cell = key + value[_MADE]
                cells.append(cell)
                growth = ledger.grown(cell, value[:_COUNTERS])
                if growth:
                    grown.append((key, growth))
            ledger.end(cells)
            self._delivered |= bool(grown)
        if self._reads % self._idle_reads == 0:
            self._let_go(ledger.idle(self._idle_reads))
        return grown

    def _let_go(self, idle: Iterable[bytes]) -> None:
        for cell in idle:
            key, made = cell[:-8], cell[-8:]
            value = self._cells.get(key)
            if value is not None and value[_MADE] == made:
                self._cells.delete(key)

    def own_ports(self, ports: Iterable[int]) -> None:
        """Says which local ports are the pod's; only used with `Scope.host_network`."""
        words: dict[int, int] = {}
        for port in ports:
            words[port >> 6] = words.get(port >> 6, 0) | 1 << (port & 63)
        table = self._loaded.maps["ports"]
        for key, view in list(table.items()):
            index = int.from_bytes(key, "little")
            if index not in words and any(view):
                words[index] = 0
        for index, bits in words.items():
            table.set(index.to_bytes(4, "little"), _PORT_WORD.pack(bits))

    def close(self) -> None:
        """Detaches."""
        self._loaded.close()


class PollingProbe:
    """The hook that needs no privilege: a smoothed figure each time data was acknowledged.

    Args:
        connections: returns, for each open connection, its key, the smoothed round-trip time (us)
            and a number that grows as the peer acknowledges data.
    """

    hook = POLLING

    def __init__(self, connections: Callable[[], Iterable[tuple[bytes, int, int]]]) -> None:
        self._connections = connections
        self._acknowledged: dict[bytes, int] = {}

    def raw(self) -> bool:
        """Never."""
        return False

    def read(self) -> list[tuple[bytes, int]]:
        """See `RttProbe.read`."""
        grown = []
        latest: dict[bytes, int] = {}
        for key, us, acknowledged in self._connections():
            latest[key] = acknowledged
            if us and acknowledged > self._acknowledged.get(key, 0):
                grown.append((key, pack(us)))
        self._acknowledged = latest
        return grown

    def close(self) -> None:
        """Nothing is attached."""
