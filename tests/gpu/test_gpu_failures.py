"""What the agent says when the driver fails: one GPU's failure is its own."""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.gpu.harness import Agent, Page, Pod, Scenario

pytestmark = pytest.mark.root

LOST = 15
MISMATCH = 18


def two_ranks(pod: Pod, gpus: Scenario, *, privileged: bool = False) -> None:
    """Gives GPU 0 to rank 0, GPU 1 to rank 1."""
    first = pod.trainer("nvidia7", privileged=privileged, RANK="0")
    second = pod.trainer("nvidia6", privileged=privileged, RANK="1")
    gpus.set({"gpu.0.processes": f"{first.pid}:1", "gpu.1.processes": f"{second.pid}:1"})


def down(agent: Agent, reason: str) -> Page:
    return agent.until(lambda p: p.one("kitty_collector_up", collector="gpu", reason=reason) == 0)


def test_a_gpu_that_falls_off_the_bus_and_returns(
    pod: Pod, scenario: Callable[[str], Scenario]
) -> None:
    gpus = scenario("h100x8")
    # What a privileged container has open proves nothing: only the list of before does.
    two_ranks(pod, gpus, privileged=True)
    agent = pod.agent(gpus)
    agent.until(lambda p: p.gpus("gpu_sm_active") == {"0", "1"})
    gpus.set({"gpu.0.fail.*": LOST})
    page = agent.until(lambda p: p.gpus() == {"1"})
    # Its own rank still has it, and is told that it is down; no value is left, not even a 0.
    assert page.one("kitty_gpu_up", gpu_id="0", rank="0") == 0
    assert page.one("kitty_gpu_up", gpu_id="1", rank="1") == 1
    named = {s.name for s in page.samples if s.labels.get("gpu_id") == "0"}
    assert named == {"kitty_gpu_up", "kitty_gpu_info"}
    assert page.one("gpu_sm_active", gpu_id="1") == 0.81
    time.sleep(1)
    assert agent.log.read_text().count("GPU 0 does not answer") == 1
    gpus.set({"gpu.0.fail.*": None})
    page = agent.until(lambda p: p.gpus("gpu_sm_active") == {"0", "1"})
    assert page.one("kitty_gpu_up", gpu_id="0") == 1
    assert "GPU 0 answers again" in agent.log.read_text()


def test_a_call_that_hangs_for_ever(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """The other GPU's values go on, the scrape does not wait, no thread is added round by round."""
    gpus = scenario("h100x8")
    two_ranks(pod, gpus)
    agent = pod.agent(gpus)
    agent.until(lambda p: p.gpus("gpu_sm_active") == {"0", "1"})
    gpus.set({"gpu.0.hang.DeviceGetTemperature": 1, "gpu.1.power": 111000})
    page = agent.until(lambda p: p.gpus() == {"1"})
    assert page.one("kitty_gpu_up", gpu_id="0", rank="0") == 0
    agent.until(lambda p: p.one("gpu_power_draw_watts", gpu_id="1") == 111)
    threads = agent.threads()
    for watts in (222, 333):
        gpus.set({"gpu.1.power": watts * 1000})
        began = time.monotonic()
        agent.page()
        assert time.monotonic() - began < 2
        agent.until(partial(_draws, watts))
    agent.until(lambda _: agent.threads() <= threads)
    gpus.set({"gpu.0.hang.DeviceGetTemperature": None})
    agent.until(lambda p: p.gpus("gpu_sm_active") == {"0", "1"})
    agent.until(lambda _: agent.threads() < threads)
    # Told to go, it goes, whatever the driver does.
    gpus.set({"gpu.1.hang.DeviceGetComputeRunningProcesses_v3": 1})
    agent.until(lambda p: p.gpus() == {"0"})
    agent.end()


def _draws(watts: int, page: Page) -> bool:
    return page.one("gpu_power_draw_watts", gpu_id="1") == watts


def test_a_library_that_never_starts(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    gpus = scenario("h100x8")
    pod.trainer("nvidia7", RANK="0")
    gpus.set({"hang": 1})
    agent = pod.agent(gpus)
    page = down(agent, "starting")
    assert page.gpus() == set()
    gpus.set({"hang": None})
    agent.until(lambda p: p.one("kitty_collector_up", collector="gpu") == 1)


@pytest.mark.parametrize(
    ("code", "reason"), [(MISMATCH, "mismatch"), (9, "missing"), (4, "permission")]
)
def test_a_driver_that_does_not_fit(
    pod: Pod, scenario: Callable[[str], Scenario], code: int, reason: str
) -> None:
    gpus = scenario("h100x8")
    pod.trainer("nvidia7", RANK="0")
    gpus.set({"init": code})
    agent = pod.agent(gpus)
    page = down(agent, reason)
    assert not [s for s in page.samples if s.name.startswith(("gpu_", "kitty_gpu_"))]
    assert agent.log.read_text().count(f"gpu: {reason}: NVML") == 1


def test_a_driver_that_is_replaced_under_the_agent(
    pod: Pod, scenario: Callable[[str], Scenario]
) -> None:
    gpus = scenario("h100x8")
    two_ranks(pod, gpus)
    agent = pod.agent(gpus)
    agent.until(lambda p: p.gpus() == {"0", "1"})
    broken = {f"gpu.{index}.fail.*": MISMATCH for index in range(8)}
    gpus.set(broken | {"init": MISMATCH})
    page = down(agent, "mismatch")
    assert not [s for s in page.samples if s.name.startswith(("gpu_", "kitty_gpu_"))]
    gpus.set(dict.fromkeys(broken) | {"init": None})
    agent.until(lambda p: p.gpus() == {"0", "1"})


def test_a_node_without_a_gpu(
    pod: Pod, scenario: Callable[[str], Scenario], tmp_path: Path
) -> None:
    """One line of information, and no collector."""
    pod.trainer(RANK="0")
    agent = pod.agent(
        scenario(""), shipped=True, library=tmp_path / "nowhere" / "x", KITTY_COLLECTORS="all"
    )
    page = agent.until(lambda p: p.one("kitty_collector_up", collector="process") == 1)
    assert page.all("kitty_collector_up", collector="gpu") == []
    log = agent.log.read_text()
    assert [line for line in log.splitlines() if "gpu" in line and "INFO" not in line] == []
    assert log.count("gpu: off") == 1


@pytest.mark.parametrize(
    "where",
    [
        ("", "/run/nvidia/driver/usr/lib/x86_64-linux-gnu"),
        ("", "/run/nvidia/driver/usr/lib64"),
        ("/run/vendor", "/run/vendor/lib64"),
        ("/run/vendor/", "/run/vendor/usr/lib/x86_64-linux-gnu"),
        ("/run/vendor", "/run/vendor"),
    ],
)
def test_the_library_of_a_mounted_driver_root(
    pod: Pod,
    scenario: Callable[[str], Scenario],
    library: Path,
    tmp_path: Path,
    where: tuple[str, str],
) -> None:
    """Where the loader does not know it, the root that was told and the usual ones are searched."""
    root, place = where
    # Inside the pod only: the folder is the mount of a driver root.
    pod.run("mount", "-t", "tmpfs", "tmpfs", "/run")
    pod.run("mkdir", "-p", place)
    copied = tmp_path / "copy"
    shutil.copy(library, copied)
    pod.run("cp", str(copied), f"{place}/libnvidia-ml.so.1")
    gpus = scenario("h100x8")
    pod.trainer("nvidia7", RANK="0", NVIDIA_VISIBLE_DEVICES="0")
    nowhere = tmp_path / "nowhere" / "x"
    agent = pod.agent(gpus, shipped=True, library=nowhere, KITTY_DRIVER_ROOT=root)
    agent.until(lambda p: p.gpus() == {"0"})
    assert f"gpu: NVML from {place}/libnvidia-ml.so.1" in agent.log.read_text()


def test_a_process_list_of_another_driver(pod: Pod, scenario: Callable[[str], Scenario]) -> None:
    """Entries of another size are rejected: no pid is made out of a memory size."""
    gpus = scenario("h100x8")
    first, second = pod.trainer("nvidia7", RANK="0"), pod.trainer("nvidia7", RANK="1")
    gpus.set({"layout": 32, "gpu.0.processes": f"{first.pid}:4096 {second.pid}:{1 << 33}"})
    agent = pod.agent(gpus)
    page = agent.until(lambda p: p.gpus() == {"0"})
    assert page.labels("kitty_gpu_info")[0]["attributed_by"] == "descriptors"
    assert page.all("kitty_gpu_process_memory_bytes") == []
    assert "another driver's form" in agent.log.read_text()
    gpus.set({"layout": 24})
    page = agent.until(lambda p: len(p.all("kitty_gpu_process_memory_bytes")) == 2)
    assert sorted(page.all("kitty_gpu_process_memory_bytes")) == [4096, 1 << 33]
