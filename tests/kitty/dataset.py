"""Jobs as a Prometheus sees them: the sidecars' families now, and what the rules said before.

Every series has its value at any time, so that the same one is written as history and served as a
page that continues it. What is judged at the end is judged by the shipped rules from the raw
families; only the hour before has their results written down.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Value = Callable[[float], float | None]
"""Takes seconds before (negative) or after the end of the history."""

HOUR = 3600
RAW_S = 60
"""The raw families' history: more than the rules' windows."""

BEGAN = 1_796_000_000
"""When a sidecar saw something change, by the node's clock."""

HOSTILE = "<script>alert(1)</script>\"'&\u202e\\é\n"
POD = '"><img src=x onerror=alert(2)>'
GPU = {"gpu_sm_utilization": 95, "gpu_power_draw_watts": 520}


@dataclass(frozen=True)
class Series:
    """One series, with its value at any time and where its history begins."""

    name: str
    labels: dict[str, str]
    value: Value
    since_s: int = RAW_S
    every_s: int = 5
    live: bool = True

    def text(self) -> str:
        """Its name and labels in the exposition format."""
        inner = ",".join(f'{key}="{_escaped(value)}"' for key, value in self.labels.items())
        return f"{self.name}{{{inner}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def constant(value: float) -> Value:
    """A gauge."""
    return lambda _: value


def growing(by_s: float) -> Value:
    """A counter."""
    return lambda t: 1000 + by_s * (t + 2 * HOUR)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of which one pod or rank is slow, or none.

    Attributes:
        name: Of the job.
        namespace: Of its pods.
        pods: How many.
        per_pod: Ranks in each.
        far_pod: Number of the pod behind a long way.
        starved: Rank that waits for a processor.
        stopped: Rank that is stopped.
        gpus: Whether it has any.
        blind: Whether its round trips cannot be read.
        ranked: Whether its processes carry ranks.
        ended_s: How long ago it ended; 0 is not.
    """

    name: str
    namespace: str = "training"
    pods: int = 4
    per_pod: int = 1
    far_pod: int | None = None
    starved: int | None = None
    stopped: int | None = None
    gpus: bool = False
    blind: bool = False
    ranked: bool = True
    ended_s: int = 0
    pod_prefix: str = ""

    def pod(self, number: int) -> dict[str, str]:
        """Labels of a pod."""
        prefix = self.pod_prefix or f"{self.name}-worker-"
        return {
            "namespace": self.namespace,
            "job": self.name,
            "pod": f"{prefix}{number}",
            "node": f"node-{number}",
            "instance": f"{self.address(number)}:9100",
        }

    def ranks(self) -> Iterator[tuple[int, int, dict[str, str]]]:
        """Each rank, its pod's number and its labels."""
        for number in range(self.pods):
            for local in range(self.per_pod):
                rank = number * self.per_pod + local
                yield rank, number, self.pod(number) | ({"rank": str(rank)} if self.ranked else {})

    def address(self, number: int) -> str:
        """A pod's address."""
        return f"10.1.{number >> 8}.{number & 255}"

    def raw(self) -> Iterator[Series]:
        """The sidecars' families."""
        for number in range(self.pods):
            yield from self._pod(number)
        for rank, _, labels in self.ranks():
            yield from self._rank(rank, labels)

    def _pod(self, number: int) -> Iterator[Series]:
        pod = self.pod(number)
        yield Series(
            "kitty_pod_address_info", {**pod, "address": self.address(number)}, constant(1)
        )
        # A ring: neighbours exchange data.
        for peer in {(number + 1) % self.pods, (number - 1) % self.pods} - {number}:
            far = self.far_pod in (number, peer)
            labels = {**pod, "peer": self.address(peer)}
            rtt = 0.052 if far else 0.001
            yield Series("kitty_pod_peer_rtt_seconds_count", labels, growing(20))
            yield Series("kitty_pod_peer_rtt_seconds_sum", labels, growing(20 * rtt))
            yield Series("kitty_pod_peer_sent_segments_total", labels, growing(100))
            yield Series("kitty_pod_peer_retransmitted_segments_total", labels, growing(0.1))
        yield Series("sys_oom_kill_event_total", pod, constant(0))
        collectors = ("pod", "net", "tcp", "rtt", "process", "rank", "kernel", "gpu", "cgroup")
        for collector in collectors:
            down = collector == "rtt" and self.blind
            up = {**pod, "collector": collector, "reason": "lockdown" if down else ""}
            yield Series("kitty_collector_up", up, constant(0 if down else 1))

    def _rank(self, rank: int, labels: dict[str, str]) -> Iterator[Series]:
        starved, stopped = rank == self.starved, rank == self.stopped
        yield Series("kitty_pod_info", labels, constant(1))
        yield Series(
            "kitty_rank_run_queue_delay_seconds_total",
            labels,
            growing(0.8 if starved else 0.02 + rank % 7 / 1e3),
        )
        yield Series("kitty_rank_cpu_seconds_total", labels, growing(1.5))
        yield Series("kitty_tcp_busy_seconds_total", labels, growing(0.2))
        if self.far_pod is not None:
            left = {**labels, "signal": "rtt"}
            yield Series("kitty_anomaly", left, constant(rank == self.far_pod))
            if rank == self.far_pod:
                yield Series("kitty_anomaly_since_timestamp_seconds", left, constant(BEGAN))
        yield Series("kitty_tcp_tx_queue_bytes", labels, constant(2e4))
        yield Series("proc_state", {**labels, "state": "T"}, constant(1 if stopped else 0))
        if self.per_pod > 1:
            return
        yield Series("kitty_rank_worker_device_wait_seconds_total", labels, growing(0.02))
        yield Series(
            "kitty_rank_wait_seconds_total",
            {**labels, "on": "stopped"},
            growing(0.97 if stopped else 0),
        )
        yield Series("kitty_rank_wait_seconds_total", {**labels, "on": "pipe"}, growing(0.01))
        yield Series("kitty_rank_wait_seconds_total", {**labels, "on": "device"}, growing(0))
        yield Series("proc_futex_wait_duration_seconds_sum", labels, growing(0.6))
        yield Series("proc_futex_wait_duration_seconds_count", labels, growing(60))
        scope = {**labels, "scope": "container", "container": "trainer"}
        yield Series("kitty_cgroup_cpu_periods_total", scope, growing(10))
        yield Series("kitty_cgroup_cpu_throttled_periods_total", scope, growing(0))
        yield Series("kitty_memory_headroom_ratio", scope, constant(0.6))
        yield Series("kitty_cgroup_memory_working_set_bytes", scope, constant(4e9))
        yield Series("kitty_cgroup_memory_max_bytes", scope, constant(1e10))
        if self.gpus:
            yield from self._gpu(labels)

    def _gpu(self, labels: dict[str, str]) -> Iterator[Series]:
        gpu = {**labels, "gpu_id": "0", "uuid": f"GPU-{labels['rank']}", "vendor": "nvidia"}
        for name, value in GPU.items():
            yield Series(name, gpu, constant(value))
        yield Series("kitty_gpu_clock_hertz", {**gpu, "clock": "sm"}, constant(1.98e9))
        yield Series(
            "kitty_gpu_throttled_seconds_total", {**gpu, "reason": "sw_thermal"}, growing(0)
        )
        yield Series("kitty_gpu_idle_energy_joules_total", gpu, growing(1))

    def recorded(self, since_s: int, every_s: int) -> Iterator[Series]:
        """What the rules had recorded until the end of the history."""

        def past(name: str, labels: dict[str, str], value: Value) -> Series:
            # A rule writes no stale marker into history: what ended is absent after its end.
            def ended(t: float) -> float | None:
                return value(t) if t <= -self.ended_s else None

            return Series(name, labels, ended, since_s=since_s, every_s=every_s, live=False)

        job = {"namespace": self.namespace, "job": self.name}
        yield past("kitty:job:pods", job, constant(self.pods))
        for rank, number, labels in self.ranks():
            phase = 0.7 * rank
            place = {key: value for key, value in labels.items() if key != "instance"}
            if self.ranked:
                yield past("kitty:rank", place, constant(1))
            own = {key: value for key, value in labels.items() if key not in ("node", "instance")}
            yield past("kitty:signal", {**own, "signal": "run_queue"}, _wave(0.02, 0.01, phase))
            yield past("kitty:signal", {**own, "signal": "cpu"}, _wave(1.5, 0.2, phase))
            yield past("kitty:signal", {**own, "signal": "tcp_busy"}, _wave(0.2, 0.05, phase))
            if self.gpus:
                yield past("kitty:signal", {**own, "signal": "gpu_power"}, _wave(520, 15, phase))
                yield past("kitty:signal", {**own, "signal": "gpu_clock"}, _wave(1.9e9, 4e7, phase))
            if not rank % self.per_pod:
                pod = {key: value for key, value in own.items() if key != "rank"}
                yield past("kitty:pod", pod, constant(1))
                lossy = number == self.far_pod
                yield past("kitty:signal", {**pod, "signal": "rtt"}, _wave(1e-3, 2e-4, phase))
                yield past(
                    "kitty:signal",
                    {**pod, "signal": "retransmits"},
                    _episode(2e-4, 0.03) if lossy else constant(2e-4),
                )
        for signal, median in (("run_queue", 0.02), ("rtt", 1e-3), ("retransmits", 2e-4)):
            yield past("kitty:signal:median", {**job, "signal": signal}, constant(median))
        if self.far_pod is not None and self.per_pod == 1:
            labels = {**self.pod(self.far_pod), **VERDICT}
            del labels["instance"]
            yield past("kitty:verdict", labels, _only_in_episode(lambda _: 0.91))

    def alerts(self) -> Iterator[Series]:
        """An alert that has been firing."""
        if self.blind:
            labels = {
                "alertname": "KittyBlind",
                "alertstate": "firing",
                "namespace": self.namespace,
                "job": self.name,
                "collector": "rtt",
                "reason": "lockdown",
            }
            yield Series("ALERTS", labels, constant(1), since_s=300, live=False)


VERDICT = {"rank": "2", "class": "network-loss"}
EPISODE = (-40 * 60, -33 * 60)


def _wave(middle: float, height: float, phase: float) -> Value:
    return lambda t: middle + height * math.sin(t / 47 + phase)


def _episode(before: float, during: float) -> Value:
    return lambda t: during if EPISODE[0] <= t <= EPISODE[1] else before


def _only_in_episode(value: Callable[[float], float]) -> Value:
    return lambda t: value(t) if EPISODE[0] <= t <= EPISODE[1] else None


RING = Job(name="ring", far_pod=2, gpus=True)
BIG = Job(name="big", pods=64, per_pod=8, starved=137)
JOBS = (
    RING,
    BIG,
    Job(name="ring", namespace="other", pods=3),
    Job(name=HOSTILE, namespace="evil", pods=3, stopped=1, pod_prefix=POD),
    Job(name="dark", pods=3, blind=True),
    Job(name="solo", pods=1),
    Job(name="rankless", pods=3, ranked=False),
)
# Prometheus itself looks back five minutes.
ENDED = (Job(name="ended", pods=3, ended_s=480), Job(name="over", pods=3, ended_s=120))


def all_series() -> list[Series]:
    """All series of all jobs."""
    made: list[Series] = []
    for job in JOBS:
        made += job.raw()
        made += job.alerts()
        made += job.recorded(1200 if job is BIG else HOUR, 15)
    for job in ENDED:
        made += job.recorded(HOUR, 15)
    return made


def since_series(end: float) -> Series:
    """The begin of the verdict in the history, which is a time and so known only here."""
    labels = {**RING.pod(2), **VERDICT}
    del labels["instance"]
    begin = end + EPISODE[0]
    return Series(
        "kitty:verdict:since_timestamp_seconds",
        labels,
        _only_in_episode(lambda _: begin),
        since_s=HOUR,
        every_s=15,
        live=False,
    )


def openmetrics(series: list[Series], end: float) -> Iterator[str]:
    """Yield the history as promtool takes it, ending at a Unix time."""
    for one in series:
        text = one.text()
        for t in range(-one.since_s, 1, one.every_s):
            value = one.value(t)
            if value is not None:
                yield f"{text} {value:.10g} {end + t:.0f}\n"
    yield "# EOF\n"


def live_page(series: list[Series], end: float, now: float) -> bytes:
    """Return the page that continues the raw families."""
    rows = ((one.text(), one.value(now - end)) for one in series if one.live)
    return "".join(f"{text} {value:.10g}\n" for text, value in rows if value is not None).encode()
