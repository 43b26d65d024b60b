"""The rules over what a Prometheus scraped from the lab's job: calm, five faults, small jobs."""

from pathlib import Path

import pytest

from tests.rules.promtool import RULES, Expectations, Recording, check, recording, run

CLASSES = {
    "latency": "network-latency",
    "loss": "network-loss",
    "throttle": "network-throttle",
    "cpu": "cpu",
    "pause": "paused",
}
DETECTED_S = 15
CLEARED_S = 30
SAID = {
    "latency": (
        "network-latency, confidence 93.44%.",
        (
            "Round trips with every pod that it exchanges data with take at least 54.56ms; the "
            "median of the job's pods is 2.431ms."
        ),
    ),
    "loss": (
        "network-loss, confidence 92.87%.",
        (
            "Of the segments exchanged with every peer at least 3.193% are sent again; the median "
            "of the job's pods is 0.1168%."
        ),
    ),
    "throttle": (
        "network-throttle, confidence 91.56%.",
        (
            "What it sends queues up: round trips take at least 9.902ms (the median of the job's "
            "pods is 204.5us), it is busy sending 100.1% of the time (those that send to it 6.4%), "
            "and 1.641MiB wait."
        ),
    ),
    "cpu": (
        "cpu, confidence 92.15%.",
        (
            "It waits for a processor 67.17% of the time, all threads together (median of the job "
            "21.64%)."
        ),
    ),
    "pause": (
        "paused, confidence 93.6%.",
        "Its process was found stopped (state T) 99.78% of the time; the median of the job is 0%.",
    ),
}
PODS = ("ring-master-0", "ring-worker-0", "ring-worker-1", "ring-worker-2")


def verdict(kind: str, rank: int) -> str:
    """Labels of a verdict on a rank of the lab's job."""
    return (
        f'{{class="{CLASSES[kind]}",job="ring",namespace="training",node="node-{rank}",'
        f'pod="{PODS[rank]}",rank="{rank}"}}'
    )


def after(seconds: float) -> int:
    """The first evaluation at or after that time."""
    return 5 * -int(-seconds // 5)


def test_promtool_accepts_the_rules(programs: Path) -> None:
    done = run(programs, "check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def four() -> Recording:
    return recording("four-ranks")


def test_each_fault_is_named_alone_with_its_class(
    programs: Path, tmp_path: Path, four: Recording
) -> None:
    expected = Expectations()
    for fault in four.faults:
        for seconds in range(after(fault.begin + DETECTED_S), int(fault.end), 5):
            expected.only(seconds, verdict(fault.fault, fault.rank))
    assert len(expected.promql) > 20
    check(programs, tmp_path, four.series, expected)


def test_no_other_class_is_said_before(programs: Path, tmp_path: Path, four: Recording) -> None:
    expected = Expectations()
    for fault in four.faults:
        for seconds in range(after(fault.begin), int(fault.end), 5):
            expected.none(f'kitty:verdict{{class!="{CLASSES[fault.fault]}"}}', seconds)
    check(programs, tmp_path, four.series, expected)


def test_nothing_is_said_where_nothing_is_wrong(
    programs: Path, tmp_path: Path, four: Recording
) -> None:
    expected = Expectations()
    calm = 0.0
    for fault in four.faults:
        for seconds in range(after(calm), int(fault.begin), 5):
            expected.none("kitty:verdict", seconds)
        calm = fault.end + CLEARED_S
    for seconds in range(after(calm), 5 * four.length, 5):
        expected.none("kitty:verdict", seconds)
    assert len(expected.promql) > 15
    check(programs, tmp_path, four.series, expected)


def test_alerts_read_as_sentences_with_numbers(
    programs: Path, tmp_path: Path, four: Recording
) -> None:
    expected = Expectations()
    at = {"latency": 75, "loss": 155, "throttle": 230, "cpu": 305, "pause": 380}
    for kind, (ending, description) in SAID.items():
        labels = {
            "class": CLASSES[kind],
            "job": "ring",
            "namespace": "training",
            "node": "node-2",
            "pod": PODS[2],
            "rank": "2",
            "severity": "warning",
        }
        summary = f"Rank 2 of job training/ring, pod {PODS[2]} on node-2, is slow: {ending}"
        expected.alert("KittyStraggler", at[kind], (labels, summary, description))
    for kind in ("KittyJobSlow", "KittyPathSlow", "KittyBlind", "KittySidecarSilent"):
        for seconds in at.values():
            expected.alert(kind, seconds)
    check(programs, tmp_path, four.series, expected)


def test_since_when(programs: Path, tmp_path: Path, four: Recording) -> None:
    expected = Expectations()
    expected.value("time() - kitty:verdict:since_timestamp_seconds", 80, 20, verdict("latency", 2))
    check(programs, tmp_path, four.series, expected)


def test_two_ranks_are_too_few_to_name_one(programs: Path, tmp_path: Path) -> None:
    two = recording("two-ranks")
    expected = Expectations()
    for seconds in range(0, 5 * two.length, 5):
        expected.none('kitty:verdict{class!="inconclusive"}', seconds)
        expected.none('kitty:verdict{rank!=""}', seconds)
    for fault in two.faults:
        if fault.fault != "latency":  # both see the same round trip
            expected.only(
                after(fault.begin + DETECTED_S),
                '{class="inconclusive",job="ring",namespace="training",reason="two-ranks"}',
            )
    check(programs, tmp_path, two.series, expected)


def test_one_rank_has_nothing_to_be_compared_with(programs: Path, tmp_path: Path) -> None:
    one = recording("one-rank")
    expected = Expectations()
    for seconds in range(0, 5 * one.length, 5):
        expected.none("kitty:verdict", seconds)
    expected.value('count(kitty:signal{signal="run_queue"})', 5 * one.length - 10, 1)
    check(programs, tmp_path, one.series, expected)
