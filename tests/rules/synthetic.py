"""A job's series made by hand, for what the lab cannot show: GPUs, big jobs, broken inputs."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

LENGTH = 40
"""Samples, 5 s apart."""


def constant(value: float) -> str:
    """A gauge that stays."""
    return f"{value:g}x{LENGTH}"


def growing(by_s: float, start: float = 0.0) -> str:
    """A counter that grows evenly."""
    return f"{start:g}+{5 * by_s:g}x{LENGTH}"


def turning(before_s: float, after_s: float, at: int, length: int = LENGTH) -> str:
    """A counter whose growth a second changes at a sample."""
    turn = 5 * before_s * at
    return f"0+{5 * before_s:g}x{at} {turn + 5 * after_s:g}+{5 * after_s:g}x{length - at - 1}"


@dataclass
class Job:
    """Pods of one rank each that all exchange data with each other, calm unless told otherwise."""

    ranks: int
    name: str = "job"
    namespace: str = "ns"
    series: dict[str, str] = field(default_factory=dict)
    pairs: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for rank in range(self.ranks):
            self.put(rank, "kitty_pod_info", constant(1))
            self.put(rank, "kitty_pod_address_info", constant(1), f'address="{self.address(rank)}"')
            self.put(rank, "kitty_rank_run_queue_delay_seconds_total", growing(0.02))
            self.put(rank, "proc_state", constant(0), 'state="T"')
            self.put(rank, "kitty_tcp_busy_seconds_total", growing(0.1))
        self.connect(itertools.combinations(range(self.ranks), 2))

    @staticmethod
    def address(rank: int) -> str:
        """A pod's own address."""
        return f"10.0.0.{rank + 1}"

    def labels(self, rank: int) -> str:
        """What every series of a rank carries."""
        return (
            f'job="{self.name}",namespace="{self.namespace}",node="node-{rank}",pod="pod-{rank}",'
            f'rank="{rank}"'
        )

    def verdict(self, rank: int, kind: str) -> str:
        """Labels of a verdict."""
        return f'{{class="{kind}",{self.labels(rank)}}}'

    def put(self, rank: int, name: str, values: str, more: str = "") -> None:
        """Set one series."""
        self.series[f"{name}{{{self.labels(rank)}{',' if more else ''}{more}}}"] = values

    def cell(self, rank: int, peer: int, *, rtt_s: float = 0.001, lost: float = 0.0) -> None:
        """Set what a rank sees of another."""
        name, to = "kitty_pod_peer_{}", f'peer="{self.address(peer)}"'
        self.put(rank, name.format("rtt_seconds_count"), growing(20), to)
        self.put(rank, name.format("rtt_seconds_sum"), growing(20 * rtt_s), to)
        self.put(rank, name.format("sent_segments_total"), growing(100), to)
        self.put(rank, name.format("retransmitted_segments_total"), growing(100 * lost), to)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let these pairs exchange data, both ways, and no others."""
        for name in [name for name in self.series if name.startswith("kitty_pod_peer_")]:
            del self.series[name]
        self.pairs = {(a, b) for pair in pairs for a, b in (pair, pair[::-1])}
        for rank, peer in sorted(self.pairs):
            self.cell(rank, peer)

    def slow_link(self, rank: int, *, rtt_s: float = 0.05, lost: float = 0.0) -> None:
        """Heat every cell of a pod."""
        for pair in self.pairs:
            if rank in pair:
                self.cell(*pair, rtt_s=rtt_s, lost=lost)
