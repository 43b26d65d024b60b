"""What a vendor's source says of the GPUs of the node: the same words for every vendor.

Adding a vendor is one file that implements GpuSource, and one line in the agent's table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PERIOD = 1.0
"""Seconds between two readings of a GPU; polling faster disturbs the driver."""
EXPIRES = 2
"""Periods after which a reading is no longer what the GPU does now."""
OTHERS = 5
"""Periods between two looks at a GPU that is not the pod's."""


class State(StrEnum):
    """How the vendor's library fares as a whole; words that collectors/base.py has too."""

    STARTING = "starting"
    RUNNING = "running"
    MISSING = "missing"
    PERMISSION = "permission"
    MISMATCH = "mismatch"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """The slice of a GPU that a MIG device is.

    Attributes:
        parent: uuid of the whole GPU.
        gpu_instance: GPU instance id.
    """

    parent: str
    gpu_instance: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, or one slice of it that is given out on its own.

    Attributes:
        uuid: names it for good, across drivers and restarts.
        index: the vendor's index of the whole GPU.
        nodes: device nodes that only users of this one open, such as /dev/nvidia3.
        names: how a container's environment may name it, in lower case.
        instance: set for a slice.
        unified: it has no memory of its own but shares the machine's.
    """

    uuid: str
    index: int
    vendor: str
    model: str = ""
    nodes: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    instance: Instance | None = None
    unified: bool = False


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU, under the pid that the driver gives it.

    Attributes:
        memory: bytes, None where the driver does not say.
        sm_utilization: percent, None where it had no sample.
    """

    pid: int
    memory: int | None = None
    sm_utilization: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU at one time.

    Attributes:
        taken: monotonic seconds at its end.
        values: by family name, in the unit that the name says; what is unknown is not there.
        parts: the same for families with one more label, by name and that label's value.
        processes: None where the driver gives no list that can be believed.
        profiled_by: where the profiling rows come from, empty without any.
    """

    gpu: Gpu
    taken: float
    values: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[tuple[str, str], float] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] | None = None
    profiled_by: str = ""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """How often a GPU reported one kind of error, and when it last did (seconds since 1970)."""

    count: int
    last: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSnapshot:
    """All that a source knows, as finished values.

    Attributes:
        text: for people: why the state is what it is.
        gpus: every GPU known, those that answer no longer included.
        readings: the latest of each that answers, by uuid.
        errors: XID errors by uuid and number.
    """

    state: State
    text: str = ""
    gpus: tuple[Gpu, ...] = ()
    readings: Mapping[str, GpuReading] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, ErrorEvent]] = field(default_factory=dict)


class GpuSource(Protocol):
    """One vendor's GPUs, read in threads of the source's own."""

    def start(self) -> None:
        """Starts the threads."""

    def focus(self, uuids: Iterable[str]) -> None:
        """Says which GPUs are the pod's: only these are read whole."""

    def snapshot(self) -> GpuSnapshot:
        """Returns the latest values; never waits for the driver."""
