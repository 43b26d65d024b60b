from collections.abc import Iterator

import pytest
from prometheus_client import Metric

from sidecar.collectors.base import Reason, UnavailableError
from sidecar.sampler import STALLED_AFTER, TOTAL, Rounds, Sampler, fair_budget
from sidecar.sources.errors import SourceError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Probe:
    """A collector that does what the test says."""

    name = "probe"
    interval = 0.5

    def __init__(self, clock: Clock, cpu: Clock) -> None:
        self.error: Exception | None = None
        self.cost = 0.0
        self.rounds = 0
        self._clock, self._cpu = clock, cpu

    def sample(self) -> None:
        self.rounds += 1
        self._clock.now += self.cost
        self._cpu.now += self.cost
        if self.error:
            raise self.error

    def collect(self) -> Iterator[Metric]:
        return iter(())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def probe(clock: Clock) -> Probe:
    return Probe(clock, Clock())


@pytest.fixture
def rounds(probe: Probe, clock: Clock) -> Rounds:
    return Rounds(probe, clock=clock, cpu_clock=probe._cpu)


def test_before_the_first_round_the_collector_is_starting(rounds: Rounds) -> None:
    assert (rounds.reason, rounds.duration) == (Reason.STARTING, None)


def test_a_good_round(rounds: Rounds, probe: Probe) -> None:
    probe.cost = 0.002
    rounds.run()
    assert (rounds.reason, rounds.errors, rounds.interval) == (None, 0, 0.5)
    assert rounds.duration == pytest.approx(0.002)
    assert rounds.due == pytest.approx(100.5)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnavailableError(Reason.NO_BTF, "no /sys/kernel/btf"), Reason.NO_BTF),
        (PermissionError(13, "denied"), Reason.PERMISSION),
        (FileNotFoundError(2, "gone"), Reason.MISSING),
        (ProcessLookupError(3, "gone"), Reason.MISSING),
        (SourceError("odd"), Reason.ERROR),
    ],
)
def test_what_the_kernel_denies_is_a_reason_and_no_error(
    rounds: Rounds, probe: Probe, error: Exception, reason: Reason
) -> None:
    probe.error = error
    rounds.run()
    assert (rounds.reason, rounds.errors) == (reason, 0)


def test_a_source_error_takes_the_reason_of_its_cause(rounds: Rounds, probe: Probe) -> None:
    error = SourceError("netlink")
    error.__cause__ = PermissionError(1, "denied")
    probe.error = error
    rounds.run()
    assert rounds.reason is Reason.PERMISSION


def test_a_bug_is_counted_and_the_next_round_runs(rounds: Rounds, probe: Probe) -> None:
    probe.error = ZeroDivisionError("bug")
    rounds.run()
    assert (rounds.reason, rounds.errors) == (Reason.ERROR, 1)
    probe.error = None
    rounds.run()
    assert (rounds.reason, rounds.errors) == (None, 1)


def test_why_it_is_down_is_logged_once_and_its_return_too(
    rounds: Rounds, probe: Probe, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kitty")
    probe.error = UnavailableError(Reason.PERMISSION, "needs CAP_BPF")
    for _ in range(3):
        rounds.run()
    probe.error = None
    for _ in range(3):
        rounds.run()
    assert caplog.messages == ["probe: permission: needs CAP_BPF", "probe: works again"]


def test_a_collector_that_is_down_is_tried_less_often(rounds: Rounds, probe: Probe) -> None:
    probe.error = UnavailableError(Reason.MISSING, "no device")
    rounds.run()
    assert rounds.interval == 5.0


def test_dear_rounds_are_spread_out_to_half_a_percent_of_a_core(
    rounds: Rounds, probe: Probe
) -> None:
    probe.cost = 0.01
    rounds.run()
    assert rounds.interval == pytest.approx(2.0)
    probe.cost = 0.5
    for _ in range(10):
        rounds.run()
    assert rounds.interval == 5.0
    probe.cost = 0.0001
    for _ in range(40):
        rounds.run()
    assert rounds.interval == 0.5


def test_a_single_dear_round_does_not_slow_the_next_minute(rounds: Rounds, probe: Probe) -> None:
    for cost in (0.0001, 0.0001, 0.02):
        probe.cost = cost
        rounds.run()
    assert rounds.interval < 2


def test_a_collector_that_does_not_return_is_stalled(rounds: Rounds, clock: Clock) -> None:
    rounds.run()
    clock.now += STALLED_AFTER + 0.1
    assert rounds.reason is Reason.STALLED


def test_the_thread_runs_every_collector_and_stops(probe: Probe) -> None:
    other = Probe(Clock(), Clock())
    other.error = RuntimeError("bug")
    fast = [Rounds(probe), Rounds(other)]
    for rounds in fast:
        rounds.collector.interval = 0.01
    sampler = Sampler(fast)
    sampler.start()
    while probe.rounds < 3:
        pass
    sampler.stop()
    stopped = probe.rounds
    assert other.rounds == 1, "one that is down is tried again after five seconds"
    assert probe.rounds == stopped


def test_a_dear_collector_leaves_room_for_the_others() -> None:
    assert fair_budget([]) == TOTAL
    assert fair_budget([0.001, 0.0005, 0.001]) == TOTAL
    cheap = [0.0005, 0.00025, 0.001]
    assert fair_budget([0.02, *cheap]) == pytest.approx(TOTAL - sum(cheap))
    assert fair_budget([0.02, 0.03, 0.001]) == pytest.approx((TOTAL - 0.001) / 2)
