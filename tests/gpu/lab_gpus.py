"""A GPU for each pod of the lab's job, told by the stub of NVML, and what can be done to it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lab.cluster import Cluster
from lab.faults import Kind
from lab.job import CONTAINER, WORKLOADS
from lab.story import Story
from tests.gpu.harness import Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lab.cluster import Pod
    from lab.story import Display

WORLD = 4
WORKLOAD = replace(WORKLOADS["ring"], limits={"nvidia.com/gpu": "1", "memory": "1Gi"})
USUAL_CAP = 0.1
"""Share of the time in which the power limit holds a busy GPU's clocks back, as it is meant to."""


@dataclass(frozen=True)
class Reason:
    """Why clocks are held back.

    Attributes:
        bit: of nvmlDeviceGetCurrentClocksEventReasons.
        fields: of nvmlDeviceGetFieldValues, whose nanoseconds grow meanwhile.
        older: the driver has no counters but those of the performance policy.
    """

    bit: int
    fields: tuple[int, ...]
    older: bool = False


POWER_CAP = Reason(0x04, (74,))
HEAT = Reason(0x40, (75, 270))
HEAT_OLDER_DRIVER = Reason(0x40, (75,), older=True)
NEWER_FIELDS = (269, 270, 271)


class Gpus:
    """One GPU on each of the lab's nodes.

    Args:
        folder: for the scenarios.
        library: the stub.
    """

    def __init__(self, folder: Path, library: Path) -> None:
        self._library = library
        self._scenarios = {
            f"node-{rank}": Scenario(folder / f"node-{rank}", "h100") for rank in range(WORLD)
        }
        # Value, growth a second, since when on the monotonic clock.
        self._counters: dict[tuple[str, int], tuple[float, float, float]] = {}
        for rank, (node, scenario) in enumerate(self._scenarios.items()):
            scenario.set({"gpu.0.uuid": f"GPU-0000000{rank}-0000-4000-8000-00000000000{rank}"})
            self._grow(node, POWER_CAP.fields, USUAL_CAP)
            self._grow(node, (75, *NEWER_FIELDS), 0)

    def env(self, node: str) -> Mapping[str, str]:
        """Returns what NVIDIA's container runtime does for a container: the library is found."""
        if node not in self._scenarios:
            return {}
        return {
            "LD_LIBRARY_PATH": str(self._library.parent),
            "NVML_SCENARIO": str(self._scenarios[node].path),
        }

    @contextmanager
    def job(self, display: Display) -> Iterator[Story]:
        """Runs a job whose trainers use the GPUs, as the driver lists them: by their own pids."""
        cluster = Cluster(node_env=self.env)
        with Story(display=display, world=WORLD, workload=WORKLOAD, cluster=cluster) as story:
            for pod in story.pods.values():
                status = Path(f"/proc/{pod.containers[CONTAINER].pid}/status").read_text()
                inner = status.split("NSpid:")[1].splitlines()[0].split()[-1]
                self._scenarios[pod.placement.node].set({"gpu.0.processes": f"{inner}:1073741824"})
            yield story

    def report_xid(self, pod: Pod, number: int) -> None:
        """Lets the driver report an XID error of a pod's GPU, its first."""
        self._scenarios[pod.placement.node].set({"gpu.0.xid.0": number})

    @contextmanager
    def held_back(self, pod: Pod, reason: Reason, share: float) -> Iterator[None]:
        """Holds the clocks of a pod's GPU back for a share of the time; no step takes longer."""
        node, scenario = pod.placement.node, self._scenarios[pod.placement.node]
        if reason.older:
            scenario.set({f"gpu.0.field.{field}": None for field in NEWER_FIELDS})
        self._grow(node, reason.fields, share)
        scenario.set({"gpu.0.events": 4 | reason.bit, "gpu.0.clock.sm": int(1900 - 700 * share)})
        try:
            yield
        finally:
            scenario.set({"gpu.0.events": None, "gpu.0.clock.sm": None})
            self._grow(node, reason.fields, USUAL_CAP if reason is POWER_CAP else 0)
            self._grow(node, (75, *NEWER_FIELDS) if reason.older else (), 0)

    def _grow(self, node: str, fields: tuple[int, ...], share: float) -> None:
        now = time.monotonic()
        for field in fields:
            value, rate, since = self._counters.get((node, field), (0.0, 0.0, now))
            value += rate * (now - since)
            self._counters[node, field] = value, share * 1e9, now
            text = f"{value:.0f}+{share * 1e9:.0f}@{now:.6f}"
            self._scenarios[node].set({f"gpu.0.field.{field}": text})


def kinds(gpus: Gpus) -> dict[str, Kind]:
    """Returns what can be done to a GPU, as faults of the lab."""

    def kind(name: str, summary: str, reason: Reason) -> Kind:
        return Kind(
            name=name,
            summary=summary,
            strength=90,
            most=100,
            unit="% of the time",
            signals=(),
            inject=lambda _, pod, percent: gpus.held_back(pod, reason, percent / 100),
        )

    return {
        made.name: made
        for made in (
            kind("gpu-heat", "heat holds the GPU's clocks back", HEAT),
            kind(
                "gpu-heat-older-driver", "the same, counted as older drivers do", HEAT_OLDER_DRIVER
            ),
            kind("gpu-power-cap", "the power limit holds the GPU's clocks back", POWER_CAP),
        )
    }
