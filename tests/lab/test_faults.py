"""Each fault is seen by means that are not kitty's, and leaves the other pods alone."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import pytest

from lab.cluster import Cluster, Pod
from lab.commands import run
from lab.faults import (
    KINDS,
    contention,
    has_netem,
    loss,
    netem_latency,
    netem_loss,
    nftables_loss,
    pause,
    quota,
    relay_latency,
    throttle,
    trainer_threads,
    training_cgroup,
)
from lab.signals import SIGNALS

PROBE = Path(__file__).parent / "probe.py"
Probe = Callable[..., dict[str, float]]


def pods_of(cluster: Cluster) -> tuple[Pod, Pod, Pod]:
    hit, peer, other = cluster.pods
    return hit, peer, other


def links_of(cluster: Cluster) -> str:
    """Links, queues and rules of the lab and of every pod, without counters."""
    text = run("ip", "-o", "link") + run("tc", "qdisc") + run("nft", "list", "ruleset")
    for pod in cluster.pods:
        text += pod.link.on_pod("tc", "qdisc") + pod.link.on_pod("nft", "list", "ruleset")
    return text


def process_field(pid: int, name: str) -> str:
    match = re.search(rf"^{name}:\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def waiting_for_each_second_run(pod: Pod, work: Callable[[], object]) -> float:
    """Time in the run queue over time on a processor (/proc/<pid>/schedstat) during some work."""
    path = Path(f"/proc/{pod.containers['probe'].pid}/schedstat")
    ran, waited = map(int, path.read_text().split()[:2])
    work()
    ran_then, waited_then = map(int, path.read_text().split()[:2])
    return (waited_then - waited) / (ran_then - ran)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def test_every_fault_names_signals_that_exist() -> None:
    for kind in KINDS.values():
        assert kind.signals
        assert set(kind.signals) <= set(SIGNALS)


def test_the_relay_delays_every_round_trip_of_its_pod_and_of_no_other(
    cluster: Cluster, probe: Probe
) -> None:
    hit, peer, other = pods_of(cluster)
    before = links_of(cluster)
    with relay_latency(cluster, hit, 50):
        assert probe(peer, hit, pings=10)["shortest"] >= 0.050
        assert probe(hit, other, pings=10)["shortest"] >= 0.050
        assert probe(peer, other)["shortest"] < 0.040
    assert probe(peer, hit)["shortest"] < 0.040
    assert links_of(cluster) == before


def test_the_relay_carries_a_stream_whole(cluster: Cluster, probe: Probe) -> None:
    hit, peer, _ = pods_of(cluster)
    with relay_latency(cluster, hit, 5):
        out = probe(hit, peer, send=4 << 20)
        back = probe(peer, hit, send=4 << 20)
    assert out["intact"]
    assert back["intact"]
    assert out["again"] <= 0.01 * out["segments"]  # nothing dropped, nothing out of order


def test_a_connection_lives_through_the_relay_coming_and_going(cluster: Cluster) -> None:
    hit, peer, _ = pods_of(cluster)
    results = cluster.directory / "through.json"
    with results.open("wb") as output:
        through = peer.sandbox.start(
            [sys.executable, str(PROBE), "ask", hit.link.address, "300", "0"],
            env=peer.helper_env,
            cgroup=peer.cgroup.child("asks"),
            output=output,
        )
    with relay_latency(cluster, hit, 20):
        time.sleep(0.5)
    assert through.wait(60)
    assert through.exit_status() == 0
    trips = json.loads(results.read_text())
    assert trips["shortest"] < 0.020


def test_nftables_drops_frames_at_both_ends(cluster: Cluster, probe: Probe) -> None:
    hit, peer, other = pods_of(cluster)
    before = links_of(cluster)
    with nftables_loss(hit, 5):
        out = probe(hit, peer, send=8 << 20)
        back = probe(peer, hit, send=8 << 20)
        # A hiccup of the machine makes a sender repeat one whole window; the fault would hit each.
        others = min((probe(peer, other, send=8 << 20) for _ in range(3)), key=itemgetter("again"))
        for rules in (run("nft", "list", "ruleset"), hit.link.on_pod("nft", "list", "ruleset")):
            assert sum(map(int, re.findall(r"counter packets (\d+)", rules))) > 0
    for direction in (out, back):
        assert direction["intact"]
        assert direction["again"] > 0.02 * direction["segments"]
    assert others["again"] < 0.02 * others["segments"]
    assert links_of(cluster) == before


def test_the_throttle_bounds_what_its_pod_sends(cluster: Cluster, probe: Probe) -> None:
    hit, peer, other = pods_of(cluster)
    before = links_of(cluster)
    with throttle(cluster, hit, 20):
        out = probe(hit, peer, send=4 << 20)
        for pod in (peer, other):
            assert "tbf" not in pod.link.on_pod("tc", "qdisc")
    assert out["intact"]
    assert out["bits_per_second"] < 21e6
    assert probe(hit, peer, send=4 << 20)["bits_per_second"] > out["bits_per_second"]
    assert links_of(cluster) == before


def test_contention_binds_the_trainer_to_a_busy_core_and_frees_it(
    cluster: Cluster, probe: Probe
) -> None:
    hit, peer, other = pods_of(cluster)
    trainer, neighbour = hit.containers["probe"].pid, peer.containers["probe"].pid
    free = os.sched_getaffinity(trainer)
    before = set(run(*hit.sandbox.inside("ps", "-e", "-o", "pid=")).split())
    with contention(cluster, hit, 3):
        assert os.sched_getaffinity(trainer) == {max(free)}
        assert os.sched_getaffinity(neighbour) == free
        while run(*hit.sandbox.inside("ps", "-e", "-o", "args=")).count("while :") != 3:
            time.sleep(0.05)
        assert "while :" not in run(*other.sandbox.inside("ps", "-e", "-o", "args="))
        waited = waiting_for_each_second_run(hit, lambda: probe(peer, hit, send=32 << 20))
    assert waited > 1.5
    assert os.sched_getaffinity(trainer) == free
    after = set(run(*hit.sandbox.inside("ps", "-e", "-o", "pid=")).split())
    assert len(after) == len(before)


def cpu_events(pod: Pod) -> dict[str, int]:
    """The kernel's own count of periods and throttled periods (cpu.stat, both versions)."""
    for directory in training_cgroup(pod).directories():
        if (directory / "cpu.stat").exists():
            pairs = (line.split() for line in (directory / "cpu.stat").read_text().splitlines())
            found = {name: int(value) for name, value in pairs}
            if "nr_throttled" in found:
                return found
    raise AssertionError("no cpu.stat with throttled periods")


def test_a_quota_holds_its_container_back_and_no_other(cluster: Cluster, probe: Probe) -> None:
    hit, peer, other = pods_of(cluster)
    if not training_cgroup(hit).has("cpu"):
        pytest.skip("no cgroup hierarchy with the cpu controller can be written")
    before = {pod.name: cpu_events(pod)["nr_throttled"] for pod in cluster.pods}
    with quota(cluster, hit, 5):
        probe(peer, hit, send=16 << 20)  # whose digest takes some 50 ms of processor time
        probe(peer, other, send=16 << 20)
    held = cpu_events(hit)["nr_throttled"]
    assert held > before[hit.name] + 2
    for pod in (peer, other):
        assert cpu_events(pod)["nr_throttled"] == before[pod.name]
    probe(peer, hit, send=16 << 20)
    assert cpu_events(hit)["nr_throttled"] <= held + 1  # the period in which it was lifted


def test_a_pause_stops_the_trainer_alone_and_lets_it_go_on(cluster: Cluster, probe: Probe) -> None:
    hit, peer, other = pods_of(cluster)
    trainer = hit.containers["probe"].pid
    with pause(cluster, hit, 100):
        assert eventually(lambda: process_field(trainer, "State").startswith("T"))
        for pod in (peer, other):
            assert not process_field(pod.containers["probe"].pid, "State").startswith("T")
    assert probe(peer, hit, pings=3)["shortest"] < 1
    assert trainer_threads(hit) == [trainer]


def test_a_pause_of_half_of_the_time_alternates(cluster: Cluster) -> None:
    hit, _, _ = pods_of(cluster)
    trainer = hit.containers["probe"].pid
    with pause(cluster, hit, 50):
        for letter in ("T", "S", "T"):
            assert eventually(lambda: process_field(trainer, "State").startswith(letter))  # noqa: B023


def test_a_fault_ends_also_when_what_it_surrounds_fails(cluster: Cluster) -> None:
    hit, _, _ = pods_of(cluster)
    before = links_of(cluster)
    # Whoever starts the tests in the background has them ignore the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for fault in (relay_latency(cluster, hit, 10), loss(cluster, hit, 1)):
            with pytest.raises(KeyboardInterrupt), fault:  # noqa: PT012 -- the signal may come late
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert links_of(cluster) == before


def test_netem_delays_and_drops_where_the_kernel_has_it(cluster: Cluster, probe: Probe) -> None:
    if not has_netem():
        pytest.skip("this kernel has no netem queue; the relay and nftables stand in for it")
    hit, peer, _ = pods_of(cluster)
    before = links_of(cluster)
    with netem_latency(hit, 50):
        assert probe(peer, hit, pings=10)["shortest"] >= 0.050
    with netem_loss(hit, 5):
        out = probe(hit, peer, send=8 << 20)
        assert out["again"] > 0.02 * out["segments"]
    assert links_of(cluster) == before
