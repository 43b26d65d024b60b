"""The figures that the rules record as `kitty:signal`: what each means and how it is written."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One signal.

    Attributes:
        name: Value of the label ``signal``.
        heading: Short, for a table.
        title: For a plot.
        unit: As `kitty.text.figure` takes it.
        sentence: With ``{}`` where the figure goes.
        low: Low, not high, is what points at a rank.
        network: One figure a pod, by its cells; the others are one a rank.
    """

    name: str
    heading: str
    title: str
    unit: str
    sentence: str
    low: bool = False
    network: bool = False


SIGNALS = {
    signal.name: signal
    for signal in (
        Signal(
            name="rtt",
            heading="RTT",
            title="Round trip, least of the pod's peers",
            unit="s",
            sentence="round trips with every peer take at least {}",
            network=True,
        ),
        Signal(
            name="retransmits",
            heading="retr",
            title="Sent again, least of the pod's peers",
            unit="ratio",
            sentence="with every peer at least {} of the segments are sent again",
            network=True,
        ),
        Signal(
            name="run_queue",
            heading="run queue",
            title="Waiting for a processor, all threads",
            unit="s/s",
            sentence="its threads wait for a processor {}",
        ),
        Signal(
            name="cpu_throttled",
            heading="quota",
            title="Periods held back by the CPU quota",
            unit="ratio",
            sentence="the CPU quota holds it back in {} of the periods",
        ),
        Signal(
            name="stopped",
            heading="stopped",
            title="Stopped (state T)",
            unit="ratio",
            sentence="it is stopped {} of the time",
        ),
        Signal(
            name="storage_wait",
            heading="storage",
            title="Processes waiting for storage (state D)",
            unit="processes",
            sentence="{} of its processes wait for storage",
        ),
        Signal(
            name="pipe_wait",
            heading="pipe",
            title="Waiting for a pipe, as for a data loader",
            unit="s/s",
            sentence="it waits for a pipe, as for a data loader, {}",
        ),
        Signal(
            name="gpu_throttled",
            heading="GPU thr",
            title="GPU clocks held back",
            unit="ratio",
            sentence="its GPU's clocks are held back {} of the time",
        ),
        Signal(
            name="tcp_busy",
            heading="TCP busy",
            title="Busy sending, all connections",
            unit="s/s",
            sentence="it is busy sending {}, all connections together",
        ),
        Signal(
            name="tx_queue",
            heading="tx queue",
            title="Bytes that wait to be sent",
            unit="bytes",
            sentence="{} wait to be sent",
        ),
        Signal(
            name="cpu",
            heading="CPU",
            title="Processor time used",
            unit="cores",
            sentence="it uses {}",
        ),
        Signal(
            name="futex_wait",
            heading="futex",
            title="Waiting on a futex, all threads",
            unit="s/s",
            sentence="its threads wait on a futex {}",
            low=True,
        ),
        Signal(
            name="gpu_clock",
            heading="GPU clock",
            title="GPU clock (SM)",
            unit="Hz",
            sentence="its GPU's clock is {}",
            low=True,
        ),
        Signal(
            name="gpu_power",
            heading="GPU power",
            title="GPU power",
            unit="W",
            sentence="its GPUs draw {}",
            low=True,
        ),
    )
}

EVIDENCE = {
    "network-latency": ("rtt",),
    "network-throttle": ("rtt", "tcp_busy", "tx_queue"),
    "network-loss": ("retransmits",),
    "cpu": ("run_queue", "cpu_throttled"),
    "gpu": ("gpu_throttled", "gpu_clock"),
    "input": ("storage_wait", "pipe_wait"),
    "paused": ("stopped",),
    "path": ("rtt", "retransmits"),
}
"""Signals that speak for a class, the first one first."""

LIMITS = {
    "network-latency": "a way that is narrow in both directions can look the same",
    "network-throttle": "whether the pod's own link or the node's is narrow",
    "network-loss": "whether the pod's own link or the node's loses data",
    "cpu": "who else uses the processors",
    "gpu": "a GPU that is slow for a reason the driver does not give",
    "input": "a loader that is slow without waiting: a remote service, slow decoding",
    "paused": "who stopped it",
    "path": "which of the two ends is at fault",
}
"""What a verdict of a class cannot tell."""

REASONS = {
    "two-ranks": "its two ranks differ, and two are too few to tell which of them is at fault",
    "ranks-restarted": "something is slow, but ranks began less than 20 s ago",
    "ranks-missing": "something is slow, but ranks that were there within ten minutes are not seen",
    "duplicate-ranks": "several pods have the same rank, as where two jobs have one name",
    "partial-data": "something is slow, but fewer than half of the pods report it",
}
"""Why no rank is named: values of the label ``reason`` of class ``inconclusive``."""


def signal_of(name: str) -> Signal:
    """Return a signal; one that this version does not know is shown by its name."""
    return SIGNALS.get(name) or Signal(
        name=name, heading=name, title=name, unit="", sentence=f"{name} is {{}}"
    )


def in_order(names: set[str]) -> list[Signal]:
    """Return signals in the order of the table above, unknown ones last."""
    known = [SIGNALS[name] for name in SIGNALS if name in names]
    return known + [signal_of(name) for name in sorted(names - SIGNALS.keys())]
