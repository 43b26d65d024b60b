"""The main job from end to end: admission, pods, scrapes, faults, and which rank they show."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Any, Protocol, Self

from lab.admission import (
    AdmissionError,
    Answer,
    admit,
    wait_until_ready,
    webhook_pod,
    write_certificate,
)
from lab.cluster import SIDECAR, Cluster, Pod
from lab.faults import Kind
from lab.job import CONTAINER, NAMESPACE, WORKLOADS, Workload, training_pod
from lab.podspec import declared_port
from lab.scrape import Page, Scraper, Window
from lab.signals import SIGNALS, Comparison, compare

START_TIMEOUT_S = 30.0


class StoryError(RuntimeError):
    """The job does not run as it should; the text says what happened."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long the parts take, in seconds.

    Attributes:
        interval: Between two scrapes.
        before: Calm that a fault is compared with.
        fault: From the start of a fault to its end.
        settle: After a fault began or ended, until scrapes count again.
        patience: Longest that a fault stays on for what is waited for.
    """

    interval: float = 0.5
    before: float = 3.0
    fault: float = 8.0
    settle: float = 2.0
    patience: float = 40.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault and what the sidecars showed of it.

    Attributes:
        kind: The fault.
        rank: Where it was.
        strength: In the kind's unit.
        started: Seconds since the epoch.
        stopped: Seconds since the epoch.
        comparisons: By name of the signal.
        step_before: Median of the trainers' own step times in the stretch before, seconds.
        step_during: The same with the fault; None when no step ended.
    """

    kind: Kind
    rank: int
    strength: float
    started: float
    stopped: float
    comparisons: Mapping[str, Comparison]
    step_before: float | None
    step_during: float | None

    def named(self) -> bool:
        """Whether every signal by which the fault must show names the rank, and it alone."""
        return all(self.comparisons[name].outlier == self.rank for name in self.kind.signals)


class Display(Protocol):
    """Where the story is told."""

    def say(self, text: str) -> None:
        """Tell one event."""

    def mark(self, text: str) -> None:
        """Tell the beginning or the end of a fault."""

    def show(self, story: "Story", window: Window) -> None:
        """Show the ranks as the last scrapes saw them."""


@dataclass
class Story:
    """A training job of some pods, with one sidecar each; use it as a context manager.

    Attributes:
        display: Told of everything.
        pace: Lengths of the parts.
        world: Number of ranks.
        workload: What they run.
        cluster: Where the pods run.
        pods: By rank.
        answers: The webhook's, by rank.
        findings: One for each fault so far.
        fault: Name and rank of what is on at the moment.
    """

    display: Display
    pace: Pace = field(default_factory=Pace)
    world: int = 4
    workload: Workload = WORKLOADS["ring"]
    cluster: Cluster = field(default_factory=Cluster)
    pods: dict[int, Pod] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    fault: tuple[str, int] | None = None
    _rounds: list[dict[int, Page]] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Start the webhook and the job, and wait until every rank trains and is seen.

        Raises:
            StoryError: Something did not come up.
        """
        if missing := self.workload.missing():
            raise StoryError(f"workload {self.workload.name}: {missing}")
        with ExitStack() as stack:
            stack.enter_context(self.cluster)
            for owner in self.cluster.swept:
                self.display.say(f"swept what {owner} left behind when it was killed")
            for note in self.cluster.notes:
                self.display.say(f"note: {note}")
            self._admit_and_start()
            self._scraper = stack.enter_context(Scraper(self._targets()))
            self._wait_for_ranks()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the job and remove everything."""
        self._stack.close()

    def _admit_and_start(self) -> None:
        certificate, key, context = write_certificate(self.cluster.directory)
        webhook = self.cluster.start_pod(webhook_pod(certificate, key))
        address = webhook.link.address
        try:
            wait_until_ready(address, timeout_s=START_TIMEOUT_S)
        except AdmissionError as error:
            raise StoryError(f"{error}; it says:\n{webhook.log_tail('webhook')}") from error
        self.display.say(f"kitty-webhook serves admission reviews over TLS at {address}")
        master = self.cluster.next_address()
        for rank in range(self.world):
            answer = admit(
                training_pod(rank, self.world, master, self.workload),
                NAMESPACE,
                address=address,
                context=context,
            )
            self.answers[rank] = answer
            answer.pod["metadata"]["namespace"] = NAMESPACE  # as the API server stores it
            answer.pod["spec"]["nodeName"] = f"node-{rank}"  # as the scheduler binds it
            pod = self.pods[rank] = self.cluster.start_pod(answer.pod)
            self.display.say(
                f"pod {pod.name} admitted in {1000 * answer.duration_s:.0f} ms with "
                f"{answer.operations} patch operations, runs {' and '.join(pod.containers)} on "
                f"{pod.placement.node} at {pod.link.address}"
            )
            for warning in answer.warnings:
                self.display.say(f"warning from the webhook: {warning}")
            if SIDECAR not in pod.containers:
                raise StoryError(f"the webhook gave pod {pod.name} no sidecar")

    def _targets(self) -> dict[int, tuple[str, int]]:
        return {rank: self.endpoint(pod) for rank, pod in self.pods.items()}

    @staticmethod
    def endpoint(pod: Pod) -> tuple[str, int]:
        """Return address and port of a pod's sidecar.

        Raises:
            StoryError: The webhook declared no port.
        """
        spec = pod.manifest["spec"]
        everyone = [*spec.get("initContainers", []), *spec["containers"]]
        sidecar = next(c for c in everyone if c["name"] == SIDECAR)
        port = declared_port(sidecar, "kitty-metrics")
        if port is None:
            raise StoryError(f"pod {pod.name}: the sidecar declares no port kitty-metrics")
        return pod.link.address, port

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + self.workload.start_timeout_s
        while True:
            self.check()
            pages = self._scraper.round()
            missing = [
                rank
                for rank in self.pods
                if rank not in pages
                or pages[rank].value("kitty_tcp_connections", rank=str(rank)) is None
                or '"step_seconds"' not in self.pods[rank].log_tail(CONTAINER)
            ]
            if not missing:
                self.display.say("every rank takes steps, and every sidecar sees its rank")
                return
            if time.monotonic() > deadline:
                raise StoryError(
                    f"rank {missing[0]} takes no steps, or no sidecar sees it; they say:\n"
                    + self.pods[missing[0]].log_tail(CONTAINER)
                    + self.pods[missing[0]].log_tail(SIDECAR)
                )
            time.sleep(0.1)

    def check(self) -> None:
        """Look whether every container runs.

        Raises:
            StoryError: One has ended.
        """
        for pod in self.cluster.pods:
            for name, container in pod.containers.items():
                if (status := container.exit_status()) is not None:
                    raise StoryError(
                        f"container {name} of pod {pod.name} ended with status {status}:\n"
                        + pod.log_tail(name)
                    )

    def watch(self, seconds: float) -> Window:
        """Scrape for a while and show the ranks.

        Returns:
            The scrapes.
        """
        rounds: list[dict[int, Page]] = []
        end = time.monotonic() + seconds
        due = time.monotonic()
        while due <= end + self.pace.interval / 4:
            time.sleep(max(0.0, due - time.monotonic()))
            self.check()
            rounds.append(self._scraper.round())
            self._rounds = [*self._rounds[-5:], rounds[-1]]
            self.display.show(self, self._window(self._rounds))
            due += self.pace.interval
        return self._window(rounds)

    def _window(self, rounds: Sequence[Mapping[int, Page]]) -> Window:
        return Window(rounds, {pod.link.address: rank for rank, pod in self.pods.items()})

    def inject(
        self,
        kind: Kind,
        rank: int,
        strength: float | None = None,
        *,
        until: Callable[[], bool] = lambda: True,
    ) -> Finding:
        """Put one fault on one rank for a while, and compare with the calm before.

        Args:
            kind: The fault.
            rank: Where.
            strength: The usual one where None.
            until: The fault stays on until this is true, or the pace's patience has an end.

        Raises:
            StoryError: A container ended.
            ToolError: The fault could not be made.
        """
        amount = kind.strength if strength is None else strength
        began = time.time()
        before = self.watch(self.pace.before)
        name = f"{kind.name} {amount:g} {kind.unit}"
        with kind.inject(self.cluster, self.pods[rank], amount):
            started = time.time()
            self.fault = (name, rank)
            self.display.mark(f"fault on: {name} at rank {rank} ({kind.summary})")
            settle = min(self.pace.settle, self.pace.fault / 2)
            self.watch(settle)
            during = self.watch(self.pace.fault - settle)
            while not until() and time.time() < started + self.pace.patience:
                self.watch(1)
        stopped = time.time()
        self.fault = None
        self.display.mark(f"fault off: {name} at rank {rank}")
        finding = Finding(
            kind=kind,
            rank=rank,
            strength=amount,
            started=started,
            stopped=stopped,
            comparisons={s.name: compare(s, before, during) for s in SIGNALS.values()},
            step_before=self.step_time(began, started),
            step_during=self.step_time(started, stopped),
        )
        self.findings.append(finding)
        self.watch(self.pace.settle)
        return finding

    def step_time(self, since: float, until: float) -> float | None:
        """Return the median of the step times that the trainers logged, in seconds.

        Args:
            since: A step counts that began at this time or later, seconds since the epoch.
            until: And ended by this time.
        """
        times = []
        for pod in self.pods.values():
            for line in pod.logs[CONTAINER].read_text(errors="replace").splitlines():
                step = _parsed(line)
                if "step_seconds" in step and since <= step["time"] <= until - step["step_seconds"]:
                    times.append(step["step_seconds"])
        return median(times) if times else None


def _parsed(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line[max(0, line.find("{")) :])  # a launcher says before it who writes
    except ValueError:  # the line is being written
        return {}
    return value if isinstance(value, dict) else {}
