"""RDMA ports as three drivers show them, and the transport that data really takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sidecar.attribution import PodView
from sidecar.collectors.base import Reason, UnavailableError
from sidecar.collectors.rdma import PORTS, RdmaCollector
from sidecar.config import Config
from sidecar.pod import Pod
from sidecar.sources.descriptors import DescriptorTable
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS
from sidecar.sources.rdma import RdmaFS
from sidecar.sources.sockets import ZERO, RankSockets, SocketSnapshot
from tests.sidecar.fixture import DEVICE_ERROR, Fixture, write

TRAINER = 40
Files = Mapping[str, Mapping[str, object]]
MLX5: Files = {
    "counters": {"port_xmit_data": 1000, "port_rcv_data": 500, "symbol_error": DEVICE_ERROR},
    "hw_counters": {"out_of_sequence": 7, "np_cnp_sent": 3, "lifespan": 10},
}
EFA: Files = {"hw_counters": {"tx_bytes": 8000, "rx_bytes": 9000, "rx_drops": 2, "retrans_pkts": 5}}
IRDMA: Files = {
    "hw_counters": {
        "ip4OutOctets": 100,
        "ip6OutOctets": 10,
        "ip4InOctets": 200,
        "tcpRetransSegs": 4,
        "cnpSent": "alien\n",
    }
}


def device(fixture: Fixture, name: str, number: int, files: Files) -> None:
    """Writes a device with one port."""
    port = fixture.sys / "class/infiniband" / name / "ports/1"
    for folder, counters in files.items():
        for counter, value in counters.items():
            write(port / folder / counter, value)
    write(fixture.sys / f"class/infiniband_verbs/uverbs{number}/ibdev", f"{name}\n")


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    made = Fixture(tmp_path)
    made.process(TRAINER, environ={"KITTY_WATCH": "1", "RANK": "0"})
    device(made, "mlx5_0", 0, MLX5)
    device(made, "rdmap0s6", 1, EFA)
    device(made, "irdma0", 2, IRDMA)
    write(made.sys / "module/ib_core/parameters/netns_mode", "N\n")
    return made


class Sockets:
    """What the collector asks of the socket table."""

    def __init__(self) -> None:
        self.snapshot: SocketSnapshot | None = None
        self.moved(0)

    def moved(self, total: int) -> None:
        """Lets the rank's connections have moved so many bytes."""
        totals = ZERO._replace(delivered_bytes=total)
        self.snapshot = SocketSnapshot(
            send_queue=0, ranks={"0": RankSockets(totals=totals)}, rank_of={}, info_length=232
        )


class Rdma:
    """A collector over a fixture with a clock of its own."""

    def __init__(self, fixture: Fixture, **options: Any) -> None:
        procfs = ProcFS(str(fixture.proc))
        self.pod = Pod(procfs, ProcessTable(procfs, own_pid=2), Config(node="n", job="j"))
        self.descriptors = DescriptorTable(str(fixture.proc))
        self.sockets = Sockets()
        self.now = 0.0
        self.collector = RdmaCollector(
            self.pod,
            RdmaFS(str(fixture.sys)),
            self.descriptors,
            options.get("sockets", self.sockets),
            proc=str(fixture.proc),
            clock=lambda: self.now,
        )

    def sample(self) -> dict[str, dict[str, float]]:
        """Reads once; returns values by name and the labels but node and job."""
        self.pod.refresh()
        self.descriptors.walk([TRAINER])
        self.collector.sample()
        self.now += 2
        return {
            family.name: {
                "/".join(v for k, v in s.labels.items() if k not in {"node", "job"}): s.value
                for s in family.samples
            }
            for family in self.collector.collect()
        }


def test_three_drivers_and_no_error_hides_anything(fixture: Fixture) -> None:
    page = Rdma(fixture).sample()
    sent = {"mlx5_0/1": 4000, "rdmap0s6/1": 8000, "irdma0/1": 110}
    assert page["kitty_rdma_transmitted_bytes"] == sent
    assert page["kitty_rdma_received_bytes"] == {
        "mlx5_0/1": 2000,
        "rdmap0s6/1": 9000,
        "irdma0/1": 200,
    }
    assert page["kitty_rdma_events"] == {
        "out_of_sequence": 7,
        "np_cnp_sent": 3,
        "rx_drops": 2,
        "retrans_pkts": 5,
        "tcpRetransSegs": 4,
    }
    assert page["kitty_rdma_namespace_info"] == {"exclusive": 1}


def test_a_device_without_a_readable_port_takes_no_other_with_it(fixture: Fixture) -> None:
    write(fixture.sys / "class/infiniband/broken/ports", "not a folder")
    write(fixture.sys / "class/infiniband_verbs/uverbs9/ibdev", DEVICE_ERROR)
    assert set(Rdma(fixture).sample()["kitty_rdma_transmitted_bytes"]) == {
        "mlx5_0/1",
        "rdmap0s6/1",
        "irdma0/1",
    }


def test_shared_devices_of_other_pods_are_not_served(fixture: Fixture) -> None:
    """Every namespace sees every device: only those count that the container was given."""
    write(fixture.sys / "module/ib_core/parameters/netns_mode", "Y\n")
    write(fixture.proc / f"{TRAINER}/root/dev/infiniband/uverbs1", "")
    page = Rdma(fixture).sample()
    assert page["kitty_rdma_transmitted_bytes"] == {"rdmap0s6/1": 8000}
    assert page["kitty_rdma_events"] == {"rx_drops": 2, "retrans_pkts": 5}
    assert page["kitty_rdma_namespace_info"] == {"shared": 1}


def test_denied_roots_are_named(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    write(fixture.sys / "module/ib_core/parameters/netns_mode", "Y\n")

    def deny(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("os.lstat", deny)
    with pytest.raises(UnavailableError) as caught:
        Rdma(fixture).sample()
    assert caught.value.reason is Reason.PERMISSION


def test_no_rdma_at_all(tmp_path: Path) -> None:
    bare = Fixture(tmp_path)
    bare.process(TRAINER, environ={"KITTY_WATCH": "1"})
    rdma = Rdma(bare)
    rdma.sample()
    page = rdma.sample()
    assert page["kitty_transport_info"] == {"none": 1}
    assert not page["kitty_rdma_namespace_info"]


def test_the_transport_is_what_moves(fixture: Fixture) -> None:
    fixture.descriptor(TRAINER, 3, "/dev/infiniband/uverbs1")
    rdma = Rdma(fixture)
    sent = fixture.sys / "class/infiniband/rdmap0s6/ports/1/hw_counters/tx_bytes"
    assert not rdma.sample()["kitty_transport_info"]
    rdma.sockets.moved(1 << 20)
    assert rdma.sample()["kitty_transport_info"] == {"tcp": 1}
    sent.write_text(str(1 << 30))
    assert rdma.sample()["kitty_transport_info"] == {"rdma": 1}
    for _ in range(4):
        assert rdma.sample()["kitty_transport_info"] == {"rdma": 1}
    assert rdma.sample()["kitty_transport_info"] == {"none": 1}


def test_ports_that_others_use_do_not_make_the_pod_busy(fixture: Fixture) -> None:
    rdma = Rdma(fixture)
    rdma.sample()
    sent = fixture.sys / "class/infiniband/rdmap0s6/ports/1/hw_counters/tx_bytes"
    sent.write_text(str(1 << 30))
    assert rdma.sample()["kitty_transport_info"] == {"none": 1}


def test_a_used_port_that_does_not_count_leaves_the_transport_unknown(fixture: Fixture) -> None:
    device(fixture, "vf0", 7, {"counters": {"symbol_error": 0}})
    fixture.descriptor(TRAINER, 3, "/dev/infiniband/uverbs7")
    rdma = Rdma(fixture)
    rdma.sample()
    rdma.sockets.moved(1 << 20)
    assert not rdma.sample()["kitty_transport_info"]


def test_without_sockets_silence_is_unknown(fixture: Fixture) -> None:
    rdma = Rdma(fixture, sockets=None)
    rdma.sample()
    assert not rdma.sample()["kitty_transport_info"]


def test_an_empty_pod_has_no_transport(fixture: Fixture) -> None:
    rdma = Rdma(fixture)
    rdma.pod.view = PodView()
    rdma.collector.sample()
    rdma.collector.sample()
    assert not [s for f in rdma.collector.collect() for s in f.samples if "transport" in f.name]


def test_events_never_fall(fixture: Fixture) -> None:
    """A port that refuses a counter, leaves, comes back, or is reset takes nothing away."""
    drops = fixture.sys / "class/infiniband/rdmap0s6/ports/1/hw_counters/rx_drops"
    rdma = Rdma(fixture)

    def seen() -> float:
        return rdma.sample()["kitty_rdma_events"]["rx_drops"]

    assert seen() == 2
    device(fixture, "rdmap1s6", 3, {"hw_counters": {"rx_drops": 1000}})
    assert seen() == 2, "what a port counted before it was known did not happen now"
    drops.write_text("7")
    assert seen() == 7
    drops.write_text("no number")
    assert seen() == 7
    drops.write_text("8")
    assert seen() == 8
    drops.write_text("3")
    assert seen() == 11


def test_ports_beyond_the_bound_are_counted(fixture: Fixture) -> None:
    for number in range(10, 10 + PORTS):
        device(fixture, f"efa{number}", number, EFA)
    rdma = Rdma(fixture)
    page = rdma.sample()
    left_out = rdma.collector.left_out
    samples = len(page["kitty_rdma_transmitted_bytes"]) + len(page["kitty_rdma_received_bytes"])
    assert len(page["kitty_rdma_transmitted_bytes"]) == PORTS
    assert samples + left_out == 2 * (PORTS + 3)
    assert page["kitty_rdma_events"]["rx_drops"] == 2 * (PORTS + 1)
