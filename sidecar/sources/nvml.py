"""NVIDIA's management library, NVML: the only importer of its binding, pynvml.

Every call can block in the driver, some for ever: whoever uses this module runs it in a thread
of its own, under a deadline. Reference: NVML API reference, and nvml.h of the driver.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any

from sidecar.sources.errors import SourceError
from sidecar.sources.gpu import Gpu, GpuProcess, GpuReading, Instance, State

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

LOG = logging.getLogger("kitty.nvml")

LIBRARY = "libnvidia-ml.so.1"
ROOTS = (
    "/run/nvidia/driver",
    "/home/kubernetes/bin/nvidia",
    "/usr/local/nvidia",
    "/usr/local/glibc",
)
"""The driver roots that GPU Operator, GKE and Talos mount."""
FOLDERS = ("lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
"""Where a driver root has the library: a plain folder of libraries, or a system of its own."""
WSL = "/usr/lib/wsl/lib"

PID_LIMIT = 1 << 22
"""Largest pid that Linux gives (include/linux/threads.h, PID_MAX_LIMIT)."""
NO_INSTANCE = 0xFFFFFFFF
SLOW_ROUNDS = 10
"""Rounds between two readings of what changes seldom: links, ECC, remapped rows, MIG slices."""
GPM_GAP = 0.1
"""Seconds that two GPM samples must lie apart."""
MEBIBYTE = 1 << 20
LINKS = 18
"""NVLinks of a GPU (NVML_NVLINK_MAX_LINKS)."""

# Return codes of nvml.h; the binding's own names changed between its releases.
_STATES = {
    4: State.PERMISSION,  # NO_PERMISSION
    9: State.MISSING,  # DRIVER_NOT_LOADED
    10: State.TIMEOUT,  # TIMEOUT
    12: State.MISSING,  # LIBRARY_NOT_FOUND
    17: State.PERMISSION,  # OPERATING_SYSTEM
    18: State.MISMATCH,  # LIB_RM_VERSION_MISMATCH
    28: State.MISSING,  # GPU_NOT_FOUND
}
_LOST = frozenset({11, 15, 16, 28})  # IRQ_ISSUE, GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND
_DRIVER_GONE = frozenset({1, 9, 18})  # UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH
_NOT_SUPPORTED = 3
_NO_FUNCTION = 13
_EMPTY = frozenset({0, 6, 10, 21})
"""SUCCESS (raised by the binding for an empty list), NOT_FOUND, TIMEOUT, NO_DATA: answers too."""

GPM_RATIOS = {
    2: "gpu_sm_active",
    3: "gpu_sm_occupancy",
    5: "gpu_tensor_core_active",
    10: "gpu_dram_active",
    12: "gpu_fp32_pipe_active",
    13: "gpu_fp16_pipe_active",
}
"""GPM metrics in percent."""
GPM_RATES = {
    20: "gpu_pcie_tx_bytes",
    21: "gpu_pcie_rx_bytes",
    60: "gpu_nvlink_rx_bytes",
    61: "gpu_nvlink_tx_bytes",
}
"""GPM metrics in MiB a second."""

CLOCK_EVENTS = {
    0x02: "applications_clocks",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons; 0x01, idle, is no slowdown."""

THROTTLED = {
    74: "sw_power_cap",
    75: "thermal",
    76: "sync_boost",
    77: "board_limit",
    79: "reliability",
    269: "sw_thermal",
    270: "hw_thermal",
    271: "hw_power_brake",
}
"""Fields NVML_FI_DEV_PERF_POLICY_* and _CLOCKS_EVENT_REASON_*, nanoseconds."""
SLOW_FIELDS = {
    3: ("kitty_gpu_ecc_errors", "corrected"),
    4: ("kitty_gpu_ecc_errors", "uncorrected"),
    38: ("kitty_gpu_nvlink_errors", "crc_flit"),
    45: ("kitty_gpu_nvlink_errors", "crc_data"),
    52: ("kitty_gpu_nvlink_errors", "replay"),
    59: ("kitty_gpu_nvlink_errors", "recovery"),
    142: ("kitty_gpu_remapped_rows", "corrected"),
    143: ("kitty_gpu_remapped_rows", "uncorrected"),
    144: ("kitty_gpu_row_remap", "pending"),
    145: ("kitty_gpu_row_remap", "failed"),
}
LINK_FIELDS = {
    161: ("kitty_gpu_nvlink_errors", "replay"),
    162: ("kitty_gpu_nvlink_errors", "recovery"),
    163: ("kitty_gpu_nvlink_errors", "crc_flit"),
}
"""Fields of one NVLink each, of GPUs that know no totals (Hopper and newer)."""
REPLAYS = 94
XID_EVENT = 0x8
_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class DriverError(SourceError):
    """The library cannot be used at all; `state` says why."""

    def __init__(self, state: State, text: str) -> None:
        super().__init__(text)
        self.state = state


class GpuLostError(SourceError):
    """One GPU does not answer any more; the others may."""


def load_library(driver_root: str = "") -> str | None:
    """Loads the library so that the binding finds it; returns from where, None if it is nowhere.

    The loader knows a library that is loaded already by its soname. Never below
    /proc/<pid>/root: what lies there is the container's to choose.

    Args:
        driver_root: A mounted driver root, looked through before the usual ones.
    """
    roots = (driver_root, *ROOTS) if driver_root else ROOTS
    folders = [f"{root}/{folder}" for root in roots for folder in FOLDERS]
    if driver_root:
        folders.insert(0, driver_root)
    found = (f"{folder}/{LIBRARY}" for folder in (*folders, WSL))
    # The loader would wait for ever for a writer of a pipe, and with it the whole interpreter.
    for place in (LIBRARY, *filter(os.path.isfile, found)):
        try:
            ctypes.CDLL(place)
        except OSError:
            continue
        return place
    return None


class Nvml:
    """The library behind the binding, with its errors told apart."""

    def __init__(self) -> None:
        import pynvml  # noqa: PLC0415 # 2 MB that a node without GPU does not pay

        self._binding: ModuleType = pynvml
        self._said: set[tuple[str, int]] = set()

    def start(self) -> int:
        """Initialises the library; returns the number of GPUs.

        Raises:
            DriverError: it cannot be used.
        """
        try:
            self._binding.nvmlInit()
            count = int(self._binding.nvmlDeviceGetCount())
        except (self._binding.NVMLError, self._binding.NVMLLibraryMismatchError) as e:
            state = _STATES.get(getattr(e, "value", 18), State.ERROR)
            raise DriverError(state, f"NVML: {e}") from e
        if count == 0:
            raise DriverError(State.MISSING, "NVML: there is no GPU")
        return count

    def stop(self) -> None:
        """Lets go of the library, so that a restarted driver can be joined anew."""
        try:
            self._binding.nvmlShutdown()
        except (self._binding.NVMLError, self._binding.NVMLLibraryMismatchError) as e:
            LOG.debug("NVML: %s", e)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the binding; None where GPU, driver or binding do not support it.

        Raises:
            GpuLostError: the GPU does not answer.
            DriverError: the driver is gone.
        """
        function = getattr(self._binding, name, None)
        if function is None:
            self._explain(name, _NO_FUNCTION, "this release of nvidia-ml-py has it not")
            return None
        try:
            return function(*arguments)
        except self._binding.NVMLError as e:
            self._explain(name, e.value, str(e))
        except self._binding.NVMLLibraryMismatchError as e:
            # Raised for one function that this driver's library lacks.
            self._explain(name, _NO_FUNCTION, str(e))
        return None

    def _explain(self, name: str, code: int, text: str) -> None:
        if code in _LOST:
            raise GpuLostError(f"{name}: {text}")
        if code in _DRIVER_GONE:
            raise DriverError(_STATES.get(code, State.ERROR), f"{name}: {text}")
        if code not in _EMPTY and (name, code) not in self._said:
            self._said.add((name, code))
            LOG.info("%s: %s", name, text)

    def unsupported(self, name: str) -> bool:
        """Returns whether some GPU has said that it does not support the function."""
        return (name, _NOT_SUPPORTED) in self._said

    def fields(self, handle: Any, wanted: Sequence[int | tuple[int, int]]) -> dict[int, float]:
        """Returns the fields that the GPU supports, by id; of equal ids the sum."""
        found: dict[int, float] = {}
        for value in self.ask("nvmlDeviceGetFieldValues", handle, list(wanted)) or ():
            if value.nvmlReturn == 0 and value.valueType < len(_VALUE_TYPES):
                number = getattr(value.value, _VALUE_TYPES[value.valueType])
                found[value.fieldId] = found.get(value.fieldId, 0) + number
            elif value.nvmlReturn in _LOST:
                raise GpuLostError(f"field {value.fieldId}: code {value.nvmlReturn}")
        return found

    def metrics_query(self, first: Any, second: Any, metrics: Sequence[int]) -> dict[int, float]:
        """Returns GPM metrics between two samples, those that have a value."""
        query = self._binding.c_nvmlGpmMetricsGet_t()
        query.version = self._binding.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(metrics)
        query.sample1, query.sample2 = first, second
        rows = query.metrics
        for place, metric in enumerate(metrics):
            rows[place].metricId = metric
        if self.ask("nvmlGpmMetricsGet", query) is None:
            return {}
        found = {}
        for place in range(len(metrics)):
            row = rows[place]
            number = row.value
            if row.nvmlReturn == 0 and math.isfinite(number) and number >= 0:
                found[row.metricId] = number
        return found


def believable(
    processes: Sequence[GpuProcess], instances: Iterable[int], *, memory: float | None
) -> bool:
    """Tells a process list from one that a driver laid out in another struct size.

    Drivers 530 to 535.98, and the bindings of that time, have 32 bytes an entry where others
    have 24: read with the wrong size, pids come out of memory sizes and ids out of pids.

    Args:
        processes: as the binding read them.
        instances: their GPU instance ids; one and the same in a list of one GPU or slice.
        memory: bytes of the GPU, None where it shares the machine's.
    """
    limit = memory if memory is not None else 1 << 48
    ids = set(instances)
    return (
        all(0 < p.pid <= PID_LIMIT and (p.memory or 0) <= limit for p in processes)
        and len(ids) <= 1
        and all(instance == NO_INSTANCE or instance < 64 for instance in ids)
    )


class Device:
    """One GPU, followed from round to round by one thread at a time.

    Args:
        nvml: the library.
        index: its NVML index.
        proc: where /proc is.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        nvml: Nvml,
        index: int,
        *,
        proc: str = "/proc",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.gpus: tuple[Gpu, ...] = ()
        """The GPU, or its MIG slices; kept while it does not answer."""
        self.pcie_by_call = False
        """Whether PCIe throughput needs `measure_pcie`."""
        self.session = 0
        """Grows with every new handle: what was registered for an older one is gone."""
        self.pcie: tuple[float, float] | None = None
        """Bytes received and sent a second, from `measure_pcie`; None while it hangs."""
        self._nvml = nvml
        self._proc = proc
        self._clock = clock
        self._handle: Any = None
        self._slices: dict[str, Any] = {}
        self._round = 0
        self._gpm: dict[str, _GpmPair] = {}
        self._gpm_supported: bool | None = None
        self._slow: tuple[dict[str, float], dict[tuple[str, str], float]] | None = None
        self._old_list = False
        self._rejected = False
        self._utilization_since = 0
        self._energy: tuple[float, float] | None = None
        self._idle_energy = 0.0

    def read(self, wanted: Container[str]) -> list[GpuReading]:
        """Reads the GPU, or each of its MIG slices; those not wanted only for their processes.

        Raises:
            GpuLostError: it does not answer; the next call tries to get it back.
            DriverError: the driver is gone.
        """
        try:
            if self._handle is None or self._round % SLOW_ROUNDS == 0:
                self._identify()
            readings = [self._read_one(gpu, whole=gpu.uuid in wanted) for gpu in self.gpus]
        except (GpuLostError, DriverError):
            self._let_go()
            raise
        self._round += 1
        return readings

    def measure_pcie(self) -> None:
        """Measures PCIe throughput the slow way: the driver waits 20 ms for each direction.

        nvmlDeviceGetPcieThroughput, kilobytes a second.

        Raises:
            GpuLostError: it does not answer.
            DriverError: the driver is gone.
        """
        handle = self._handle
        if handle is None:
            return
        sent, received = (
            self._nvml.ask("nvmlDeviceGetPcieThroughput", handle, way) for way in (0, 1)
        )
        if sent is None or received is None:
            self.pcie = None
        else:
            self.pcie = (received * 1000.0, sent * 1000.0)

    def watch_errors(self, events: Any) -> bool:
        """Registers the GPU for XID events; returns whether it can tell them."""
        nvml, handle = self._nvml, self._handle
        if handle is None:
            return False
        supported = nvml.ask("nvmlDeviceGetSupportedEventTypes", handle)
        if not supported or not supported & XID_EVENT:
            return False
        # None is this function's only answer: whether it failed shows by what was said.
        nvml.ask("nvmlDeviceRegisterEvents", handle, XID_EVENT, events)
        return True

    def _let_go(self) -> None:
        self._handle, self._slices = None, {}
        self._gpm_supported, self._slow, self._energy, self.pcie = None, None, None, None
        self._round = 0
        for pair in self._gpm.values():
            pair.forget()

    def _identify(self) -> None:
        ask = self._nvml.ask
        if self._handle is None:
            self._handle = ask("nvmlDeviceGetHandleByIndex", self.index)
            self.session += 1
        uuid = self._handle is not None and ask("nvmlDeviceGetUUID", self._handle)
        if not uuid:
            raise GpuLostError(f"GPU {self.index} has no handle or no uuid")
        model = ask("nvmlDeviceGetName", self._handle) or ""
        minor = ask("nvmlDeviceGetMinorNumber", self._handle)
        mode = ask("nvmlDeviceGetMigMode", self._handle)
        if mode and mode[0] == 1:
            found = list(self._find_slices(uuid, model, minor))
            self._slices = {piece.uuid: handle for piece, handle in found}
            self.gpus = tuple(piece for piece, _ in found)
            return
        self._slices = {}
        gpu = Gpu(
            uuid=uuid,
            index=self.index,
            vendor="nvidia",
            model=model,
            # The minor number need not be the index.
            nodes=frozenset() if minor is None else frozenset({f"/dev/nvidia{minor}"}),
            names=frozenset({uuid.lower(), str(self.index)}),
            unified=self._memory(self._handle) is None
            and self._nvml.unsupported("nvmlDeviceGetMemoryInfo"),
        )
        self.gpus = (gpu,)

    def _find_slices(self, whole: str, model: str, minor: int | None) -> Iterator[tuple[Gpu, Any]]:
        ask = self._nvml.ask
        nodes = mig_nodes(self._proc)
        for place in range(ask("nvmlDeviceGetMaxMigDeviceCount", self._handle) or 0):
            handle = ask("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, place)
            uuid = handle and ask("nvmlDeviceGetUUID", handle)
            instance = handle and ask("nvmlDeviceGetGpuInstanceId", handle)
            if not uuid or instance is None:
                continue
            compute = ask("nvmlDeviceGetComputeInstanceId", handle)
            node = None if minor is None else nodes.get((minor, instance))
            names = (uuid, f"{self.index}:{place}", f"MIG-{whole}/{instance}/{compute}")
            gpu = Gpu(
                uuid=uuid,
                index=self.index,
                vendor="nvidia",
                model=ask("nvmlDeviceGetName", handle) or model,
                nodes=frozenset({node} if node else ()),
                names=frozenset(name.lower() for name in names),
                instance=Instance(parent=whole, gpu_instance=instance),
            )
            yield gpu, handle

    def _read_one(self, gpu: Gpu, *, whole: bool) -> GpuReading:
        handle = self._slices.get(gpu.uuid, self._handle)
        values: dict[str, float] = {}
        parts: dict[tuple[str, str], float] = {}
        profiled_by = ""
        memory = self._memory(handle)
        processes = self._processes(handle, memory)
        if whole:
            if memory is not None:
                total, free, used = memory
                values.update(gpu_memory_total=total, gpu_memory_free=free, gpu_memory_used=used)
            self._read_clocks(values, parts)
            if gpu.instance is None:
                self._read_board(values, parts)
                processes = self._with_utilization(processes)
            profiled_by = self._read_gpm(gpu, values)
            if gpu.instance is None:
                self._add_slow(values, parts)
            if not values:
                raise GpuLostError(f"GPU {self.index} answers nothing")
        return GpuReading(
            gpu=gpu,
            taken=self._clock(),
            values=values,
            parts=parts,
            processes=processes,
            profiled_by=profiled_by,
        )

    def _memory(self, handle: Any) -> tuple[float, float, float] | None:
        info = self._nvml.ask("nvmlDeviceGetMemoryInfo", handle, 0x02000028)
        if info is None:
            # Drivers before 510; `used` then holds what the driver reserves, too.
            info = self._nvml.ask("nvmlDeviceGetMemoryInfo", handle)
        return (info.total, info.free, info.used) if info is not None and info.total else None

    def _read_clocks(self, values: dict[str, float], parts: dict[tuple[str, str], float]) -> None:
        """Reads what holds for the whole GPU and so for each slice of it."""
        ask, handle = self._nvml.ask, self._handle
        _put(values, "gpu_temperature_c", ask("nvmlDeviceGetTemperature", handle, 0))
        for clock, name in ((1, "sm"), (2, "memory")):
            clock_mhz = ask("nvmlDeviceGetClockInfo", handle, clock)
            if clock_mhz is not None:
                parts["kitty_gpu_clock_hertz", name] = clock_mhz * 1e6
        events = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if events is None:
            events = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if events is not None:
            for bit, name in CLOCK_EVENTS.items():
                parts["kitty_gpu_clock_event", name] = float(bool(events & bit))

    def _read_board(self, values: dict[str, float], parts: dict[tuple[str, str], float]) -> None:
        """Reads what cannot be told apart between the slices of a GPU."""
        ask, handle = self._nvml.ask, self._handle
        power = ask("nvmlDeviceGetPowerUsage", handle)
        if power is not None:
            values["gpu_power_draw_watts"] = power / 1000
        rates = ask("nvmlDeviceGetUtilizationRates", handle)
        if rates is not None:
            values["gpu_sm_utilization"] = rates.gpu
            values["gpu_memory_utilization"] = rates.memory
        energy = ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        if energy is not None:
            values["kitty_gpu_energy_joules"] = energy / 1000
        self._count_idle(values)
        pcie = self.pcie
        if pcie is not None:
            values["gpu_pcie_rx_bytes"], values["gpu_pcie_tx_bytes"] = pcie
        fields = self._nvml.fields(handle, [*THROTTLED, REPLAYS])
        for field, name in THROTTLED.items():
            if field in fields:
                parts["kitty_gpu_throttled_seconds", name] = fields[field] / 1e9
        _put(values, "kitty_gpu_pcie_replays", fields.get(REPLAYS))
        if values.get("gpu_sm_utilization"):
            # An idle link rests at a lower generation, which says nothing.
            for name, call in (("generation", "Generation"), ("width", "Width")):
                lanes = ask(f"nvmlDeviceGetCurrPcieLink{call}", handle)
                _put(values, f"kitty_gpu_pcie_link_{name}", lanes)

    def _count_idle(self, values: dict[str, float]) -> None:
        """Adds the energy used between two readings that both found no work."""
        energy = values.get("kitty_gpu_energy_joules")
        busy = values.get("gpu_sm_utilization")
        if energy is None or busy is None:
            self._energy = None
            return
        if self._energy is not None and busy == 0 and self._energy[1] == 0:
            self._idle_energy += max(0.0, energy - self._energy[0])
        self._energy = (energy, busy)
        values["kitty_gpu_idle_energy_joules"] = self._idle_energy

    def _add_slow(self, values: dict[str, float], parts: dict[tuple[str, str], float]) -> None:
        if self._slow is None or (self._round + self.index) % SLOW_ROUNDS == 0:
            self._slow = self._read_slow()
        values.update(self._slow[0])
        parts.update(self._slow[1])

    def _read_slow(self) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        ask, handle = self._nvml.ask, self._handle
        values: dict[str, float] = {}
        for name, call in (("generation", "Generation"), ("width", "Width")):
            most = ask(f"nvmlDeviceGetMaxPcieLink{call}", handle)
            _put(values, f"kitty_gpu_pcie_link_{name}_max", most)
        found = self._nvml.fields(handle, list(SLOW_FIELDS))
        parts = {key: found[field] for field, key in SLOW_FIELDS.items() if field in found}
        if not any(name == "kitty_gpu_nvlink_errors" for name, _ in parts):
            wanted = [(field, link) for field in LINK_FIELDS for link in range(LINKS)]
            found = self._nvml.fields(handle, wanted)
            parts.update({LINK_FIELDS[field]: number for field, number in found.items()})
        return values, parts

    def _read_gpm(self, gpu: Gpu, values: dict[str, float]) -> str:
        if self._gpm_supported is None:
            support = self._nvml.ask("nvmlGpmQueryDeviceSupport", self._handle)
            self._gpm_supported = support is not None and support.isSupportedDevice == 1
        if not self._gpm_supported:
            self.pcie_by_call = gpu.instance is None
            return ""
        pair = self._gpm.setdefault(gpu.uuid, _GpmPair(self._nvml, gpu.instance))
        metrics = pair.read(self._handle, self._clock())
        for metric, name in GPM_RATIOS.items():
            if metric in metrics:
                values[name] = min(1.0, metrics[metric] / 100)
        for metric, name in GPM_RATES.items():
            if metric in metrics:
                values[name] = metrics[metric] * MEBIBYTE
        if metrics:
            self.pcie_by_call = gpu.instance is None and not {20, 21} <= metrics.keys()
        return "gpm" if any(metric in GPM_RATIOS for metric in metrics) else ""

    def _processes(
        self, handle: Any, memory: tuple[float, float, float] | None
    ) -> tuple[GpuProcess, ...] | None:
        name = "nvmlDeviceGetComputeRunningProcesses"
        rows = None if self._old_list else self._nvml.ask(name, handle)
        if rows is None:
            rows = self._nvml.ask(f"{name}_v2", handle)
            self._old_list = rows is not None
        if rows is None:
            return None
        # Translated to our PID namespace, drivers before 565.57 give no memory but 0.
        found = tuple(GpuProcess(row.pid, row.usedGpuMemory or None) for row in rows)
        instances = [getattr(row, "gpuInstanceId", 0) for row in rows]
        if not believable(found, instances, memory=memory[0] if memory else None):
            if not self._rejected:
                self._rejected = True
                LOG.warning("GPU %d: the process list has another driver's form", self.index)
            return None
        return found

    def _with_utilization(
        self, processes: tuple[GpuProcess, ...] | None
    ) -> tuple[GpuProcess, ...] | None:
        if not processes:
            return processes
        samples = self._nvml.ask(
            "nvmlDeviceGetProcessUtilization", self._handle, self._utilization_since
        )
        shares: dict[int, list[int]] = {}
        for sample in samples or ():
            self._utilization_since = max(self._utilization_since, sample.timeStamp)
            if sample.smUtil <= 100:
                shares.setdefault(sample.pid, []).append(sample.smUtil)
        # Processes that are not listed may be of another PID namespace.
        return tuple(
            GpuProcess(p.pid, p.memory, sum(shares[p.pid]) / len(shares[p.pid]))
            if p.pid in shares
            else p
            for p in processes
        )


class _GpmPair:
    """The two GPM samples that a GPU or a slice is measured between."""

    def __init__(self, nvml: Nvml, instance: Instance | None) -> None:
        self._nvml = nvml
        self._instance = instance
        self._old: tuple[Any, float] | None = None
        self._spare: list[Any] = []

    def read(self, handle: Any, now: float) -> Mapping[int, float]:
        """Takes a sample; returns the metrics since the one before, empty for the first."""
        if self._old is not None and now - self._old[1] < GPM_GAP:
            return {}
        sample = self._spare.pop() if self._spare else self._nvml.ask("nvmlGpmSampleAlloc")
        if sample is None:
            return {}
        if not self._take(handle, sample):
            self._spare.append(sample)
            self.forget()
            return {}
        old, self._old = self._old, (sample, now)
        if old is None:
            return {}
        self._spare.append(old[0])
        return self._nvml.metrics_query(old[0], sample, [*GPM_RATIOS, *GPM_RATES])

    def forget(self) -> None:
        """Starts anew: what comes next is not measured from before."""
        if self._old is not None:
            self._spare.append(self._old[0])
            self._old = None

    def _take(self, handle: Any, sample: Any) -> bool:
        if self._instance is None:
            return self._nvml.ask("nvmlGpmSampleGet", handle, sample) is not None
        instance = self._instance.gpu_instance
        return self._nvml.ask("nvmlGpmMigSampleGet", handle, instance, sample) is not None


class XidEvents:
    """Waits for XID errors of the GPUs that were registered."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self.handle: Any = nvml.ask("nvmlEventSetCreate")

    def close(self) -> None:
        """Gives the set back; its GPUs are then not watched any more."""
        if self.handle is not None:
            self._nvml.ask("nvmlEventSetFree", self.handle)

    def wait(self, seconds: float) -> tuple[str, int, int] | None:
        """Waits for one event.

        Returns:
            uuid of the GPU, XID, GPU instance or NO_INSTANCE; None when there was none.

        Raises:
            GpuLostError: a GPU of the set does not answer.
            DriverError: the driver is gone.
        """
        event = self._nvml.ask("nvmlEventSetWait_v2", self.handle, int(seconds * 1000))
        if event is None or not event.eventType & XID_EVENT:
            return None
        uuid = self._nvml.ask("nvmlDeviceGetUUID", event.device)
        return (uuid, event.eventData, event.gpuInstanceId) if uuid else None


def _put(values: dict[str, float], name: str, value: float | None) -> None:
    if value is not None:
        values[name] = value


def mig_nodes(root: str = "/proc") -> dict[tuple[int, int], str]:
    """Reads which device node opens a GPU instance.

    Sample line of /proc/driver/nvidia-caps/mig-minors: `gpu0/gi1/access 12`; gpuN is the minor
    number. Lines of any other form are ignored.

    Returns:
        Paths as /dev/nvidia-caps/nvidia-cap12 by minor number and GPU instance; empty where
        there is no such file.
    """
    try:
        with open(os.path.join(root, "driver/nvidia-caps/mig-minors"), encoding="ascii") as lines:
            rows = [line.split() for line in lines]
    except (OSError, UnicodeDecodeError):
        return {}
    found = {}
    for row in rows:
        parts = row[0].split("/") if len(row) == 2 else []
        if len(parts) == 3 and parts[0][:3] == "gpu" and parts[1][:2] == "gi":
            gpu, instance = parts[0][3:], parts[1][2:]
            if parts[2] == "access" and gpu.isdigit() and instance.isdigit() and row[1].isdigit():
                found[int(gpu), int(instance)] = f"/dev/nvidia-caps/nvidia-cap{int(row[1])}"
    return found
