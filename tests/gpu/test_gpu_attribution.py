"""Which GPUs are the pod's: each source alone, and each against a lie of the others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.gpu.harness import Page, Pod, Scenario

pytestmark = pytest.mark.root

UUID = "GPU-{0:08x}-0000-4000-8000-00000000000{0}"


def owned(page: Page) -> dict[str, tuple[str, str]]:
    """Returns source and rank by gpu_id."""
    infos = page.labels("kitty_gpu_info")
    return {i["gpu_id"]: (i["attributed_by"], i["rank"]) for i in infos}


def test_pids_of_the_machine(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """Before driver 535.113: a pid that the pod has too, by chance, gives it nobody's GPU."""
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia4", RANK="3")
    gpus.set(
        {
            # Its own, under a number that the pod does not know, and others' beside it.
            "gpu.3.processes": f"{rank.outer}:1073741824",
            "gpu.4.processes": "1000001:4096",
            "gpu.5.processes": "1000002:4096",
            "gpu.6.processes": f"{rank.pid}:4096",
        }
    )
    agent = pod.agent(gpus)
    agent.until(lambda p: owned(p) == {"3": ("descriptors", "3")})
    time.sleep(1.5)
    page = agent.page()
    assert owned(page) == {"3": ("descriptors", "3")}
    assert page.labels("gpu_temperature_c")[0]["pid"] == str(rank.pid)
    assert page.all("kitty_gpu_process_memory_bytes") == []


def test_translated_pids_without_memory(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """Drivers 535.113 to 565.57: pids are ours, and the memory 0 is no memory."""
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia4", RANK="3")
    gpus.set({"gpu.3.processes": f"{rank.pid}:0"})
    page = pod.agent(gpus).until(lambda p: owned(p) == {"3": ("processes", "3")})
    assert page.all("kitty_gpu_process_memory_bytes") == []


def test_a_listed_process_that_holds_no_gpu(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    gpus = scenario("h100x8")
    rank, other = pod.trainer("nvidia4", RANK="3"), pod.trainer(RANK="4")
    gpus.set({"gpu.3.processes": f"{rank.pid}:1", "gpu.0.processes": f"{other.pid}:1"})
    agent = pod.agent(gpus)
    agent.until(lambda p: owned(p) == {"3": ("processes", "3")})
    time.sleep(1)
    assert owned(agent.page()) == {"3": ("processes", "3")}


def test_visible_devices_by_name(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """The environment names the pod's GPUs before any is in use, whatever else it has opened."""
    gpus = scenario("h100x8")
    several = UUID.format(2).lower() + ", " + UUID.format(5)
    pod.trainer("nvidia0", "nvidia1", RANK="0", NVIDIA_VISIBLE_DEVICES=several)
    pod.trainer("nvidia0", "nvidia1", RANK="1", NVIDIA_VISIBLE_DEVICES="0,3")
    agent = pod.agent(gpus)
    agent.until(lambda p: owned(p) == dict.fromkeys("0235", ("environment", "")))
    # Of the holders that NVML does not list elsewhere just one is left.
    rank = pod.trainer("nvidia4", RANK="2", NVIDIA_VISIBLE_DEVICES="3")
    agent.until(lambda p: owned(p).get("3") == ("environment", "2"))
    gpus.set({"gpu.3.processes": f"{rank.pid}:1"})
    agent.until(lambda p: owned(p).get("3") == ("processes", "2"))


def test_visible_devices_that_name_nothing(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """Only what a process opened counts, and not what another pod's process uses."""
    gpus = scenario("h100x8")
    pod.trainer("nvidia7", RANK="0", NVIDIA_VISIBLE_DEVICES="all")
    pod.trainer("nvidia6", RANK="1", NVIDIA_VISIBLE_DEVICES="none")
    pod.trainer("nvidia5", RANK="2", NVIDIA_VISIBLE_DEVICES="void")
    pod.trainer("nvidia4", RANK="3")
    expected = {index: ("descriptors", index) for index in "0123"}
    pod.agent(gpus).until(lambda p: owned(p) == expected)


def test_a_privileged_container_opens_all(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """It can, whosever they are: only what the driver lists for it, or its environment, counts."""
    gpus = scenario("h100x8")
    nodes = [f"nvidia{minor}" for minor in range(8)]
    rank = pod.trainer(*nodes, privileged=True, RANK="0", NVIDIA_VISIBLE_DEVICES="all")
    agent = pod.agent(gpus)
    agent.until(lambda p: p.one("kitty_collector_up", collector="gpu") == 1)
    time.sleep(1.5)
    assert owned(agent.page()) == {}
    gpus.set({"gpu.1.processes": f"{rank.pid}:1"})
    agent.until(lambda p: owned(p) == {"1": ("processes", "0")})


def test_a_process_on_one_gpu_only_looked_at_the_others(
    pod: Pod, scenario: Callable[[str], Scenario]
) -> None:
    """CUDA opens every device node that it can see."""
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia0", "nvidia1", "nvidia2", "nvidia3", RANK="0")
    gpus.set({"gpu.7.processes": f"{rank.pid}:1"})
    agent = pod.agent(gpus)
    agent.until(lambda p: owned(p) == {"7": ("processes", "0")})


def test_two_ranks_on_one_gpu(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """The GPU is the pod's and no single rank's; each process has its own memory."""
    gpus = scenario("h100x8")
    first, second = pod.trainer("nvidia7", RANK="0"), pod.trainer("nvidia7", RANK="1")
    gpus.set({"gpu.0.processes": f"{first.pid}:10 {second.pid}:20"})
    page = pod.agent(gpus).until(lambda p: p.gpus())
    assert owned(page) == {"0": ("processes", "")}
    assert page.labels("gpu_temperature_c")[0]["pid"] == ""
    assert page.one("kitty_gpu_process_memory_bytes", rank="1", pid=str(second.pid)) == 20


def test_other_gpus_are_seldom_touched(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """Of a GPU that is not the pod's only the process list is read, and that one period in five."""
    gpus = scenario("h100x8")
    rank = pod.trainer("nvidia7", RANK="0")
    gpus.set({"gpu.0.processes": f"{rank.pid}:1"})
    calls = gpus.path.with_name("calls")
    agent = pod.agent(gpus, NVML_CALLS=str(calls))
    agent.until(lambda p: p.gpus() == {"0"})
    agent.until(lambda _: len(reads(calls, "1")) > 1)
    first, second = reads(calls, "1")[:2]
    # Five periods of 400 ms, less what a busy machine took away.
    assert second - first > 1000
    made = [line.split() for line in calls.read_text().splitlines()]
    assert "DeviceGetPowerUsage" in {name for _, name, gpu in made if gpu == "0"}
    assert "DeviceGetPowerUsage" not in {name for _, name, gpu in made if gpu == "1"}


def reads(calls: Path, gpu: str) -> list[int]:
    """Returns when a GPU's process list was asked for, in milliseconds."""
    rows = [line.split() for line in calls.read_text().splitlines()]
    return [int(at) for at, name, of in rows if of == gpu and name.endswith("Processes_v3")]
