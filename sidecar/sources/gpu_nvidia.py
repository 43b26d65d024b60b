"""The NVIDIA GPUs of the node, read in threads that a hanging driver cannot stop.

One thread goes round the GPUs and gives each call into the driver to a second one, which is left
behind when the call hangs; PCIe throughput (20 ms a direction, where GPM has it not) and XID
events, which wait in the driver, have threads of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sidecar.sources.deadline import DeadlineRunner
from sidecar.sources.gpu import OTHERS, PERIOD, ErrorEvent, GpuSnapshot, State
from sidecar.sources.nvml import (
    NO_INSTANCE,
    Device,
    DriverError,
    GpuLostError,
    Nvml,
    XidEvents,
    load_library,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sidecar.sources.dcgm_exporter import DcgmExporter
    from sidecar.sources.gpu import Gpu, GpuReading

LOG = logging.getLogger("kitty.gpu")

DEADLINE = 0.5
"""Periods after which a GPU is left alone so that the others are read in time."""
START_DEADLINE = 30.0
"""Seconds for the library's start: without persistence mode it wakes every GPU of the node."""
FIRST_BACKOFF = 5
"""Periods until a driver that failed is tried again; twice as long each time it fails again."""
LONGEST_BACKOFF = 300.0
"""Seconds."""
XIDS = 16
"""Different XID numbers kept a GPU; more are counted as `other`."""


class NvidiaSource:
    """Reads every GPU that NVML shows; see GpuSource.

    Args:
        proc: where /proc is.
        period: seconds between two readings of a GPU.
        exporter: has the profiling rows of GPUs that GPM does not know.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        proc: str = "/proc",
        period: float = PERIOD,
        exporter: DcgmExporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._period = period
        self._exporter = exporter
        self._clock = clock
        self._state = (State.STARTING, "NVML has not answered yet")
        self._nvml: Nvml | None = None
        self._devices: tuple[Device, ...] = ()
        self._readings: dict[int, tuple[GpuReading, ...]] = {}
        self._looked: dict[int, float] = {}
        self._silent: set[int] = set()
        self._wanted: frozenset[str] = frozenset()
        self._errors: dict[tuple[str, int], dict[str, ErrorEvent]] = {}
        self._runner = DeadlineRunner("gpu-calls")
        self._pcie: threading.Thread | None = None

    def start(self) -> None:
        """Starts the threads."""
        threading.Thread(target=self._run, name="gpu", daemon=True).start()
        if self._exporter is not None:
            self._exporter.start()

    def focus(self, uuids: Iterable[str]) -> None:
        """Says which GPUs are read whole."""
        self._wanted = frozenset(uuids)

    def snapshot(self) -> GpuSnapshot:
        """Returns the latest values; never waits for the driver."""
        state, text = self._state
        readings = [r for rows in tuple(self._readings.values()) for r in rows]
        gpus = tuple(gpu for device in self._devices for gpu in device.gpus)
        return GpuSnapshot(
            state=state,
            text=text,
            gpus=gpus,
            readings={r.gpu.uuid: self._profiled(r) for r in readings},
            errors={gpu.uuid: self._errors_of(gpu) for gpu in gpus},
        )

    def _profiled(self, reading: GpuReading) -> GpuReading:
        if self._exporter is None or reading.profiled_by or not reading.values:
            return reading
        rows = self._exporter.rows(reading.gpu)
        # After a fault DCGM tells zeros; a GPU that works has none.
        if not rows or (reading.values.get("gpu_sm_utilization") and not any(rows.values())):
            return reading
        return replace(reading, values={**rows, **reading.values}, profiled_by="dcgm_exporter")

    def _errors_of(self, gpu: Gpu) -> Mapping[str, ErrorEvent]:
        """Returns the GPU's errors; to a slice also those that the driver gives to no slice."""
        piece = gpu.instance
        keys = [(gpu.uuid, NO_INSTANCE)]
        if piece is not None:
            keys = [(piece.parent, NO_INSTANCE), (piece.parent, piece.gpu_instance)]
        found: dict[str, ErrorEvent] = {}
        for key in keys:
            for number, event in self._errors.get(key, {}).items():
                before = found.get(number, ErrorEvent(0, 0.0))
                last = max(before.last, event.last)
                found[number] = ErrorEvent(before.count + event.count, last)
        return found

    def _run(self) -> None:
        pause = FIRST_BACKOFF * self._period
        while True:
            if not self._runner.run("driver", self._join, deadline=START_DEADLINE):
                self._state = (State.TIMEOUT, "NVML does not answer")
            if self._running:
                pause = FIRST_BACKOFF * self._period
                self._serve()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_BACKOFF)

    def _serve(self) -> None:
        """Reads until the driver is gone."""
        errors = threading.Thread(
            target=self._await_errors, args=(self._devices,), name="gpu-xid", daemon=True
        )
        errors.start()
        while self._running:
            self._round()
        self._part(errors)

    @property
    def _running(self) -> bool:
        return self._state[0] is State.RUNNING

    def _part(self, errors: threading.Thread) -> None:
        """Lets go of a driver that is gone, unless a thread of ours is still inside."""
        self._devices, self._readings = (), {}
        errors.join(2 * self._period)
        if self._nvml is not None and not self._runner.hanging and not errors.is_alive():
            self._runner.run("driver", self._nvml.stop, deadline=START_DEADLINE)

    def _join(self) -> None:
        try:
            nvml = self._nvml or Nvml()
            count = nvml.start()
        except ImportError as e:
            self._state = (State.MISSING, f"nvidia-ml-py: {e}")
        except DriverError as e:
            self._state = (e.state, str(e))
        else:
            self._nvml = nvml
            self._devices = tuple(
                Device(nvml, index, proc=self._proc, clock=self._clock) for index in range(count)
            )
            self._looked, self._silent = {}, set()
            self._state = (State.RUNNING, "")

    def _round(self) -> None:
        began = self._clock()
        for device in self._devices:
            wanted = any(gpu.uuid in self._wanted for gpu in device.gpus)
            age = began - self._looked.get(device.index, 0.0)
            if not wanted and device.gpus and age < OTHERS * self._period:
                continue
            self._looked[device.index] = began
            work = partial(self._read, device)
            if not self._runner.run(f"gpu{device.index}", work, deadline=DEADLINE * self._period):
                self._note_silence(device, "a call hangs")
        if self._pcie is None and any(device.pcie_by_call for device in self._devices):
            self._pcie = threading.Thread(target=self._measure_pcie, name="gpu-pcie", daemon=True)
            self._pcie.start()
        time.sleep(max(self._period / 10, began + self._period - self._clock()))

    def _read(self, device: Device) -> None:
        try:
            rows = tuple(device.read(self._wanted))
        except GpuLostError as e:
            self._readings.pop(device.index, None)
            self._note_silence(device, str(e))
        except DriverError as e:
            self._state = (e.state, str(e))
        else:
            self._readings[device.index] = rows
            if device.index in self._silent:
                self._silent.discard(device.index)
                LOG.info("GPU %d answers again", device.index)

    def _note_silence(self, device: Device, text: str) -> None:
        if device.index not in self._silent:
            self._silent.add(device.index)
            LOG.warning("GPU %d does not answer: %s", device.index, text)

    def _measure_pcie(self) -> None:
        runner = DeadlineRunner("gpu-pcie-calls")
        while True:
            began = self._clock()
            for device in self._devices:
                if device.pcie_by_call and any(g.uuid in self._wanted for g in device.gpus):
                    work = partial(self._measure_one, device)
                    if not runner.run(f"gpu{device.index}", work, deadline=self._period):
                        device.pcie = None
            time.sleep(max(self._period / 10, began + self._period - self._clock()))

    def _measure_one(self, device: Device) -> None:
        try:
            device.measure_pcie()
        except (GpuLostError, DriverError) as e:
            # The round of readings meets the same and tells it.
            LOG.debug("PCIe throughput of GPU %d: %s", device.index, e)

    def _await_errors(self, devices: tuple[Device, ...]) -> None:
        while self._devices is devices and self._running:
            assert self._nvml is not None
            try:
                events = XidEvents(self._nvml)
                if events.handle is None:
                    return
                try:
                    self._count_errors(devices, events)
                finally:
                    events.close()
            except (GpuLostError, DriverError) as e:
                # A lost GPU spoils the set for the others: they go on in a new one.
                LOG.debug("XID events: %s", e)
                time.sleep(self._period)

    def _count_errors(self, devices: tuple[Device, ...], events: XidEvents) -> None:
        sessions: dict[int, int] = {}
        while self._devices is devices and self._running:
            for device in devices:
                answers = device.index in self._readings and device.index not in self._silent
                if answers and sessions.get(device.index) != device.session:
                    sessions[device.index] = device.session
                    device.watch_errors(events.handle)
            if not sessions:
                time.sleep(self._period)
                continue
            event = events.wait(self._period)
            if event is not None:
                self._add_error(*event)

    def _add_error(self, uuid: str, number: int, instance: int) -> None:
        known = dict(self._errors.get((uuid, instance), {}))
        name = str(number) if str(number) in known or len(known) < XIDS else "other"
        before = known.get(name)
        known[name] = ErrorEvent(1 + (before.count if before else 0), time.time())
        self._errors[uuid, instance] = known
        if before is None:
            LOG.warning("GPU %s reports XID %d", uuid, number)


def nvidia(
    exporter: DcgmExporter | None, *, driver_root: str = "", proc: str
) -> NvidiaSource | None:
    """Returns the source, None on a node without NVIDIA's library."""
    place = load_library(driver_root)
    if place is None:
        LOG.info("gpu: off: there is no NVML library, so no NVIDIA GPU")
        return None
    LOG.info("gpu: NVML from %s", place)
    return NvidiaSource(proc=proc, exporter=exporter)
