"""What the agent's page says of the pod's GPUs, told by NVML's real binding over the stub."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.sidecar.documented import undocumented

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.harness import Page, Pod, Scenario

pytestmark = pytest.mark.root

PROMETHEUS = Path(__file__).parent.parent.parent / "tools" / "prometheus"
REFERENCE = (
    "gpu_memory_free",
    "gpu_memory_total",
    "gpu_memory_used",
    "gpu_memory_utilization",
    "gpu_sm_utilization",
    "gpu_pcie_rx_bytes",
    "gpu_pcie_tx_bytes",
    "gpu_power_draw_watts",
    "gpu_temperature_c",
    "gpu_sm_active",
    "gpu_sm_occupancy",
    "gpu_tensor_core_active",
    "gpu_fp32_pipe_active",
    "gpu_fp16_pipe_active",
    "gpu_dram_active",
    "gpu_nvlink_tx_bytes",
    "gpu_nvlink_rx_bytes",
)
H100 = "GPU-{:08x}-0000-4000-8000-00000000000{}"


def uuid(index: int) -> str:
    return H100.format(index, index)


def test_a_pod_that_owns_two_of_eight(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """Every row of the reference with its unit, for its two GPUs only, under the rank's labels."""
    gpus = scenario("h100x8")
    # Minor numbers run against the indexes: index 2 is /dev/nvidia5.
    ranks = [pod.trainer("nvidia5", RANK="4"), pod.trainer("nvidia4", RANK="5")]
    gpus.set(
        {
            "gpu.2.processes": f"{ranks[0].pid}:2147483648",
            "gpu.3.processes": f"{ranks[1].pid}:3221225472",
            "gpu.2.utilization": f"{ranks[0].pid}:63 999:31",
        }
    )
    agent = pod.agent(gpus, shipped=True)
    ups = set[float]()

    def served(p: Page) -> bool:
        ups.update(p.all("kitty_gpu_up"))
        return p.gpus("gpu_sm_active") == {"2", "3"}

    page = agent.until(served)
    assert not undocumented(page.text)
    # Not read yet is not down.
    assert ups == {1}
    assert page.gpus() == {"2", "3"}
    expected = {
        "gpu_memory_total": 85899345920,
        "gpu_memory_used": 3 * 2**30,
        "gpu_memory_free": 77 * 2**30,
        "gpu_memory_utilization": 52,
        "gpu_sm_utilization": 92,
        "gpu_pcie_tx_bytes": 102 * 2**20,
        "gpu_pcie_rx_bytes": 202 * 2**20,
        "gpu_power_draw_watts": 502,
        "gpu_temperature_c": 42,
        "gpu_sm_active": 0.82,
        "gpu_sm_occupancy": 0.425,
        "gpu_tensor_core_active": 0.32,
        "gpu_dram_active": 0.62,
        "gpu_fp32_pipe_active": 0.12,
        "gpu_fp16_pipe_active": 0.02,
        "gpu_nvlink_rx_bytes": 1002 * 2**20,
        "gpu_nvlink_tx_bytes": 2002 * 2**20,
        "kitty_gpu_pcie_link_generation": 5,
        "kitty_gpu_pcie_link_width_max": 16,
        "kitty_gpu_pcie_replays_total": 2,
        "kitty_gpu_process_memory_bytes": 2147483648,
        "kitty_gpu_process_sm_utilization_ratio": 0.63,
        "kitty_gpu_up": 1,
    }
    got = {name: page.one(name, uuid=uuid(2)) for name in expected}
    assert got == pytest.approx(expected)
    labels = {
        "gpu_id": "2",
        "uuid": uuid(2),
        "node": "node-a",
        "vendor": "nvidia",
        "job": "llama",
        "rank": "4",
        "pid": str(ranks[0].pid),
    }
    for name in expected:
        assert labels in page.labels(name), name
    info = next(i for i in page.labels("kitty_gpu_info") if i["gpu_id"] == "2")
    assert info["attributed_by"] == "processes"
    assert info["profiled_by"] == "gpm"
    assert info["model"] == "NVIDIA H100 80GB HBM3"
    assert info["memory"] == "own"
    assert page.one("kitty_gpu_clock_event", uuid=uuid(2), reason="sw_power_cap") == 1
    assert page.one("kitty_gpu_clock_event", uuid=uuid(2), reason="hw_slowdown") == 0
    assert not [e for e in page.labels("kitty_gpu_clock_event") if "idle" in e["reason"]]
    assert page.one("kitty_gpu_clock_hertz", uuid=uuid(2), clock="sm") == 1902e6
    assert page.one("kitty_gpu_ecc_errors_total", uuid=uuid(2), kind="corrected") == 0
    assert page.one("kitty_gpu_remapped_rows", uuid=uuid(2), kind="uncorrected") == 2
    # Two errors on each of eighteen links.
    assert page.one("kitty_gpu_nvlink_errors_total", uuid=uuid(2), kind="replay") == 36
    # 100 ms a second, from 3 s on.
    throttled = page.one("kitty_gpu_throttled_seconds_total", uuid=uuid(2), reason="sw_power_cap")
    assert throttled is not None
    assert 3 < throttled < 3 + 0.1 * 60
    # A pid of the utilization list alone may be of another namespace.
    assert "999" not in {labels["pid"] for labels in page.labels("kitty_gpu_process_memory_bytes")}

    ranks[1].end()
    gpus.set({"gpu.3.processes": None})
    page = agent.until(lambda p: p.gpus() == {"2"})
    assert page.gpus("kitty_gpu_up") == {"2"}


def test_counters_move_and_idle_energy_is_counted(
    pod: Pod, scenario: Callable[[str], Scenario]
) -> None:
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia7", RANK="0")
    gpus.set({"gpu.0.processes": f"{rank.pid}:1", "gpu.0.busy": 0})
    agent = pod.agent(gpus)

    def idle(page: Page) -> float:
        return page.one("kitty_gpu_idle_energy_joules_total") or 0

    page = agent.until(lambda p: idle(p) > 0)
    first, spent = idle(page), page.one("kitty_gpu_energy_joules_total")
    page = agent.until(lambda p: idle(p) > first)
    now = page.one("kitty_gpu_energy_joules_total")
    assert spent is not None
    assert now is not None
    assert idle(page) - first == pytest.approx(now - spent)
    # An idle link rests at a lower generation: it says nothing.
    assert page.one("kitty_gpu_pcie_link_generation") is None
    assert page.one("kitty_gpu_pcie_link_generation_max") == 5
    gpus.set({"gpu.0.busy": 100})
    agent.until(lambda p: p.one("gpu_sm_utilization") == 100)
    before = idle(agent.page())
    time.sleep(1)
    assert idle(agent.page()) == before


def test_a_slice_of_a_gpu(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """The pod's MIG slice is served, its neighbour's is not; what the slices share is not split."""
    gpus = scenario("a100_mig")
    rank = pod.trainer(
        "nvidia0", RANK="0", NVIDIA_VISIBLE_DEVICES="MIG-00000000-0000-5000-8000-000000000002"
    )
    agent = pod.agent(gpus)
    page = agent.until(lambda p: p.gpus())
    assert {g["uuid"] for g in page.labels("gpu_temperature_c")} == {
        "MIG-00000000-0000-5000-8000-000000000002"
    }
    assert page.one("gpu_memory_total") == 40 * 2**30
    assert page.one("gpu_memory_used") == 8 * 2**30
    assert page.one("kitty_gpu_clock_event", reason="sw_power_cap") == 1
    for name in ("gpu_power_draw_watts", "gpu_sm_utilization", "gpu_pcie_rx_bytes"):
        assert page.one(name) is None
    info = page.labels("kitty_gpu_info")[0]
    assert (info["attributed_by"], info["rank"]) == ("environment", "0")
    gpus.set({"gpu.0.mig.2.processes": f"{rank.pid}:4096"})
    agent.until(lambda p: p.labels("kitty_gpu_info")[0]["attributed_by"] == "processes")
    # An error of the neighbour's slice is not ours, one of no slice is everybody's.
    gpus.set({"gpu.0.xid.0": 13, "gpu.0.xid.0.instance": 1, "gpu.0.xid.1": 43})
    gpus.set({"gpu.0.xid.2": 43, "gpu.0.xid.2.instance": 2})
    page = agent.until(lambda p: p.one("kitty_gpu_xid_errors_total", xid="43") == 2)
    assert page.all("kitty_gpu_xid_errors_total", xid="13") == []
    # Hopper profiles slices, too.
    gpus.set({"gpu.0.gpm": 1, "gpu.0.mig.0.gpm.2": 11, "gpu.0.mig.2.gpm.2": 77})
    agent2 = pod.agent(gpus)
    assert agent2.until(lambda p: p.all("gpu_sm_active")).one("gpu_sm_active") == 0.77


def test_unified_memory(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    gpus = scenario("gb10")
    rank = pod.trainer("nvidia0", RANK="0")
    gpus.set({"gpu.0.processes": f"{rank.pid}:5368709120"})
    page = pod.agent(gpus).until(lambda p: p.gpus())
    assert page.labels("kitty_gpu_info")[0]["memory"] == "unified"
    assert page.one("kitty_gpu_process_memory_bytes") == 5 * 2**30
    for name in ("gpu_memory_total", "gpu_memory_used", "gpu_memory_free", "gpu_sm_active"):
        assert page.one(name) is None
    assert page.one("gpu_power_draw_watts") == 32.5
    assert page.one("gpu_sm_utilization") == 77
    assert page.labels("kitty_gpu_info")[0]["profiled_by"] == "none"


def test_pcie_throughput_before_gpm(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """Where GPM has none, the call that waits 20 ms measures it, outside the round of readings."""
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia7", RANK="0")
    gpus.set({"gpu.0.processes": f"{rank.pid}:1", "gpu.0.gpm": 0})
    gpus.set({"gpu.0.pcie.tx": 4000, "gpu.0.pcie.rx": 5000})
    agent = pod.agent(gpus)
    page = agent.until(lambda p: p.all("gpu_pcie_rx_bytes"))
    assert page.one("gpu_pcie_rx_bytes") == 5e6
    assert page.one("gpu_pcie_tx_bytes") == 4e6
    gpus.set({"gpu.0.hang.DeviceGetPcieThroughput": 1})
    page = agent.until(lambda p: not p.all("gpu_pcie_rx_bytes"))
    assert page.one("gpu_temperature_c") == 40
    gpus.set({"gpu.0.hang.DeviceGetPcieThroughput": None})
    agent.until(lambda p: p.all("gpu_pcie_rx_bytes"))


def test_an_error_of_one_value_leaves_that_value_out(
    pod: Pod, scenario: Callable[[str], Scenario]
) -> None:
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia7", RANK="0")
    gpus.set(
        {
            "gpu.0.processes": f"{rank.pid}:1",
            "gpu.0.fail.DeviceGetPowerUsage": 3,
            "gpu.0.fail.DeviceGetTemperature": 999,
            "gpu.0.gpm.3": "nan",
            "gpu.0.gpm.10": "inf",
            "gpu.0.gpm_error.5": 3,
        }
    )
    agent = pod.agent(gpus)
    page = agent.until(lambda p: p.all("gpu_sm_active"))
    for name in ("gpu_power_draw_watts", "gpu_temperature_c", "gpu_sm_occupancy"):
        assert page.one(name) is None
    assert page.one("gpu_tensor_core_active") is None
    assert page.one("gpu_dram_active") is None
    assert page.one("gpu_sm_utilization") == 90
    assert page.one("kitty_gpu_up") == 1
    time.sleep(1)
    assert agent.log.read_text().count("nvmlDeviceGetPowerUsage") == 1


def test_xid_errors_are_counted(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia7", RANK="0")
    gpus.set({"gpu.0.processes": f"{rank.pid}:1", "gpu.1.xid.0": 13})
    agent = pod.agent(gpus)
    page = agent.until(lambda p: p.gpus())
    assert page.all("kitty_gpu_xid_errors_total") == []
    began = time.time()
    gpus.set({"gpu.0.xid.0": 79, "gpu.0.xid.1": 31, "gpu.0.xid.2": 79})
    page = agent.until(lambda p: p.one("kitty_gpu_xid_errors_total", xid="79") == 2)
    assert page.one("kitty_gpu_xid_errors_total", xid="31") == 1
    # The GPU beside it is another pod's.
    assert page.all("kitty_gpu_xid_errors_total", xid="13") == []
    last = page.one("kitty_gpu_xid_last_timestamp_seconds", xid="79")
    assert last is not None
    assert began <= last <= time.time()


def test_profiling_rows_of_a_dcgm_exporter(
    pod: Pod, scenario: Callable[[str], Scenario], dcgm: Callable[[str], str]
) -> None:
    """Before Hopper; only the pod's GPU, and no zeros of a GPU that works."""
    gpus = scenario("h100x8")
    first, second = pod.trainer("nvidia7", RANK="0"), pod.trainer("nvidia6", RANK="1")
    gpus.set({f"gpu.{index}.gpm": 0 for index in range(8)})
    gpus.set({"gpu.0.processes": f"{first.pid}:1", "gpu.1.processes": f"{second.pid}:1"})
    url = dcgm(
        "".join(
            f'DCGM_FI_PROF_SM_ACTIVE{{gpu="{index}",UUID="{uuid(index)}"}} {value}\n'
            for index, value in enumerate(["0.75", "0", "0.25"])
        )
    )
    page = pod.agent(gpus, KITTY_DCGM_EXPORTER=url).until(
        lambda p: p.all("gpu_sm_active") and p.gpus() == {"0", "1"}
    )
    assert page.gpus("gpu_sm_active") == {"0"}
    assert page.one("gpu_sm_active", rank="0") == 0.75
    sources = {i["gpu_id"]: i["profiled_by"] for i in page.labels("kitty_gpu_info")}
    assert sources == {"0": "dcgm_exporter", "1": "none"}


def test_eight_gpus_of_one_rank_fit(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """What a bound leaves out is what explains least, never a row of the reference."""
    gpus = scenario("h100x8")
    nodes = [f"nvidia{minor}" for minor in range(8)]
    rank = pod.trainer(*nodes, RANK="0")
    gpus.set({f"gpu.{index}.processes": f"{rank.pid}:1073741824" for index in range(8)})
    page = pod.agent(gpus).until(lambda p: len(p.gpus("gpu_sm_active")) == 8)
    everywhere = {str(index) for index in range(8)}
    for name in (
        *REFERENCE,
        "kitty_gpu_up",
        "kitty_gpu_clock_event",
        "kitty_gpu_energy_joules_total",
    ):
        assert page.gpus(name) == everywhere, name
    assert page.one("kitty_series_dropped_total", collector="gpu") == 0


def test_eight_gpus_of_no_rank_fit(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """Allotted to two ranks and used by neither: each GPU has its own bound."""
    gpus = scenario("h100x8")
    every = ",".join(str(index) for index in range(8))
    for rank in ("0", "1"):
        pod.trainer(RANK=rank, NVIDIA_VISIBLE_DEVICES=every)
    agent = pod.agent(gpus)
    page = agent.until(lambda p: len(p.gpus("gpu_pcie_rx_bytes")) == 8)
    for name in (*REFERENCE, "kitty_gpu_up"):
        assert len(page.gpus(name)) == 8, name
    assert page.one("kitty_series_dropped_total", collector="gpu") == 0


def test_names_pass_promtool(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    done = subprocess.run([PROMETHEUS], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"promtool cannot be had: {done.stderr.strip()}")
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia7", RANK="0")
    gpus.set({"gpu.0.processes": f"{rank.pid}:1", "gpu.0.utilization": f"{rank.pid}:5"})
    gpus.set({"gpu.0.xid.0": 79})
    agent = pod.agent(gpus)
    page = agent.until(lambda p: p.all("kitty_gpu_xid_errors_total") and p.all("gpu_sm_active"))
    assert not undocumented(page.text)
    check = [f"{done.stdout.strip()}/promtool", "check", "metrics"]
    said = subprocess.run(check, input=page.text, capture_output=True, text=True, check=False)
    complaints = {line.split()[0] for line in (said.stdout + said.stderr).splitlines()}
    # The reference gives this name to a gauge.
    assert complaints <= {"gpu_memory_total"}, said.stdout + said.stderr
