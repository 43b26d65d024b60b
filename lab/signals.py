"""Which rank stands out, and by which signal: a stretch with the fault against the one before.

A signal is a set of cells. Most have one cell a rank. Those of the network have one for each pair
of pods that exchange data, because a bad link of one pod also shows at the pods that send to it;
a rank's own figure is then the lowest of the cells it takes part in, so only the rank that all of
its cells accuse stands out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean, median

from lab.scrape import Window

ENOUGH_SEGMENTS = 50  # fewer say nothing about a link
ENOUGH_ROUND_TRIPS = 5
TIMES_THE_PEERS = 3.0

Cells = dict[tuple[int, ...], float]


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A row of the table.

    Attributes:
        name: As people read it.
        unit: Of its cells.
        floor: Smallest excess over the stretch before that counts.
        cells: Reads the cells from a window; those that are unknown are absent.
    """

    name: str
    unit: str
    floor: float
    cells: Callable[[Window], Cells]


def round_trip(window: Window) -> Cells:
    """Return the mean round trip between two pods, in milliseconds.

    Where too few were measured it is the median of the smoothed figure, of which idle connections
    to the same pod are part.
    """
    cells: Cells = {}
    for rank, peer, address, _ in sending_pairs(window):
        count = window.increase(rank, "kitty_tcp_peer_rtt_seconds_count", peer=address) or 0.0
        total = window.increase(rank, "kitty_tcp_peer_rtt_seconds_sum", peer=address)
        smoothed = window.gauge(rank, "kitty_tcp_peer_srtt_seconds", peer=address)
        if total is not None and count >= ENOUGH_ROUND_TRIPS:
            cells[rank, peer] = 1000 * total / count
        elif smoothed:
            cells[rank, peer] = 1000 * median(smoothed)
    return cells


def retransmits(window: Window) -> Cells:
    """Return the share of segments sent again between two pods, in percent."""
    cells: Cells = {}
    for rank, peer, address, sent in sending_pairs(window):
        name = "kitty_tcp_peer_retransmitted_segments_total"
        again = window.increase(rank, name, peer=address)
        if again is not None:
            cells[rank, peer] = 100 * again / sent
    return cells


def sending_pairs(window: Window) -> list[tuple[int, int, str, float]]:
    """Return the pairs that exchanged data: rank, peer, the peer's address, segments sent."""
    name = "kitty_tcp_peer_sent_segments_total"
    pairs = []
    for rank in sorted(set(window.ranks.values())):
        for peer, address in sorted(window.peers(rank, name).items()):
            sent = window.increase(rank, name, peer=address)
            if sent is not None and sent >= ENOUGH_SEGMENTS:
                pairs.append((rank, peer, address, sent))
    return pairs


def send_queue(window: Window) -> Cells:
    """Return the mean of what waits to be sent or acknowledged, in kilobytes."""
    return _per_rank(window, lambda rank: _mean(window.gauge(rank, "net_tcp_tx_queue_bytes"), 1e-3))


def run_queue(window: Window) -> Cells:
    """Return how long a rank was ready to run and did not, in milliseconds a second."""
    name = "kitty_rank_run_queue_delay_seconds_total"
    return _per_rank(window, lambda rank: _scaled(window.rate(rank, name), 1000))


def stopped(window: Window) -> Cells:
    """Return the share of scrapes that found a rank stopped, in percent."""
    return _per_rank(window, lambda rank: _mean(window.gauge(rank, "proc_state", state="T"), 100))


def throttled(window: Window) -> Cells:
    """Return the share of periods in which its quota held the container back, in percent."""
    prefix = "kitty_cgroup_cpu"

    def figure(rank: int) -> float | None:
        held = window.increase(
            rank, f"{prefix}_throttled_periods_total", scope="container", rank=str(rank)
        )
        periods = window.increase(
            rank, f"{prefix}_periods_total", scope="container", rank=str(rank)
        )
        if held is None or periods is None:
            return None
        return 100 * held / periods if periods else 0.0

    return _per_rank(window, figure)


def storage_wait(window: Window) -> Cells:
    """Return how many of a rank's workers waited for storage, on average, in percent of one."""
    name = "kitty_rank_workers"
    return _per_rank(window, lambda rank: _mean(window.gauge(rank, name, state="D"), 100))


def _per_rank(window: Window, figure: Callable[[int], float | None]) -> Cells:
    figures = {(rank,): figure(rank) for rank in sorted(set(window.ranks.values()))}
    return {cell: value for cell, value in figures.items() if value is not None}


def _mean(values: list[float], scale: float) -> float | None:
    return scale * mean(values) if values else None


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


SIGNALS = {
    signal.name: signal
    for signal in (
        Signal(name="rtt", unit="ms", floor=5, cells=round_trip),
        Signal(name="retransmits", unit="%", floor=0.5, cells=retransmits),
        Signal(name="tx queue", unit="kB", floor=100, cells=send_queue),
        Signal(name="run queue", unit="ms/s", floor=50, cells=run_queue),
        Signal(name="throttled", unit="% of periods", floor=10, cells=throttled),
        Signal(name="storage wait", unit="% of the time", floor=25, cells=storage_wait),
        Signal(name="stopped", unit="%", floor=25, cells=stopped),
    )
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one signal says.

    Attributes:
        before: Figure of each rank in the stretch before; unknown ones are absent.
        during: The same with the fault.
        excess: How far each rank rose.
        outlier: The rank that stands out; None where none does.
    """

    before: Mapping[int, float]
    during: Mapping[int, float]
    excess: Mapping[int, float]
    outlier: int | None

    def peers_median(self, rank: int) -> float | None:
        """Return the median of the other ranks' figures with the fault."""
        others = [value for other, value in self.during.items() if other != rank]
        return median(others) if others else None


def compare(signal: Signal, before: Window, during: Window) -> Comparison:
    """Compare a stretch with the one before it.

    A rank stands out when it rose by the signal's floor at least, and ``TIMES_THE_PEERS`` as far
    as the median of the others. It takes three ranks.
    """
    earlier, later = signal.cells(before), signal.cells(during)
    rise = {cell: value - earlier.get(cell, 0.0) for cell, value in later.items()}
    excess = lowest_by_rank(rise)
    outlier = None
    if len(excess) >= 3:
        first = max(excess, key=lambda rank: excess[rank])
        others = median(value for rank, value in excess.items() if rank != first)
        if excess[first] >= max(signal.floor, TIMES_THE_PEERS * others):
            outlier = first
    return Comparison(
        before=lowest_by_rank(earlier),
        during=lowest_by_rank(later),
        excess=excess,
        outlier=outlier,
    )


def lowest_by_rank(cells: Cells) -> dict[int, float]:
    """Return each rank's lowest cell; a rank of a single pair is absent: it or its peer, who knows.

    Example:
        ``{(0, 1): 9.0, (1, 2): 1.0, (2, 0): 8.0}`` gives ``{0: 8.0, 1: 1.0, 2: 1.0}``.
    """
    by_rank: dict[int, list[float]] = {}
    for cell, value in cells.items():
        for rank in cell:
            by_rank.setdefault(rank, []).append(value)
    paired = any(len(cell) > 1 for cell in cells)
    return {
        rank: min(values)
        for rank, values in sorted(by_rank.items())
        if len(values) > 1 or not paired
    }
