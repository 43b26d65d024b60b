"""The reference's gpu_* rows of the pod's GPUs, and what explains a slow one.

A vendor's source reads the GPUs in threads of its own; a round here takes its finished values and
tells which GPUs are the pod's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sidecar.collectors.base import Reason, UnavailableError
from sidecar.sources.gpu import EXPIRES, OTHERS, PERIOD, State
from sidecar.sources.gpu_attribution import Numbering, Owner, attribute_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from sidecar.attribution import PodView
    from sidecar.pod import Pod
    from sidecar.sources.gpu import ErrorEvent, Gpu, GpuProcess, GpuReading, GpuSnapshot, GpuSource
    from sidecar.sources.gpu_attribution import DeviceTable

LABELS = ("gpu_id", "uuid", "node", "vendor", "job", "rank", "pid")

GAUGES = {
    "gpu_memory_free": "Free memory of the GPU in bytes.",
    "gpu_memory_total": "Memory of the GPU in bytes.",
    "gpu_memory_used": "Memory of the GPU in use, in bytes.",
    "gpu_memory_utilization": "Percent of the time in which the GPU's memory was read or written.",
    "gpu_sm_utilization": "Percent of the time in which a kernel ran on the GPU.",
    "gpu_pcie_rx_bytes": "Bytes a second that the GPU received over PCIe.",
    "gpu_pcie_tx_bytes": "Bytes a second that the GPU sent over PCIe.",
    "gpu_power_draw_watts": "Power that the GPU's board draws.",
    "gpu_temperature_c": "Temperature of the GPU in degrees Celsius.",
}
PROFILING = {
    "gpu_sm_active": "Share of the SMs that had work, 0 to 1.",
    "gpu_sm_occupancy": "Share of the warps an SM can hold that were resident, 0 to 1.",
    "gpu_tensor_core_active": "Share of the time in which tensor cores worked, 0 to 1.",
    "gpu_fp32_pipe_active": "Share of the time in which the FP32 pipes worked, 0 to 1.",
    "gpu_fp16_pipe_active": "Share of the time in which the FP16 pipes worked, 0 to 1.",
    "gpu_dram_active": "Share of the memory's bandwidth in use, 0 to 1.",
    "gpu_nvlink_tx_bytes": "Bytes a second that the GPU sent over NVLink.",
    "gpu_nvlink_rx_bytes": "Bytes a second that the GPU received over NVLink.",
}
COUNTERS = {
    "kitty_gpu_idle_energy_joules": "Energy that the GPU used while no kernel ran on it.",
    "kitty_gpu_energy_joules": "Energy that the GPU used.",
}
LINK_GAUGES = {
    "kitty_gpu_pcie_link_generation": "PCIe generation of the GPU's link, while it works.",
    "kitty_gpu_pcie_link_generation_max": "PCIe generation that the GPU's link can have.",
    "kitty_gpu_pcie_link_width": "PCIe lanes of the GPU's link, while it works.",
    "kitty_gpu_pcie_link_width_max": "PCIe lanes that the GPU's link can have.",
}
LINK_COUNTERS = {"kitty_gpu_pcie_replays": "PCIe packets that the GPU had to send again."}
SIGNALS = {
    "kitty_gpu_clock_event": ("reason", "Whether the GPU's clocks are held back, by reason."),
    "kitty_gpu_clock_hertz": ("clock", "Clock of the GPU's SMs and of its memory."),
    "kitty_gpu_throttled_seconds": ("reason", "Time in which the GPU's clocks were held back."),
}
"""Families of one more label, by its name: those that a verdict needs."""
FAULTS = {
    "kitty_gpu_nvlink_errors": ("kind", "Errors of the GPU's NVLinks."),
    "kitty_gpu_ecc_errors": ("kind", "ECC errors of the GPU's memory since the driver started."),
    "kitty_gpu_remapped_rows": ("kind", "Memory rows replaced, by the kind of error that did it."),
    "kitty_gpu_row_remap": ("state", "Whether a row waits for a reset, or could not be replaced."),
}
COUNTED = frozenset(
    {"kitty_gpu_throttled_seconds", "kitty_gpu_nvlink_errors", "kitty_gpu_ecc_errors"}
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One GPU of the pod at the time of a scrape; `reading` is None where it does not answer."""

    gpu: Gpu
    owner: Owner
    labels: tuple[str, ...]
    reading: GpuReading | None
    errors: Mapping[str, ErrorEvent]
    processes: tuple[tuple[tuple[str, ...], GpuProcess], ...]


class GpuCollector:
    """Takes over the readings of the pod's GPUs.

    Args:
        pod: whose GPUs.
        source: reads the node's GPUs; it is started by the first round.
        devices: which device nodes the pod's processes hold.
        period: the source's, seconds.
        clock: monotonic seconds, the source's.
    """

    name = "gpu"

    def __init__(
        self,
        pod: Pod,
        source: GpuSource,
        devices: DeviceTable,
        *,
        period: float = PERIOD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = period
        self._pod = pod
        self._source = source
        self._devices = devices
        self._clock = clock
        self._started = False
        self._numbering = Numbering()
        self._latest: tuple[PodView, dict[str, Owner]] = (pod.view, {})

    def sample(self) -> None:
        """Tells which GPUs are the pod's by what the source has read.

        Raises:
            UnavailableError: the vendor's library does not work.
        """
        if not self._started:
            self._started = True
            self._source.start()
        snapshot = self._source.snapshot()
        if snapshot.state is not State.RUNNING:
            self._latest = (self._pod.view, {})
            raise UnavailableError(Reason(snapshot.state.value), snapshot.text)
        self._latest = (self._pod.view, self._attribute(snapshot))
        self._source.focus(self._latest[1])

    def _attribute(self, snapshot: GpuSnapshot) -> dict[str, Owner]:
        view = self._pod.view
        readings = snapshot.readings
        listed = {uuid: reading.processes for uuid, reading in readings.items()}
        pids = {process.pid for rows in listed.values() for process in rows or ()}
        if not self._numbering.ours(pids, self._devices.alive):
            listed, pids = {}, set()
        nodes = frozenset(node for gpu in snapshot.gpus for node in gpu.nodes)
        held = self._devices.walk(view, pids, nodes)
        owners = attribute_gpus(snapshot.gpus, listed, view, held)
        for uuid, owner in self._latest[1].items():
            # A GPU that does not answer is still its processes'.
            if uuid not in readings and any(pid in view.processes for pid in owner.pids):
                owners[uuid] = owner
        return owners

    def _fresh(self, reading: GpuReading | None) -> GpuReading | None:
        if reading is None:
            return None
        # A GPU that has just become the pod's was looked at less often, and not read whole.
        periods = EXPIRES if reading.values else EXPIRES + OTHERS
        return reading if self._clock() - reading.taken <= periods * self.interval else None

    def _row(self, gpu: Gpu, owner: Owner, view: PodView, snapshot: GpuSnapshot) -> _Row:
        common = (str(gpu.index), gpu.uuid, self._pod.config.node, gpu.vendor)
        job = owner.rank.job if owner.rank else view.job
        rank = owner.rank.rank if owner.rank else ""
        reading = self._fresh(snapshot.readings.get(gpu.uuid))
        processes = []
        for process in (reading.processes if reading else None) or ():
            if process.pid in owner.pids:
                of = view.rank_of.get(process.pid)
                names = (of.job, of.rank) if of else (view.job, "")
                processes.append(((*common, *names, str(process.pid)), process))
        return _Row(
            gpu=gpu,
            owner=owner,
            labels=(*common, job, rank, str(owner.pid or "")),
            reading=reading,
            errors=snapshot.errors.get(gpu.uuid, {}),
            processes=tuple(processes),
        )

    def collect(self) -> Iterator[Metric]:
        """Yields the rows of the reference first: what a bound drops is what comes last."""
        (view, owners), snapshot = self._latest, self._source.snapshot()
        rows = [
            self._row(gpu, owners[gpu.uuid], view, snapshot)
            for gpu in snapshot.gpus
            if gpu.uuid in owners
        ]
        yield from _plain(rows, GAUGES, GaugeMetricFamily)
        up = GaugeMetricFamily("kitty_gpu_up", "Whether the GPU answers.", labels=LABELS)
        for row in rows:
            up.add_metric(row.labels, float(row.reading is not None))
        yield up
        yield from _parted(rows, SIGNALS)
        yield from _plain(rows, PROFILING, GaugeMetricFamily)
        yield from _plain(rows, COUNTERS, CounterMetricFamily)
        yield from _errors(rows)
        yield _info(rows)
        yield from _plain(rows, LINK_GAUGES, GaugeMetricFamily)
        yield from _plain(rows, LINK_COUNTERS, CounterMetricFamily)
        yield from _parted(rows, FAULTS)
        yield from _processes(rows)


def _plain(
    rows: Sequence[_Row],
    families: Mapping[str, str],
    kind: type[GaugeMetricFamily | CounterMetricFamily],
) -> Iterator[Metric]:
    for name, text in families.items():
        family = kind(name, text, labels=LABELS)
        for row in rows:
            if row.reading is not None and name in row.reading.values:
                family.add_metric(row.labels, row.reading.values[name])
        yield family


def _parted(rows: Sequence[_Row], families: Mapping[str, tuple[str, str]]) -> Iterator[Metric]:
    for name, (label, text) in families.items():
        kind = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
        family = kind(name, text, labels=[*LABELS, label])
        for row in rows:
            for (part, value), number in row.reading.parts.items() if row.reading else ():
                if part == name:
                    family.add_metric([*row.labels, value], number)
        yield family


def _errors(rows: Sequence[_Row]) -> Iterator[Metric]:
    count = CounterMetricFamily(
        "kitty_gpu_xid_errors",
        "XID errors that the GPU reported since the sidecar started.",
        labels=[*LABELS, "xid"],
    )
    last = GaugeMetricFamily(
        "kitty_gpu_xid_last_timestamp_seconds",
        "When the GPU last reported the XID, in seconds since 1970.",
        labels=[*LABELS, "xid"],
    )
    for row in rows:
        for number, event in sorted(row.errors.items()):
            count.add_metric([*row.labels, number], event.count)
            last.add_metric([*row.labels, number], event.last)
    yield from (count, last)


def _info(rows: Sequence[_Row]) -> Metric:
    info = GaugeMetricFamily(
        "kitty_gpu_info",
        "The pod's GPUs: model, whose memory it uses (own, unified), what says that it is the"
        " pod's (processes, environment, descriptors), what its profiling rows come from.",
        labels=[*LABELS, "model", "memory", "attributed_by", "profiled_by"],
    )
    for row in rows:
        memory = "unified" if row.gpu.unified else "own"
        profiled_by = (row.reading.profiled_by if row.reading else "") or "none"
        info.add_metric([*row.labels, row.gpu.model, memory, row.owner.by, profiled_by], 1)
    return info


def _processes(rows: Sequence[_Row]) -> Iterator[Metric]:
    memory = GaugeMetricFamily(
        "kitty_gpu_process_memory_bytes",
        "Memory of the GPU that the process uses.",
        labels=LABELS,
    )
    utilization = GaugeMetricFamily(
        "kitty_gpu_process_sm_utilization_ratio",
        "Share of the time in which a kernel of the process ran on the GPU, 0 to 1.",
        labels=LABELS,
    )
    for row in rows:
        for labels, process in row.processes:
            if process.memory is not None:
                memory.add_metric(labels, process.memory)
            if process.sm_utilization is not None:
                utilization.add_metric(labels, process.sm_utilization / 100)
    yield from (memory, utilization)
