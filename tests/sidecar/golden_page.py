"""The whole page over a fixture of a pod: `python -m tests.sidecar.golden_page` writes it anew.

Left out are the families that come from live kernel interfaces: sockets, eBPF, the GPU's driver.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from sidecar.collectors.anomaly import AnomalyCollector, Figure
from sidecar.collectors.base import Collector
from sidecar.collectors.cgroup import CgroupCollector
from sidecar.collectors.matrix import MatrixCollector
from sidecar.collectors.net import NetCollector
from sidecar.collectors.netdev import NetdevCollector
from sidecar.collectors.pod import PodCollector
from sidecar.collectors.process import ProcessCollector
from sidecar.collectors.rank import RankCollector
from sidecar.collectors.rdma import RdmaCollector
from sidecar.collectors.system import SystemCollector
from sidecar.collectors.waiting import WaitingCollector
from sidecar.config import Config
from sidecar.exposition import text
from sidecar.guard import Guard
from sidecar.pod import Pod
from sidecar.sampler import Rounds
from sidecar.sources.addresses import InterfaceAddress
from sidecar.sources.cgroup_mounts import CgroupFS
from sidecar.sources.delays import DelayTable
from sidecar.sources.descriptors import DescriptorTable
from sidecar.sources.maps import MapTable
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS
from sidecar.sources.rdma import RdmaFS
from sidecar.sources.system import SystemFS
from sidecar.sources.trees import TreeTable
from sidecar.sources.waiting import WaitReader
from tests.sidecar.fixture import CGROUP_2, Fixture, group, write

PAGE = Path(__file__).parent / "golden" / "metrics.txt"
UID = "4f1d-77"
LIVE = {"gpu", "kernel", "rtt", "tcp"}
"""Collectors that are left out."""
CONTAINER = f"/kubepods/pod{UID}/{'ab12' * 16}"
AGENT = 90
NOW = 1_800_000_000.0


def pod(folder: Path) -> Fixture:
    """Writes a pod: a launcher, two ranks, workers, a zombie, and what must not count."""
    fixture = Fixture(folder / "machine")
    cgroup = f"0::{CONTAINER}\n"
    job = {"KITTY_WATCH": "1", "TORCHELASTIC_RUN_ID": 'llm "7b" \\ run'}
    fixture.process(10, ppid=1, comm="torchrun", environ=job, cgroup=cgroup)
    for rank, pid in enumerate((20, 30)):
        ranked = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        fixture.process(
            pid,
            ppid=10,
            comm="pt_main (x) \n1",
            environ=ranked,
            ticks=(1000 + pid, 200, 30, 4),
            faults=(5000, 60, 7, 1),
            rss=5000,
            io=(1 << 20, 4096 * pid, 512),
            delays={pid: (10**9, 30), pid + 500: (2 * 10**9, 4)},
            cgroup=cgroup,
            pss=9000,
        )
        for worker in (1, 2):
            fixture.process(
                pid + worker,
                ppid=pid,
                environ=ranked,
                state="D" if worker == 1 else "S",
                ticks=(50, 5, 0, 0),
                io=(1 << 16, 1 << 12, 0),
                cgroup=cgroup,
                pss=4000,
            )
        fixture.descriptor(pid, 0, "/dev/null")
        fixture.descriptor(pid, 3, f"socket:[{pid}]")
        fixture.descriptor(pid, 4, "/dev/infiniband/uverbs0")
    fixture.process(33, ppid=30, state="Z", environ=b"", cgroup=cgroup, rss=0, pss=0)
    fixture.process(40, ppid=1, environ=b"KITTY_WATCH=10\0RANK=5\0")
    fixture.process(41, ppid=1, environ=b"XKITTY_WATCH=1\0RANK=6\0\xff\xfe=\xff")
    fixture.process(AGENT, ppid=1, comm="kitty", environ={"KITTY_WATCH": "1", "RANK": "9"})
    fixture.process(AGENT + 1, ppid=AGENT, comm="child of kitty", environ={"KITTY_WATCH": "1"})
    write(fixture.proc / "50/stat", "50 (truncated")
    write(fixture.proc / "51/status", "a process that is going\n")
    whole = CGROUP_2 | {"memory.max": "4000000\n", "cpu.max": "max 100000\n"}
    group(folder / f"cgroup{CONTAINER}", CGROUP_2)
    group(folder / f"cgroup/kubepods/pod{UID}", whole)
    fixture.mount("self", folder / "cgroup", root="/")
    port = fixture.sys / "class/infiniband/mlx5_0/ports/1"
    write(port / "counters/port_xmit_data", 1000)
    write(port / "counters/port_rcv_data", 2000)
    write(port / "hw_counters/out_of_sequence", 5)
    write(fixture.sys / "class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n")
    write(fixture.sys / "module/ib_core/parameters/netns_mode", "N\n")
    for node in (0, 1):
        cpus = f"{4 * node}-{4 * node + 3}\n"
        write(fixture.sys / f"devices/system/node/node{node}/cpulist", cpus)
    for pid in (20, 30):
        maps = "7f default N0=3 N1=1 kernelpagesize_kB=4\n"
        write(fixture.proc / f"{pid}/numa_maps", maps)
    return fixture


def rtt_figures() -> Callable[[], dict[str, tuple[float, float]]]:
    """Returns a figure that jumps for rank 0 at its 25th reading."""
    read = count(1)

    def latest() -> dict[str, tuple[float, float]]:
        number = next(read)
        return {"0": (0.05 if number > 25 else 0.001, number), "1": (0.001, number)}

    return latest


def page(folder: Path, *, spoil: Callable[[Path], None] = lambda proc: None) -> str:
    """Returns the page over the fixture after two rounds.

    Args:
        folder: where to write it.
        spoil: changes the /proc before it is read.
    """
    fixture = pod(folder)
    spoil(fixture.proc)
    proc, sys_ = str(fixture.proc), str(fixture.sys)
    config = Config(
        node="node-1",
        pod="llm-0",
        namespace="ml",
        pod_uid=UID,
        pod_ip="10.0.0.1",
        proc=fixture.proc,
        sys=fixture.sys,
    )
    procfs, descriptors = ProcFS(proc), DescriptorTable(proc)
    pod_ = Pod(procfs, ProcessTable(procfs, pod_uid=UID, own_pid=AGENT), config)
    trees = TreeTable(
        procfs,
        DelayTable(procfs),
        view=lambda: pod_.view,
        stats=lambda: pod_.stats,
        clock=lambda: NOW,
    )
    maps = MapTable(view=lambda: pod_.view, proc=proc, sys=sys_, clock=lambda: 1.0)
    addresses = [InterfaceAddress("10.0.0.1", 2), InterfaceAddress("fd00::1", 3)]
    anomalies = AnomalyCollector(
        pod_,
        {"rtt": Figure(rtt_figures(), least=0.005)},
        clock=lambda: 1.0,
        wall=lambda: NOW,
    )
    collectors: list[Collector] = [
        PodCollector(pod_),
        NetCollector(pod_, None, proc=proc),
        SystemCollector(pod_, SystemFS(proc), proc=proc),
        ProcessCollector(pod_, descriptors, proc=proc),
        RankCollector(pod_, trees, maps, clock=lambda: 1.0),
        MatrixCollector(
            pod_,
            round_trips=lambda: {"0": {"10.0.0.2": (40, 0.08)}, "1": {"10.0.0.2": (10, 0.02)}},
            segments=lambda: {"0": {"10.0.0.2": (500, 3)}, "1": {"10.0.0.3": (100, 0)}},
        ),
        WaitingCollector(pod_, WaitReader(proc), clock=lambda: 1.0),
        anomalies,
        CgroupCollector(pod_, CgroupFS(proc)),
        RdmaCollector(pod_, RdmaFS(sys_), descriptors, None, proc=proc, clock=lambda: 1.0),
        NetdevCollector(
            pod_,
            addresses=lambda: addresses,
            device_name=lambda index: {2: "eth0", 3: "net1"}[index],
            proc=proc,
        ),
    ]
    rounds = [Rounds(each, clock=lambda: 1.0, cpu_clock=lambda: 0.0) for each in collectors]
    for number in range(2):
        pod_.refresh()
        descriptors.walk(pod_.view.rank_of)
        while maps.step():
            pass
        for each in rounds:
            each.run()
        for _ in range(20):
            anomalies.sample()
        if number == 0:
            write(fixture.proc / "stat", "cpu  150 0 50 850 50 0 0 0 0 0\n")
            fixture.process(
                32,
                ppid=30,
                environ={"KITTY_WATCH": "1", "RANK": "1", "LOCAL_RANK": "1"},
                io=(1 << 16, 1 << 13, 0),
                cgroup=f"0::{CONTAINER}\n",
            )
    return text(Guard(rounds, job=lambda: pod_.view.job).collect())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(Path(name)))
    sys.exit(print(f"written: {PAGE}"))
