"""Devices and addresses of a real network namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.collectors.netdev import NetdevCollector
from sidecar.config import Config
from sidecar.pod import Pod
from sidecar.sources.addresses import InterfaceAddress, addresses, reachable
from sidecar.sources.errors import SourceError
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS
from tests.sidecar.fixture import Fixture, write
from tests.sidecar.sandbox import Sandbox, inside


def test_devices_and_addresses_of_the_pod(sandbox: Sandbox) -> None:
    sandbox.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "far0")
    sandbox.run("ip", "address", "add", "10.9.0.1/24", "dev", "eth0")
    sandbox.run("ip", "address", "add", "10.9.0.2/24", "dev", "eth0")
    sandbox.run("ip", "address", "add", "fd00:9::1/64", "dev", "eth0", "nodad")
    sandbox.run("ip", "link", "set", "eth0", "up")
    sandbox.run("ip", "link", "set", "far0", "up", "addrgenmode", "none")
    sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "JOB_NAME": "llm"})
    sandbox.sidecar(KITTY_NODE="n1")
    sandbox.until(lambda: sandbox.scrape().values("kitty_pod_address_info", job="llm"))
    page = sandbox.scrape()
    assert sorted(page.label("kitty_pod_address_info", "address")) == [
        "10.9.0.1",
        "10.9.0.2",
        "fd00:9::1",
    ]
    assert page.label("kitty_network_transmit_bytes_total", "device") == ["eth0"]
    assert page.value("kitty_network_receive_drops_total", node="n1", device="eth0") == 0


def test_a_point_to_point_device_has_its_own_end(sandbox: Sandbox) -> None:
    sandbox.run("ip", "link", "add", "tun0", "type", "veth", "peer", "name", "far0")
    sandbox.run("ip", "address", "add", "10.9.0.1", "peer", "10.9.0.7", "dev", "tun0")
    assert reachable(inside(sandbox.init, addresses)) == ["10.9.0.1"]


def test_link_local_counts_where_nothing_else_is() -> None:
    loopback = [InterfaceAddress("127.0.0.1", 1), InterfaceAddress("::1", 1)]
    local = InterfaceAddress("fe80::1", 2)
    assert reachable([*loopback, local]) == ["fe80::1"]
    assert reachable([*loopback, local, InterfaceAddress("10.0.0.1", 2)]) == ["10.0.0.1"]
    assert reachable(loopback) == []


def refuse() -> list[InterfaceAddress]:
    raise SourceError("rtnetlink: Operation not permitted")


@pytest.mark.parametrize("known", [True, False])
def test_a_node_of_many_devices_is_bounded(tmp_path: Path, known: bool) -> None:
    """hostNetwork: the pod's own devices are those with an address."""
    fixture = Fixture(tmp_path)
    rows = "".join(f"veth{i}: {' '.join(['5'] * 16)}\n" for i in range(300))
    write(fixture.proc / "self/net/dev", f"{rows}eth0: {' '.join(['6'] * 16)}\n")
    procfs = ProcFS(str(fixture.proc))
    collector = NetdevCollector(
        Pod(procfs, ProcessTable(procfs, own_pid=2), Config()),
        addresses=(lambda: [InterfaceAddress("10.0.0.1", 301)]) if known else refuse,
        device_name=lambda index: "eth0",
        proc=str(fixture.proc),
    )
    collector.sample()
    (received,) = [f for f in collector.collect() if f.name == "kitty_network_receive_bytes"]
    devices = [sample.labels["device"] for sample in received.samples]
    assert devices == (["eth0"] if known else [f"veth{i}" for i in range(8)])
    assert collector.left_out == (0 if known else (301 - 8) * 8)


def test_addresses_beyond_the_bound_are_counted(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    procfs = ProcFS(str(fixture.proc))
    collector = NetdevCollector(
        Pod(procfs, ProcessTable(procfs, own_pid=2), Config()),
        addresses=lambda: [InterfaceAddress(f"10.0.0.{n}", 2) for n in range(1, 31)],
        device_name=lambda index: "eth0",
        proc=str(fixture.proc),
    )
    collector.sample()
    (info,) = [f for f in collector.collect() if f.name == "kitty_pod_address_info"]
    assert (len(info.samples), collector.left_out) == (16, 14)
