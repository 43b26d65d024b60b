"""The parts of the GPU sources that need neither a driver nor a pod."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from sidecar.attribution import PodView, Rank
from sidecar.config import from_environment
from sidecar.sources.dcgm_exporter import DcgmExporter, parse
from sidecar.sources.deadline import DeadlineRunner
from sidecar.sources.errors import MalformedError
from sidecar.sources.gpu import Gpu, GpuProcess, Instance
from sidecar.sources.gpu_attribution import Devices, Numbering, attribute_gpus
from sidecar.sources.nvml import LIBRARY, NO_INSTANCE, believable, mig_nodes
from sidecar.sources.processes import Process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PARENT = "GPU-00000000-0000-4000-8000-000000000000"
SLICE = "MIG-00000000-0000-5000-8000-000000000002"


def a_slice(uuid: str, place: int, instance: int, node: str) -> Gpu:
    names = {uuid.lower(), f"0:{place}", f"mig-{PARENT}/{instance}/0".lower()}
    return Gpu(
        uuid=uuid,
        index=0,
        vendor="nvidia",
        nodes=frozenset({node}),
        names=frozenset(names),
        instance=Instance(parent=PARENT, gpu_instance=instance),
    )


SLICES = (
    a_slice("MIG-other", 0, 1, "/dev/nvidia-caps/nvidia-cap12"),
    a_slice(SLICE, 2, 2, "/dev/nvidia-caps/nvidia-cap21"),
)


def view(visible: str | None = None) -> PodView:
    process = Process(pid=7, ppid=1, start=1, container="c", visible_devices=visible)
    rank = Rank(rank="0", job="j", heads=(7,), members=(7,))
    return PodView(ranks=(rank,), processes={7: process}, watched=frozenset({7}), rank_of={7: rank})


@pytest.mark.parametrize(
    "name", [SLICE, "0:2", f"MIG-{PARENT}/2/0", f"MIG-nobody,{SLICE}", f" {SLICE.lower()}"]
)
def test_every_name_of_a_slice(name: str) -> None:
    owners = attribute_gpus(SLICES, {}, view(name), {})
    assert {uuid: owner.by for uuid, owner in owners.items()} == {SLICE: "environment"}


@pytest.mark.parametrize(
    "name", ["0", PARENT, "0:1", "all", "", "/var/run/nvidia-container-devices"]
)
def test_what_names_no_slice(name: str) -> None:
    assert attribute_gpus(SLICES, {}, view(name), {}) == {}


def test_a_slice_by_its_capability_node() -> None:
    held = {7: Devices(frozenset({"/dev/nvidia-caps/nvidia-cap21"}))}
    owners = attribute_gpus(SLICES, {}, view(), held)
    assert {uuid: owner.by for uuid, owner in owners.items()} == {SLICE: "descriptors"}


def test_a_list_is_believed_where_descriptors_are_denied() -> None:
    listed = {SLICE: [GpuProcess(7)], "MIG-other": [GpuProcess(8)]}
    owners = attribute_gpus(SLICES, listed, view(), {7: Devices(None)})
    assert {uuid: (o.by, o.pid) for uuid, o in owners.items()} == {SLICE: ("processes", 7)}


def test_mig_nodes(tmp_path: Path) -> None:
    folder = tmp_path / "driver" / "nvidia-caps"
    folder.mkdir(parents=True)
    (folder / "mig-minors").write_text(
        "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu1/gi2/access 210\n"
    )
    assert mig_nodes(str(tmp_path)) == {
        (0, 0): "/dev/nvidia-caps/nvidia-cap3",
        (1, 2): "/dev/nvidia-caps/nvidia-cap210",
    }
    assert mig_nodes(str(tmp_path / "nowhere")) == {}


def test_believable() -> None:
    two = [GpuProcess(7, 1 << 30), GpuProcess(8, None)]
    assert believable(two, [NO_INSTANCE, NO_INSTANCE], memory=1 << 36)
    assert believable(two, [3, 3], memory=1 << 36)
    assert believable([], [], memory=None)
    assert not believable([GpuProcess(0, 1)], [0], memory=None)
    assert not believable([GpuProcess(1 << 23, 1)], [0], memory=None)
    assert not believable([GpuProcess(7, 1 << 37)], [0], memory=1 << 36)
    assert not believable(two, [NO_INSTANCE, 0], memory=1 << 36)
    assert not believable(two, [1 << 20, 1 << 20], memory=1 << 36)


def test_numbering() -> None:
    """Pids that nobody has show the machine's numbers; one that has just ended does not."""
    here = {10, 11}
    numbering = Numbering()
    assert numbering.ours({10, 11}, here.__contains__)
    here.discard(11)
    assert numbering.ours({10, 11}, here.__contains__)
    # Lived too short to be seen.
    assert numbering.ours({10, 999}, here.__contains__)
    machine = {5001, 5002, 10}
    assert not Numbering().ours(machine, here.__contains__)
    told = [numbering.ours(machine, here.__contains__) for _ in range(4)]
    assert told == [True, True, False, False]
    assert numbering.ours({10}, here.__contains__)


def test_a_call_that_hangs_is_left_behind() -> None:
    runner, free, ran = DeadlineRunner("test"), threading.Event(), list[str]()

    def wait() -> None:
        free.wait(30)

    assert runner.run("a", lambda: ran.append("a"), deadline=5)
    assert not runner.run("a", wait, deadline=0.05)
    hanging = runner.hanging
    assert hanging
    began = time.monotonic()
    assert not runner.run("a", lambda: ran.append("never"), deadline=5)
    assert time.monotonic() - began < 4
    assert runner.run("b", lambda: ran.append("b"), deadline=5)
    free.set()
    while runner.hanging:
        time.sleep(0.01)
    assert runner.run("a", lambda: ran.append("again"), deadline=5)
    assert ran == ["a", "b", "again"]
    runner.close()


PAGE = b"""# HELP DCGM_FI_PROF_SM_ACTIVE The ratio of cycles an SM has at least 1 warp assigned.
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-a",device="nvidia0",Hostname="n"} 0.971234
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-a",Hostname="n"} 0.5
DCGM_FI_PROF_SM_ACTIVE{gpu="1",UUID="GPU-b",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 0.25 1700000000000
DCGM_FI_PROF_SM_ACTIVE{gpu="2",UUID="GPU-c"} NaN
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} 40
DCGM_FI_PROF_SM_ACTIVE 1
"""


def test_parse_dcgm() -> None:
    assert parse(PAGE) == {
        ("GPU-a", ""): {"gpu_sm_active": 0.971234, "gpu_dram_active": 0.5},
        ("GPU-b", "7"): {"gpu_sm_active": 0.25},
    }
    with pytest.raises(MalformedError):
        parse(b'DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-a"} much\n')


def test_the_exporters_rows_expire(dcgm: Callable[[str], str]) -> None:
    now = 100.0
    asked = DcgmExporter(dcgm(PAGE.decode()), clock=lambda: now)
    whole = Gpu(uuid="GPU-a", index=0, vendor="nvidia")
    piece = Gpu(
        uuid="MIG-x", index=1, vendor="nvidia", instance=Instance(parent="GPU-b", gpu_instance=7)
    )
    assert asked.rows(whole) == {}
    asked.refresh()
    assert asked.rows(whole) == {"gpu_sm_active": 0.971234, "gpu_dram_active": 0.5}
    assert asked.rows(piece) == {"gpu_sm_active": 0.25}
    assert asked.rows(Gpu(uuid="GPU-z", index=2, vendor="nvidia")) == {}
    now = 120.0
    assert asked.rows(whole) == {}


def test_an_exporter_that_is_not_there() -> None:
    asked = DcgmExporter("http://127.0.0.1:1/metrics")
    asked.refresh()
    assert asked.rows(Gpu(uuid="GPU-a", index=0, vendor="nvidia")) == {}


CUT_OFF = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n50\r\nDCGM_FI"
NOT_HTTP = b"\x15\x03\x01\x00\x02\x02\x46\r\n\r\n"


@pytest.mark.parametrize("answer", [CUT_OFF, NOT_HTTP], ids=["cut off", "not http"])
def test_an_answer_that_is_none_is_no_end_of_asking(answer: bytes) -> None:
    """An exporter that ends within its answer, as on an update; a port that speaks TLS."""
    page = b"HTTP/1.1 200 OK\r\n\r\n" + PAGE
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for each in (answer, page):
                client, _ = listener.accept()
                with client:
                    client.recv(4096)
                    client.sendall(each)

        thread = threading.Thread(target=serve)
        thread.start()
        asked = DcgmExporter(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        asked.refresh()
        gpu = Gpu(uuid="GPU-a", index=0, vendor="nvidia")
        assert asked.rows(gpu) == {}
        asked.refresh()
        assert asked.rows(gpu) == {"gpu_sm_active": 0.971234, "gpu_dram_active": 0.5}
        thread.join()


def test_a_library_that_is_a_pipe_is_passed_over(tmp_path: Path) -> None:
    """The loader would wait for a writer, and every thread of the agent with it."""
    os.mkfifo(tmp_path / LIBRARY)
    look = "import sys; from sidecar.sources.nvml import load_library as f; print(f(sys.argv[1]))"
    command = [sys.executable, "-c", look, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert str(tmp_path) not in found.stdout


@pytest.mark.parametrize(
    "value", ["node:9400", "https://node/", "file:///etc/passwd", "http://a b"]
)
def test_an_address_that_is_none(value: str) -> None:
    config, problems = from_environment({"KITTY_DCGM_EXPORTER": value}, collectors=frozenset())
    assert config.dcgm_exporter == ""
    assert len(problems) == 1
