"""The kernel's view of waiting, of killing and of dropping: the eBPF rows of the reference.

Three probes, each with or without the others: waits of the pod's threads, OOM kills in its PID
namespace, packets dropped in its network namespace.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from sidecar.collectors.base import Reason, UnavailableError
from sidecar.ebpf import events, loader, rtt, waits
from sidecar.sources.oom_kills import OomKills

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from sidecar.attribution import PodView
    from sidecar.pod import Pod
    from sidecar.sources.cgroup_mounts import CgroupFS

LOG = logging.getLogger("kitty.kernel")

RETRY_SECONDS = 60.0
HISTOGRAMS = {
    "futex": (
        "proc_futex_wait_duration_seconds",
        "Time that threads of the rank slept in futex system calls, until they ran again.",
    ),
    "preempt": (
        "proc_sched_preempt_duration_seconds",
        "Time that threads of the rank could have run but were off the CPU: another had it.",
    ),
    "wakeup": (
        "proc_sched_wakeup_latency_seconds",
        "Time from the wake-up of a thread of the rank until it ran.",
    ),
}


@dataclass(frozen=True, slots=True)
class _Published:
    """What a scrape serves; replaced as a whole."""

    waits: Mapping[int, int] = field(default_factory=dict)
    """By the process that has the series: a vector of `ebpf.waits.ProcessWaits`."""
    drops: Mapping[str, int] | None = None
    oom_kills: int | None = None


class KernelCollector:
    """Reads the probes' maps every 500 ms.

    Args:
        pod: the pod's processes.
        load: loads eBPF programs.
        cgroups: counts OOM kills where the program cannot.
        proc: root of procfs.
        clock: seconds, monotonic.
    """

    name = "kernel"
    interval = 0.5

    def __init__(
        self,
        pod: Pod,
        load: loader.Loader,
        cgroups: CgroupFS,
        *,
        proc: str = "/proc",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pod = pod
        self._load = load
        self._cgroups = cgroups
        self._proc = proc
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._loaded_at = 0.0
        self._results: dict[str, loader.Loaded | loader.Refused] = {}
        self._waits: waits.WaitProbe | None = None
        self._view: PodView | None = None
        self._series_of: dict[int, int] = {}
        self._unplaced: dict[int, int] = {}
        self._vectors: dict[int, int] = {}
        self._oom = OomKills()
        self._published = _Published()

    def sample(self) -> None:
        """Reads once.

        Raises:
            UnavailableError: none of the probes can be used here.
        """
        ready = self._ready()
        if not self._results:
            if ready:
                raise UnavailableError(Reason.ERROR, "the loader's thread ended early")
            raise UnavailableError(Reason.STARTING, "the probes are being loaded")
        loaded = {n: r for n, r in self._results.items() if isinstance(r, loader.Loaded)}
        view = self._pod.view
        self._read_waits(view)
        self._view = view
        drops, oom = loaded.get("drops"), loaded.get("oom")
        if oom is None:
            self._oom.add(self._counts())
        self._published = _Published(
            dict(self._vectors),
            events.read_drops(drops) if drops else None,
            events.read_oom_kills(oom) if oom else self._oom.total,
        )
        if not loaded:
            refused = next(r for r in self._results.values() if isinstance(r, loader.Refused))
            raise UnavailableError(Reason(refused.reason), refused.detail)

    def close(self) -> None:
        """Detaches the probes."""
        if self._thread is not None:
            self._thread.join()
        if self._waits is not None:
            self._waits.close()
        for name, result in self._results.items():
            if isinstance(result, loader.Loaded) and name != "waits":
                result.close()

    def collect(self) -> Iterator[Metric]:
        """Yields the histograms of each rank, the pod's counters and the probes' state."""
        published, view, node = self._published, self._pod.view, self._pod.config.node
        families = {
            name: HistogramMetricFamily(family, text, labels=("pid", "node", "rank", "job"))
            for name, (family, text) in HISTOGRAMS.items()
        }
        for pid, vector in sorted(published.waits.items()):
            rank = view.rank_of.get(pid)
            if rank is None:
                continue
            both = waits.ProcessWaits.unpack(vector)
            for name, family in families.items():
                histogram: waits.Waits = getattr(both, name)
                family.add_metric(
                    (str(pid), node, rank.rank, rank.job),
                    _buckets(histogram),
                    sum_value=histogram.sum_seconds,
                )
        yield from families.values()
        if published.oom_kills is not None:
            kills = CounterMetricFamily(
                "sys_oom_kill_event",
                "Processes of the pod that the kernel killed for want of memory.",
                labels=("node", "job"),
            )
            kills.add_metric((node, view.job), published.oom_kills)
            yield kills
        if published.drops is not None:
            dropped = CounterMetricFamily(
                "net_packet_drop_reason",
                "Packets that the kernel dropped in the pod's network namespace, by its reason.",
                labels=("reason", "node", "job"),
            )
            for reason, count in sorted(published.drops.items()):
                dropped.add_metric((reason, node, view.job), count)
            yield dropped
        yield self._state(node, view.job)

    def _state(self, node: str, job: str) -> Metric:
        state = GaugeMetricFamily(
            "kitty_kernel_probe_up",
            "Whether the eBPF probe is at work; reason says why not.",
            labels=["probe", "reason", "node", "job"],
        )
        for name, result in tuple(self._results.items()):
            refused = isinstance(result, loader.Refused)
            reason = result.reason if isinstance(result, loader.Refused) else ""
            state.add_metric([name, reason, node, job], 0 if refused else 1)
        return state

    def _counts(self) -> dict[str, int]:
        counts = {}
        for container, (pid, paths) in self._pod.containers().items():
            usage = self._cgroups.usage(pid, paths)
            count = usage.events.get("oom_kill") if usage is not None else None
            if count is not None:
                counts[container] = count
        return counts

    def _ready(self) -> bool:
        """Whether loading has ended; starts it, and once more where trouble may have passed."""
        if self._thread is not None and self._thread.is_alive():
            return False
        passing = any(
            isinstance(result, loader.Refused) and result.reason in loader.TRANSIENT
            for result in self._results.values()
        )
        if self._thread is None or (passing and self._clock() - self._loaded_at > RETRY_SECONDS):
            self._loaded_at = self._clock()
            self._thread = threading.Thread(target=self._start, name="kernel-loader", daemon=True)
            self._thread.start()
            return False
        return True

    def _start(self) -> None:
        results = dict(self._results)
        wanted = {"waits": waits.candidate(proc=self._proc)}
        oom = events.oom_candidate(proc=self._proc)
        if oom is not None:
            wanted["oom"] = oom
        scope = rtt.Scope.own(proc=self._proc)
        if not scope.host_network:
            wanted["drops"] = events.drop_candidate(scope.netns)
        for name, result in results.items():
            if isinstance(result, loader.Loaded):
                wanted.pop(name, None)
        for name, result in zip(
            wanted, self._load.load(*([candidate] for candidate in wanted.values())), strict=True
        ):
            results[name] = result
            before = self._results.get(name)
            known = isinstance(before, loader.Refused) and isinstance(result, loader.Refused)
            if isinstance(result, loader.Refused) and not known:
                LOG.warning("kernel: %s: off: %s: %s", name, result.reason, result.detail)
        loaded = results["waits"]
        if isinstance(loaded, loader.Loaded) and self._waits is None:
            self._waits = waits.WaitProbe(loaded, proc=self._proc)
        self._results = results

    def _read_waits(self, view: PodView) -> None:
        if self._waits is None:
            return
        if view is not self._view:
            self._series_of.update(_series(view))
            self._vectors = {p: v for p, v in self._vectors.items() if p in view.processes}
        unplaced, self._unplaced = self._unplaced, {}
        for pid, growth in (*unplaced.items(), *self._waits.read()):
            series = self._series_of.get(pid)
            if series is not None:
                self._vectors[series] = self._vectors.get(series, 0) + growth
            elif pid not in unplaced:  # it may have started after the processes were read
                self._unplaced[pid] = growth
        if view is not self._view:
            self._series_of = _series(view)
            self._waits.watch(self._series_of)


def _series(view: PodView) -> dict[int, int]:
    """For each process of a rank, the one under whose pid it is counted."""
    places: dict[int, int] = {}
    for rank in view.ranks:
        heads = set(rank.heads)
        for pid in rank.members:
            above: int | None = pid
            passed: set[int] = set()
            while above is not None and above not in heads and above not in passed:
                passed.add(above)
                process = view.processes.get(above)
                above = process.ppid if process else None
            places[pid] = above if above in heads else rank.heads[0]
    return places


def _buckets(histogram: waits.Waits) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    edges = (*(str(edge) for edge in waits.BUCKET_EDGES_SECONDS), "+Inf")
    for edge, count in zip(edges, histogram.counts, strict=True):
        total += count
        buckets.append((edge, total))
    return buckets
