"""Round-trip times by each hook that this kernel has, on real connections."""

import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.ebpf import lanes, loader, rtt
from sidecar.ebpf.selection import SILENT_DUMPS, HookSelection
from sidecar.sources.cgroup_mounts import CgroupFS
from sidecar.sources.procfs import ProcFS
from sidecar.sources.sockdiag import LISTEN, SockDiag
from sidecar.sources.sockets import ZERO, RankSockets, SocketSnapshot
from tests.sidecar.sandbox import Sandbox, inside

EXCHANGES = 50
SPACING_S = 0.0005
"""From one counted segment of a connection to the next, at least, where the hook is `tcp_probe`."""
APART_S = 0.0025
"""Between exchanges: `tcp_probe` looks at eight segments in a jiffy, which may be 10 ms long."""
CELLS = 4096
"""That the kernel's map holds."""
FAMILIES = {
    "IPv4": (socket.AF_INET, "127.0.0.1", socket.AF_INET, "127.0.0.1"),
    "IPv6": (socket.AF_INET6, "::1", socket.AF_INET6, "::1"),
    "IPv4 to an IPv6 listener": (socket.AF_INET6, "::", socket.AF_INET, "127.0.0.1"),
}


def own_cgroup() -> tuple[str, ...]:
    """The cgroup v2 directory of this process, as far as a mount shows it."""
    found = CgroupFS().unified(os.getpid(), ProcFS().cgroup(os.getpid()))
    return (found,) if found else ()


class Talk:
    """A connection of two ends in one namespace; `run` exchanges small messages."""

    def __init__(self, pid: int, family: str = "IPv4") -> None:
        kind, bound, caller, called = FAMILIES[family]

        def connect() -> tuple[socket.socket, socket.socket]:
            with socket.socket(kind) as listener:
                listener.bind((bound, 0))
                listener.listen()
                near = socket.socket(caller)
                near.connect((called, listener.getsockname()[1]))
                return near, listener.accept()[0]

        self.near, self.far = inside(pid, connect)

    def run(self, exchanges: int = EXCHANGES, *, apart_s: float = APART_S) -> None:
        for _ in range(exchanges):
            self.near.sendall(b"x" * 500)
            self.far.recv(1000)
            self.far.sendall(b"y")
            self.near.recv(10)
            time.sleep(apart_s)

    def close(self) -> None:
        self.near.close()
        self.far.close()


def scope(sandbox: Sandbox, **other: object) -> rtt.Scope:
    def own() -> int:
        with socket.socket() as probe:
            return int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, 71, 8), "little")

    # The connections are made by this process, whose cgroup is the one that counts.
    return rtt.Scope(
        netns=os.stat(f"/proc/{sandbox.init}/ns/net").st_ino,
        netns_cookie=inside(sandbox.init, own),
        cgroups=own_cgroup(),
        **other,  # type: ignore[arg-type]
    )


@pytest.fixture(params=["tcp_ack_update_rtt", "tcp_probe", "sock_ops"])
def probe(
    request: pytest.FixtureRequest, load: loader.Loader, sandbox: Sandbox
) -> Iterator[rtt.KernelProbe]:
    candidates = rtt.candidates(scope(sandbox), hook=request.param)
    if not candidates:
        pytest.skip("no cgroup v2 is mounted")
    [result] = load.load(candidates)
    if isinstance(result, loader.Refused):
        pytest.skip(f"not on this kernel: {result.detail}")
    made = rtt.KernelProbe(result, idle_reads=3)
    yield made
    made.close()


def total(grown: list[tuple[bytes, int]]) -> rtt.Samples:
    return rtt.Samples.unpack(sum(growth for _, growth in grown))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_exchange_is_a_sample_of_its_connection(
    probe: rtt.KernelProbe, sandbox: Sandbox, family: str
) -> None:
    talk = Talk(sandbox.init, family)
    talk.run()
    grown = probe.read()
    diag = SockDiag()
    keys = {sock.key for sock in inside(sandbox.init, diag.sockets) if sock.state != LISTEN}
    diag.close()
    assert {key for key, _ in grown} == keys
    for key, growth in grown:
        samples = rtt.Samples.unpack(growth)
        # The last sample may wait for the next segment; the handshake may give one more.
        assert EXCHANGES - 3 <= samples.count <= EXCHANGES + 2
        assert sum(samples.slots) == samples.count
        edges = (0, *rtt.SLOT_EDGES_US)
        assert samples.sum_us >= sum(
            count * edge for count, edge in zip(samples.slots, edges, strict=True)
        )
        assert samples.sum_us <= sum(
            count * edge
            for count, edge in zip(samples.slots, (*rtt.SLOT_EDGES_US, 1 << 32), strict=True)
        )
        assert rtt.peer(key) == ("::1" if family == "IPv6" else "127.0.0.1")
    assert {rtt.local_port(key) for key in keys} == {
        talk.near.getsockname()[1],
        talk.far.getsockname()[1],
    }
    assert probe.raw()
    assert probe.read() == []
    talk.close()


def test_a_busy_connection_is_sampled(load: loader.Loader, sandbox: Sandbox) -> None:
    [loaded] = load.load(rtt.candidates(scope(sandbox), hook="tcp_probe"))
    assert isinstance(loaded, loader.Loaded)
    probe = rtt.KernelProbe(loaded)
    talk = Talk(sandbox.init)
    began = time.monotonic()
    moments = {0}
    for _ in range(5000):
        talk.run(1, apart_s=0)
        moments.add(int((time.monotonic() - began) / 0.02))
    most = (time.monotonic() - began) / SPACING_S + 1
    grown = probe.read()
    assert len(grown) == 2
    for _, growth in grown:
        # Sampled throughout: 20 ms hold a whole jiffy, and each jiffy has its first segments.
        assert len(moments) / 2 <= rtt.Samples.unpack(growth).count <= min(most, 5000)
    talk.close()
    probe.close()


def test_another_namespace_is_not_seen(
    probe: rtt.KernelProbe, sandbox: Sandbox, other: Sandbox
) -> None:
    elsewhere, here = Talk(other.init), Talk(sandbox.init)
    elsewhere.run()
    assert probe.read() == []
    ends = {end.getsockname()[1] for end in (here.near, here.far)}
    for talk in (here, elsewhere, here):
        talk.run()
    assert {rtt.local_port(key) for key, _ in probe.read()} == ends
    elsewhere.close()
    here.close()


def test_an_idle_connection_leaves_the_map_and_comes_back(
    probe: rtt.KernelProbe, sandbox: Sandbox
) -> None:
    talk = Talk(sandbox.init)
    talk.run()
    before = total(probe.read()).count
    for _ in range(8):
        assert probe.read() == []
    assert list(probe._cells.items()) == []
    time.sleep(2.1)  # by now a sample of before is stale
    talk.run()
    after = total(probe.read()).count
    assert abs(after - before) <= 3
    talk.close()


def test_of_the_nodes_own_network_only_the_pods_ports_count(
    load: loader.Loader, sandbox: Sandbox
) -> None:
    [loaded] = load.load(rtt.candidates(scope(sandbox, host_network=True), hook="tcp_probe"))
    assert isinstance(loaded, loader.Loaded)
    probe = rtt.KernelProbe(loaded)
    ours, theirs = Talk(sandbox.init), Talk(sandbox.init)
    port, later = ours.near.getsockname()[1], theirs.near.getsockname()[1]
    probe.own_ports([port])
    for talk in (ours, theirs):
        talk.run()
    assert {rtt.local_port(key) for key, _ in probe.read()} == {port}
    probe.own_ports([later])
    for talk in (ours, theirs):
        talk.run()
    assert {rtt.local_port(key) for key, _ in probe.read()} == {later}
    for talk in (ours, theirs):
        talk.close()
    probe.close()


def test_connections_from_before_the_attach_are_seen(load: loader.Loader, sandbox: Sandbox) -> None:
    talk = Talk(sandbox.init)
    talk.run()
    [loaded] = load.load(rtt.candidates(scope(sandbox), hook="tcp_probe"))
    assert isinstance(loaded, loader.Loaded)
    probe = rtt.KernelProbe(loaded)
    talk.run()
    assert total(probe.read()).count >= 2 * EXCHANGES - 6
    talk.close()
    probe.close()


def test_candidates_keep_the_order_and_the_choice() -> None:
    everywhere = rtt.Scope(1, 1, ("/sys/fs/cgroup",))
    names = [candidate.name for candidate in rtt.candidates(everywhere)]
    assert names == [
        "fentry:tcp_rtt_estimator",
        "kprobe:tcp_rtt_estimator",
        "fentry:tcp_ack_update_rtt",
        "kprobe:tcp_ack_update_rtt",
        "tcp_probe",
        "sock_ops",
    ]
    after = [c.name for c in rtt.candidates(everywhere, after="tcp_ack_update_rtt")]
    assert after == ["tcp_probe", "sock_ops"]
    assert [c.name for c in rtt.candidates(everywhere, hook="sock_ops")] == ["sock_ops"]
    assert rtt.candidates(everywhere, hook="tcp_info") == []
    assert rtt.candidates(rtt.Scope(1), hook="sock_ops") == []


@given(st.integers(0, 1 << 32))
def test_a_packed_sample(us: int) -> None:
    samples = rtt.Samples.unpack(rtt.pack(us))
    assert (samples.count, samples.sum_us, sum(samples.slots)) == (1, us, 1)
    slot = samples.slots.index(1)
    assert slot == len(rtt.SLOT_EDGES_US) or us < rtt.SLOT_EDGES_US[slot]
    assert slot == 0 or us >= rtt.SLOT_EDGES_US[slot - 1]


def test_polling_counts_when_data_was_acknowledged() -> None:
    rounds = [
        [(b"a", 100, 5), (b"b", 0, 9)],
        [(b"a", 100, 5), (b"b", 70, 10)],
        [(b"a", 300, 6)],
        [],
    ]
    turn = iter(rounds)
    probe = rtt.PollingProbe(lambda: next(turn))
    seen = [
        [(key, rtt.Samples.unpack(growth).sum_us) for key, growth in probe.read()] for _ in rounds
    ]
    assert seen == [[(b"a", 100)], [(b"b", 70)], [(b"a", 300)], []]
    assert not probe.raw()


class Later(loader.Loader):
    """Finds nothing before `sock_ops`, as on a kernel without the other hooks."""

    def load(self, *groups: object) -> list[loader.Loaded | loader.Refused]:
        [group] = groups
        left = [c for c in group if c.name == "sock_ops"]  # type: ignore[attr-defined]
        return super().load(left) if left else [loader.Refused(loader.Reason.UNSUPPORTED, "none")]


def finished(selection: HookSelection) -> rtt.RttProbe | None:
    for thread in threading.enumerate():
        if thread.name == "rtt-loader":
            thread.join()
    return selection.probe()


def test_a_hook_that_delivers_nothing_gives_way(load: loader.Loader, sandbox: Sandbox) -> None:
    if not own_cgroup():
        pytest.skip("no cgroup v2 is mounted")
    sent = 0

    def snapshot() -> SocketSnapshot:
        ranks = {"0": RankSockets(totals=ZERO._replace(delivered_bytes=sent))}
        return SocketSnapshot(send_queue=0, ranks=ranks, rank_of={}, info_length=224)

    selection = HookSelection(Later(), hook="auto", cgroups=own_cgroup, snapshot=snapshot)
    selection.probe()
    probe = finished(selection)
    assert probe is not None
    assert probe.hook == "sock_ops"
    for _ in range(5 * SILENT_DUMPS):  # no traffic: silence is right
        selection.watch(delivered=False)
    assert selection.probe() is probe
    for _ in range(SILENT_DUMPS + 1):
        sent += 1000
        selection.watch(delivered=False)
    assert selection.probe() is probe or selection.probe().hook == "tcp_info"  # type: ignore[union-attr]
    polling = finished(selection)
    assert polling is not None
    assert polling.hook == "tcp_info"
    assert selection.passed_over["sock_ops"].reason == loader.Reason.SILENT
    selection.close()


def test_containers_that_come_later_get_their_hook(load: loader.Loader) -> None:
    if not own_cgroup():
        pytest.skip("no cgroup v2 is mounted")
    now, visible = 0.0, tuple[str, ...]()
    empty = SocketSnapshot(send_queue=0, ranks={}, rank_of={}, info_length=224)
    selection = HookSelection(
        Later(),
        hook="auto",
        cgroups=lambda: visible,
        snapshot=lambda: empty,
        clock=lambda: now,
    )
    selection.probe()
    probe = finished(selection)
    assert probe is not None
    assert probe.hook == "tcp_info"
    visible = own_cgroup()
    now = 30.0
    assert selection.probe() is probe  # at work while the other is loaded
    probe = finished(selection)
    assert probe is not None
    assert probe.hook == "sock_ops"
    now = 60.0
    assert selection.probe() is probe
    assert finished(selection) is probe  # the same containers: nothing to load
    again = Path(own_cgroup()[0], "kitty-test-again")
    again.mkdir()
    try:
        visible, now = (str(again),), 90.0
        assert selection.probe() is probe
        anew = finished(selection)
        assert anew is not probe
        assert anew is not None
        assert anew.hook == "sock_ops"
        selection.close()
    finally:
        again.rmdir()


def test_lanes_of_samples_do_not_touch() -> None:
    add: Callable[[int], int] = rtt.pack
    vector = sum(add(us) for us in (10, 10, 40, 5_000_000))
    samples = rtt.Samples.unpack(vector)
    assert (samples.count, samples.slots[0], samples.slots[1], samples.slots[-1]) == (4, 2, 1, 1)
    assert lanes.first(vector) == 4


def test_more_connections_than_the_map_holds(load: loader.Loader, sandbox: Sandbox) -> None:
    """A cell that made room and came back counts from zero, not from what it had before."""
    result = load.load(rtt.candidates(scope(sandbox), hook="tcp_probe"))[0]
    if isinstance(result, loader.Refused):
        pytest.skip(f"not on this kernel: {result.detail}")
    probe = rtt.KernelProbe(result)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))

    def connect() -> list[tuple[socket.socket, socket.socket]]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return [
                (socket.create_connection(server.getsockname()), server.accept()[0])
                for _ in range(CELLS // 2 + 300)  # both ends of each have a cell
            ]

    pairs = inside(sandbox.init, connect)
    for turn in range(4):
        for near, far in pairs:
            for end, other in ((near, far), (far, near)) * (1 + turn % 2):
                end.sendall(b"x")
                other.recv(1)
        for _, growth in probe.read():
            samples = rtt.Samples.unpack(growth)
            assert 1 <= samples.count == sum(samples.slots) <= 8
    for pair in pairs:
        for end in pair:
            end.close()
    probe.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def narrow(near: Sandbox, router: Sandbox, far: Sandbox, rate: str) -> str | None:
    """Joins two namespaces by a router whose link to the far one is slow; says why not."""
    for end, name in ((near, "n0"), (far, "f0")):
        ends = ("netns", str(end.init), "type", "veth", "peer", "name", name)
        subprocess.run(["ip", "link", "add", "e0", *ends, "netns", str(router.init)], check=True)
    for sandbox, network in ((near, 1), (far, 2)):
        sandbox.run("ip", "address", "add", f"10.77.{network}.1/24", "dev", "e0")
        sandbox.run("ip", "link", "set", "e0", "up")
        sandbox.run("ip", "route", "add", "default", "via", f"10.77.{network}.254")
    for name, network in (("n0", 1), ("f0", 2)):
        router.run("ip", "address", "add", f"10.77.{network}.254/24", "dev", name)
        router.run("ip", "link", "set", name, "up")
    router.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    shape = ("tbf", "rate", rate, "burst", "32k", "latency", "800ms")
    try:
        router.run("tc", "qdisc", "add", "dev", "f0", "root", *shape)
    except subprocess.CalledProcessError as error:
        return f"no tbf: {error.stderr}"
    return None


def test_a_burst_counts_from_its_first_to_its_last_segment(
    load: loader.Loader, sandbox: Sandbox, other: Sandbox
) -> None:
    """All of a burst is sent at once: what a slow link behind a router adds comes one by one."""
    router = Sandbox()
    try:
        why_not = narrow(sandbox, router, other, "100mbit")
        if why_not:
            pytest.skip(why_not)
        [loaded] = load.load(rtt.candidates(scope(sandbox), hook="tcp_probe"))
        if isinstance(loaded, loader.Refused):
            pytest.skip(f"not on this kernel: {loaded.detail}")
        probe = rtt.KernelProbe(loaded)
        listener = inside(other.init, lambda: socket.create_server(("10.77.2.1", 0)))
        place = listener.getsockname()

        def connect() -> socket.socket:
            made = socket.socket()
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # does not pace
            made.connect(place)
            return made

        near = inside(sandbox.init, connect)
        far, _ = listener.accept()
        size = 1 << 18  # takes 20 ms
        for turn in range(60):
            sender = threading.Thread(target=near.sendall, args=(bytes(size),))
            sender.start()
            left = size
            while left:
                left -= len(far.recv(1 << 16))
            sender.join()
            far.sendall(b"y")
            near.recv(1)
            time.sleep(0.05)
            if turn == 29:  # by now the window holds a whole burst
                probe.read()
        samples = total(probe.read())
        for end in (near, far, listener):
            end.close()
        probe.close()
        # From nothing to 20 ms, evenly: the mean is near the middle.
        assert samples.sum_us / samples.count > 5000
    finally:
        router.close()
