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

import ipaddress
import logging
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sidecar.ebpf.loader import Attach, Candidate, Loaded, Loader, PassedOver, Reason, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_log = logging.getLogger(__name__)

AUTO = "auto"
POLLING = "tcp_info"
HOOKS = ("tcp_rtt_estimator", "tcp_ack_update_rtt", "tcp_probe", "sock_ops", POLLING)
"""Values of `KITTY_RTT_HOOK` besides `auto`, in the order in which they are tried."""

_SO_NETNS_COOKIE = 71  # include/uapi/asm-generic/socket.h, since 5.14
_KEY = struct.Struct("=16s16sHH")
_HEAD = struct.Struct("=QQQII")  # count, sum_us, mark, max_us, last_us
_FIRST_OCTAVE, _OCTAVES = 5, 16  # as in rtt.bpf.c
_SLOTS = struct.Struct(f"={2 * _OCTAVES + 2}I")
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


class ConnKey(NamedTuple):
    """A connection as its local end names it; IPv4-mapped IPv6 addresses appear as IPv4."""

    local: str
    local_port: int
    remote: str
    remote_port: int


class RttCell(NamedTuple):
    """What a connection's samples add up to since it was first seen.

    `slots` counts samples by size, see `SLOT_EDGES_US`.
    """

    count: int
    sum_us: int
    max_us: int
    last_us: int
    slots: tuple[int, ...]


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
    def own(
        cls, *, proc: str = "/proc", cgroups: Iterable[str] = (), host_network: bool = False
    ) -> Scope:
        """The network namespace that the caller runs in."""
        cookie: int | None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                raw = probe.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
                cookie = int.from_bytes(raw, "little")
            except OSError:
                cookie = None
        inode = os.stat(os.path.join(proc, "self/ns/net")).st_ino
        return cls(inode, cookie, tuple(cgroups), host_network)


def candidates(scope: Scope, *, hook: str = AUTO, after: str | None = None) -> list[Candidate]:
    """The ways to attach `hook` (`auto`: all of them), best first.

    Args:
        scope: whose connections count.
        hook: one of `HOOKS`, or `auto`.
        after: leave out this hook and those before it.
    """
    wanted = HOOKS if hook == AUTO else (hook,)
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
                ),
                _candidate(
                    scope, f"kprobe:{function}", {define: 1}, (Attach(entry, "kprobe", function),)
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
                    "OFF_RACK_MSTAMP": "tcp_sock.rack.mstamp",
                    "OFF_RACK_RTT": "tcp_sock.rack.rtt_us",
                },
            )
        )
    if "sock_ops" in wanted and scope.cgroups and scope.netns_cookie is not None:
        attach = tuple(Attach("on_sock_ops", "sock_ops", path) for path in scope.cgroups)
        defines = {"HOOK_SOCK_OPS": 1, "NETNS_COOKIE": scope.netns_cookie}
        found.append(_candidate(scope, "sock_ops", defines, attach, offsets=None))
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
    offsets: Mapping[str, str] | None = {},  # noqa: B006 # never written
) -> Candidate:
    everywhere = {"NETNS": scope.netns, **({"HOST_PORTS": 1} if scope.host_network else {})}
    return Candidate(
        name=name,
        source="rtt.bpf.c",
        attach=attach,
        maps=("cells", "ports", "smoothed"),
        defines={**everywhere, **defines},
        offsets={} if offsets is None else {**_SOCK_OFFSETS, **offsets},
    )


class RttProbe:
    """An attached hook: cells per connection, kept over the kernel's own bounded map.

    The kernel's map is an LRU: a busy node cannot grow it. Cells that stay idle are taken out of
    it and kept here until `forget` says that the connection is gone.

    Not thread-safe.

    Args:
        loaded: what the loader handed over; owned from here on.
        idle_reads: a cell unchanged for that many reads leaves the kernel's map.
    """

    def __init__(self, loaded: Loaded, *, idle_reads: int = 100) -> None:
        self._loaded = loaded
        self._cells = loaded.maps["cells"]
        self._idle_reads = idle_reads
        self._keys: dict[bytes, ConnKey] = {}
        self._raw: dict[ConnKey, bytes] = {}
        self._kernel: dict[bytes, tuple[bytes, int]] = {}  # content, reads since it changed
        self._base: dict[ConnKey, RttCell] = {}
        self._current: dict[ConnKey, RttCell] = {}

    @property
    def hook(self) -> str:
        """The hook's name, with the way it is attached."""
        return self._loaded.name

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """The hooks tried before it, and why each was not used."""
        return self._loaded.passed_over

    @property
    def peak_kib(self) -> int:
        """Peak resident memory of the child that loaded it."""
        return self._loaded.peak_kib

    def raw(self) -> bool:
        """Whether samples are single measurements; False once one was a smoothed figure."""
        value = self._loaded.maps["smoothed"].get(bytes(4))
        return not any(value or b"")

    def read(self) -> Mapping[ConnKey, RttCell]:
        """Totals of every connection seen so far; cheap enough for every 100 ms."""
        kernel, current = self._kernel, self._current
        idle: list[bytes] = []
        for key, view in self._cells.items():
            content = bytes(view)
            before = kernel.get(key)
            if before is not None and before[0] == content:
                reads = before[1] + 1
                kernel[key] = (content, reads)
                if reads >= self._idle_reads:
                    idle.append(key)
                continue
            kernel[key] = (content, 0)
            connection = self._keys.get(key) or self._name(key)
            current[connection] = _cell(content, self._base.get(connection))
        for key in idle:
            self._cells.delete(key)
            del kernel[key]
            connection = self._keys[key]
            self._base[connection] = current[connection]
        return current

    def forget(self, gone: Iterable[ConnKey]) -> None:
        """Drops closed connections: their totals are the caller's from here on."""
        for connection in gone:
            key = self._raw.pop(connection, None)
            self._current.pop(connection, None)
            self._base.pop(connection, None)
            if key is not None:
                del self._keys[key]
                if self._kernel.pop(key, None) is not None:
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

    def _name(self, key: bytes) -> ConnKey:
        local, remote, local_port, remote_port = _KEY.unpack(key)
        name = ConnKey(_address(local), local_port, _address(remote), remote_port)
        self._keys[key] = name
        self._raw[name] = key
        return name


def _address(raw: bytes) -> str:
    if raw.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return ipaddress.IPv6Address(raw).compressed


def _cell(content: bytes, base: RttCell | None) -> RttCell:
    count, total, _, most, last = _HEAD.unpack_from(content)
    slots = _SLOTS.unpack_from(content, _HEAD.size)
    if base is None:
        return RttCell(count, total, most, last, slots)
    if not count:
        return base
    return RttCell(
        base.count + count,
        base.sum_us + total,
        max(base.max_us, most),
        last,
        tuple(a + b for a, b in zip(base.slots, slots, strict=True)),
    )
