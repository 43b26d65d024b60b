"""The join of sockets and ranks over minutes of rounds, which a real kernel would take as long for.

The kernel's answers are made here; real ones are in test_sockets.py.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.attribution import PodView, attribute
from sidecar.config import Config
from sidecar.sources.descriptors import DescriptorTable
from sidecar.sources.processes import Process
from sidecar.sources.sockdiag import ESTABLISHED, TcpSocket
from sidecar.sources.sockets import (
    BUSIER,
    CANDIDATES,
    HALVING,
    MISSING,
    OTHER,
    PEERS,
    WALK_EVERY,
    RankSockets,
    SocketTable,
)
from tests.sidecar.fixture import Fixture


class Kernel:
    """What SocketTable asks of SockDiag."""

    def __init__(self) -> None:
        self.open: dict[int, TcpSocket] = {}
        self.ended: list[TcpSocket] = []
        self.overruns = 0

    def sockets(self) -> list[TcpSocket]:
        return list(self.open.values())

    def closed(self) -> Iterator[TcpSocket]:
        ended, self.ended = self.ended, []
        yield from ended

    def set(self, cookie: int, received: int, *, peer: str = "10.0.0.2", inode: int = 0) -> None:
        """Lets a socket have received so many bytes."""
        info = bytearray(232)
        struct.pack_into("=Q", info, 128, received)
        self.open[cookie] = TcpSocket(
            family=socket.AF_INET,
            state=ESTABLISHED,
            ports=struct.pack(">HH", 5001, 40000 + cookie % 20000),
            local=socket.inet_aton("10.0.0.1").ljust(16, b"\0"),
            remote=socket.inet_aton(peer).ljust(16, b"\0"),
            cookie=cookie,
            receive_queue=0,
            send_queue=0,
            inode=inode or cookie,
            info=bytes(info),
        )

    def end(self, cookie: int) -> None:
        """Closes a socket; its final counters are those that it has."""
        self.ended.append(self.open.pop(cookie)._replace(inode=0))


class Pod:
    """Ranks 0, 1, ... as processes 10, 11, ..., and a table over their sockets."""

    def __init__(self, folder: Path, ranks: int = 1, **options: Any) -> None:
        self.fixture = Fixture(folder / "machine")
        self.kernel = Kernel()
        self.processes = [
            Process(pid=10 + n, ppid=1, start=n, container="/c", watch=True, rank=str(n))
            for n in range(ranks)
        ]
        for process in self.processes:
            self.fixture.process(process.pid)
        self.view: PodView = attribute(self.processes, Config())
        self.descriptors = DescriptorTable(str(self.fixture.proc))
        self.table = SocketTable(
            self.kernel,  # type: ignore[arg-type] # as far as the table uses it
            self.descriptors,
            view=lambda: self.view,
            **options,
        )

    def hold(self, rank: int, *inodes: int) -> None:
        """Gives the rank's process sockets."""
        for inode in inodes:
            self.fixture.descriptor(10 + rank, inode, f"socket:[{inode}]")

    def rounds(self, count: int = 1) -> dict[str, RankSockets]:
        """Reads so many times; returns the latest."""
        for _ in range(count):
            self.table.refresh()
        assert self.table.snapshot is not None
        return dict(self.table.snapshot.ranks)


def received(ranks: dict[str, RankSockets]) -> dict[str, int]:
    return {name: ranked.totals[2] for name, ranked in ranks.items()}


def test_an_inherited_socket_is_its_oldest_holders(tmp_path: Path) -> None:
    pod = Pod(tmp_path, ranks=2)
    pod.hold(0, 77)
    pod.hold(1, 77)
    pod.kernel.set(77, 500)
    assert received(pod.rounds()) == {"0": 500}


@pytest.mark.parametrize(
    ("ranks", "shared", "expected"), [(1, False, "0"), (2, False, ""), (1, True, None)]
)
def test_without_the_right_to_look_into_processes(
    tmp_path: Path, ranks: int, shared: bool, expected: str | None
) -> None:
    """All is the only rank's, else the pod's; in the machine's namespace nobody can tell."""
    pod = Pod(tmp_path, ranks=ranks, shared=shared)
    pod.descriptors.walk = lambda pids: setattr(pod.descriptors, "denied", True)  # type: ignore[method-assign] # root is denied nothing
    pod.kernel.set(77, 500)
    assert received(pod.rounds()) == ({} if expected is None else {expected: 500})


def test_a_socket_passed_on_without_any_other_change(tmp_path: Path) -> None:
    pod = Pod(tmp_path, ranks=2)
    pod.hold(0, 77)
    pod.kernel.set(77, 500)
    pod.rounds()
    (pod.fixture.proc / "10/fd/77").unlink()
    pod.hold(1, 77)
    pod.rounds(WALK_EVERY)
    pod.kernel.set(77, 600)
    assert received(pod.rounds()) == {"0": 500, "1": 100}


def test_a_process_that_comes_takes_its_sockets_from_their_beginning(tmp_path: Path) -> None:
    pod = Pod(tmp_path, ranks=2)
    pod.view = attribute(pod.processes[:1], Config())
    pod.kernel.set(77, 500)
    assert received(pod.rounds()) == {}
    pod.kernel.set(77, 800)
    pod.rounds()
    pod.hold(1, 77)
    pod.view = attribute(pod.processes, Config())
    assert received(pod.rounds()) == {"1": 800}


def test_one_that_the_kernel_lists_again_counts_once(tmp_path: Path) -> None:
    """A dump may miss sockets while others come and go."""
    pod = Pod(tmp_path)
    pod.hold(0, 77)
    pod.kernel.set(77, 500)
    pod.rounds()
    kept = pod.kernel.open.pop(77)
    assert pod.rounds(5)["0"].closed_unread == 1
    pod.kernel.open[77] = kept
    ranks = pod.rounds(2)
    assert (received(ranks), ranks["0"].closed_unread) == ({"0": 500}, 1)
    pod.kernel.end(77)
    ranks = pod.rounds(5)
    assert received(ranks) == {"0": 500}
    assert (ranks["0"].closed_read, ranks["0"].closed_unread) == (0, 1)


def test_what_is_remembered_of_lost_sockets_is_bounded(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    for cookie in range(1, MISSING + 500):
        pod.kernel.set(cookie, 5)
    pod.rounds()
    pod.kernel.open.clear()
    pod.rounds(4)
    assert len(pod.table._missing) == MISSING
    assert not pod.table._open


def test_series_go_to_the_peers_that_are_busy_now(tmp_path: Path) -> None:
    """After a restart of the job all of its addresses are new."""
    pod = Pod(tmp_path)
    peers = [f"10.1.0.{n}" for n in range(PEERS)]
    pod.hold(0, *range(100, 100 + PEERS), 200)
    for n, peer in enumerate(peers):
        pod.kernel.set(100 + n, 1 << 30, peer=peer)
    assert pod.rounds()["0"].peers.keys() == set(peers)
    sent = 0
    for _ in range(HALVING * 16):
        sent += BUSIER // 8
        pod.kernel.set(200, sent, peer="10.2.0.1")
        ranks = pod.rounds()
    traffic = ranks["0"].peers
    assert "10.2.0.1" in traffic
    assert len(traffic) == PEERS + 1
    assert sum(each.totals[2] for each in traffic.values()) == (PEERS << 30) + sent
    assert received(ranks) == {"0": (PEERS << 30) + sent}


def test_peers_of_a_moment_make_room(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.hold(0, *range(1, PEERS + 1 + CANDIDATES + 500), 9000)
    for n in range(1, PEERS + 1 + CANDIDATES + 400):
        pod.kernel.set(n, 100, peer=f"10.{n >> 8}.{n & 255}.9")
    pod.rounds()
    for n in list(pod.kernel.open):
        pod.kernel.end(n)
    assert OTHER in pod.rounds()["0"].peers
    pod.rounds(HALVING * 8)
    pod.kernel.set(9000, 10 * BUSIER, peer="10.99.0.1")
    pod.rounds()
    pod.kernel.set(9000, 20 * BUSIER, peer="10.99.0.1")
    assert pod.rounds()["0"].peers["10.99.0.1"].totals[2] == 10 * BUSIER


def test_a_quiet_mesh_keeps_its_series(tmp_path: Path) -> None:
    """More peers than series, all alike: which have one must not change every round."""
    pod = Pod(tmp_path)
    count = 2 * PEERS
    pod.hold(0, *range(100, 100 + count))
    chosen = None
    for turn in range(1, 3 * HALVING):
        for n in range(count):
            pod.kernel.set(100 + n, turn * 1000 + n, peer=f"10.1.0.{n}")
        peers = pod.rounds()["0"].peers.keys()
        chosen = chosen or peers
        assert peers == chosen


def test_lost_closings_are_told(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.kernel.overruns = 3
    pod.rounds()
    assert pod.table.snapshot is not None
    assert pod.table.snapshot.overruns == 3


def test_a_socket_that_is_connected_to_another_peer(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.hold(0, 77)
    pod.kernel.set(77, 500, peer="10.0.0.2")
    pod.rounds()
    pod.kernel.set(77, 30, peer="10.0.0.3")
    peers = pod.rounds()["0"].peers
    assert {peer: traffic.totals[2] for peer, traffic in peers.items()} == {
        "10.0.0.2": 500,
        "10.0.0.3": 30,
    }
