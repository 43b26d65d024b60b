"""Inputs that are not whole: no rank is named, and the reason is one of a fixed list."""

from pathlib import Path

from tests.rules.promtool import Expectations, check
from tests.rules.synthetic import LENGTH, Job, constant, growing

LATE = 5 * (LENGTH - 2)


def inconclusive(reason: str) -> str:
    """Labels of the verdict."""
    return f'{{class="inconclusive",job="job",namespace="ns",reason="{reason}"}}'


def cut(values: str, first: int, gap: int) -> str:
    """A series of which some samples are missing, and that goes on as if it had been there."""
    start, _, rest = values.partition("+")
    if not rest:
        value = values.split("x", maxsplit=1)[0]
        return f"{value}x{first} _x{gap} {value}x{LENGTH - first - gap}"
    step = float(rest.split("x", maxsplit=1)[0])
    again = float(start) + step * (first + gap)
    return f"{start}+{step:g}x{first} _x{gap} {again:g}+{step:g}x{LENGTH - first - gap}"


def test_a_rank_that_restarts(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(1)
    for name, values in job.series.items():
        if 'rank="3"' in name:
            # Gone is marked as such by a scrape; the second life counts from the beginning.
            start, _, rest = values.partition("+")
            step = f"0+{rest.split('x')[0]}" if rest else start.split("x", maxsplit=1)[0]
            ended = values.split("x", maxsplit=1)[0]
            job.series[name] = f"{ended}x18 stale {step}x{LENGTH - 20}"
    expected = Expectations()
    expected.only(90, job.verdict(1, "network-latency"))
    expected.only(100, inconclusive("ranks-restarted"))
    expected.only(105, inconclusive("ranks-restarted"))
    expected.only(LATE, job.verdict(1, "network-latency"))
    check(programs, tmp_path, job.series, expected)


def test_ranks_that_are_missing(programs: Path, tmp_path: Path) -> None:
    job = Job(5)
    job.slow_link(1)
    for name, values in job.series.items():
        if 'rank="3"' in name:
            job.series[name] = f"{values.split('x')[0]}x20 stale"
    expected = Expectations()
    expected.only(95, job.verdict(1, "network-latency"))
    expected.only(LATE, inconclusive("ranks-missing"))
    check(programs, tmp_path, job.series, expected)


def test_one_of_many_that_is_missing_withholds_nothing(programs: Path, tmp_path: Path) -> None:
    job = Job(24)
    job.put(1, "kitty_rank_run_queue_delay_seconds_total", growing(0.8))
    for name, values in job.series.items():
        if 'rank="3"' in name:
            job.series[name] = f"{values.split('x')[0]}x20 stale"
    expected = Expectations()
    for seconds in (95, 115, LATE):
        expected.only(seconds, job.verdict(1, "cpu"))
    check(programs, tmp_path, job.series, expected)


def test_two_jobs_of_one_name_in_a_namespace(programs: Path, tmp_path: Path) -> None:
    job, other = Job(3), Job(3)
    job.slow_link(1)
    job.series |= {
        name.replace("pod-", "other-").replace("10.0.0.", "10.8.0."): values
        for name, values in other.series.items()
    }
    expected = Expectations()
    expected.only(LATE, inconclusive("duplicate-ranks"))
    check(programs, tmp_path, job.series, expected)


def test_what_few_pods_report(programs: Path, tmp_path: Path) -> None:
    job = Job(8)
    name = "kitty_rank_run_queue_delay_seconds_total"
    job.series = {
        series: values
        for series, values in job.series.items()
        if name not in series or any(f'rank="{rank}"' in series for rank in (0, 1, 2))
    }
    job.put(1, name, growing(0.8))
    expected = Expectations()
    expected.only(LATE, inconclusive("partial-data"))
    check(programs, tmp_path, job.series, expected)


def test_two_ranks(programs: Path, tmp_path: Path) -> None:
    job = Job(2)
    job.put(1, "kitty_rank_run_queue_delay_seconds_total", growing(0.8))
    expected = Expectations()
    expected.only(LATE, inconclusive("two-ranks"))
    check(programs, tmp_path, job.series, expected)


def test_nothing_is_said_of_an_incomplete_job_in_which_nobody_stands_out(
    programs: Path, tmp_path: Path
) -> None:
    job = Job(4)
    for name, values in job.series.items():
        if 'rank="3"' in name:
            job.series[name] = f"{values.split('x')[0]}x20 stale"
    expected = Expectations()
    for seconds in range(0, LATE, 5):
        expected.none("kitty:verdict", seconds)
    check(programs, tmp_path, job.series, expected)


def test_after_a_prometheus_that_was_down(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(1)
    job.series = {name: cut(values, 16, 10) for name, values in job.series.items()}
    expected = Expectations()
    for seconds in range(0, LATE, 5):
        expected.none('kitty:verdict{rank!="1",class!="inconclusive"}', seconds)
    expected.only(75, job.verdict(1, "network-latency"))
    expected.none("kitty:verdict", 115)
    expected.only(LATE, job.verdict(1, "network-latency"))
    check(programs, tmp_path, job.series, expected)


def test_clocks_that_differ_by_an_hour(programs: Path, tmp_path: Path) -> None:
    """Times that a node tells are shown and not computed with."""
    job = Job(4)
    job.slow_link(1)
    for rank in range(4):
        wrong = 3600 if rank == 2 else 0
        job.put(rank, "kitty_rank_last_read_timestamp_seconds", growing(1, wrong))
        stands_out = 'signal="rtt"'
        job.put(rank, "kitty_anomaly_since_timestamp_seconds", constant(wrong), stands_out)
    expected = Expectations()
    expected.only(LATE, job.verdict(1, "network-latency"))
    expected.value(
        "kitty:verdict:since_timestamp_seconds <= bool 60",
        LATE,
        1,
        job.verdict(1, "network-latency"),
    )
    check(programs, tmp_path, job.series, expected)
