"""The rules over series made by hand: classes the lab has no fault for, and broken inputs."""

import re
from pathlib import Path

import pytest

from tests.rules.promtool import Expectations, check
from tests.rules.synthetic import LENGTH, Job, constant, growing, turning

LATE = 5 * (LENGTH - 2)
LABEL_LOST = (
    "4 series of job ns/job arrive with the label exported_job: no verdict is given for them."
)
QUOTED = (
    'Rank 1 of job ns/a "7b" \\ run, pod pod-1 on node-1, is slow: network-latency, confidence '
    "93.4%."
)
FAR = (
    "Round trips with every pod that it exchanges data with take at least 50ms; the median of the "
    "job's pods is 1ms."
)


LABELS_OF_RANK_3 = '{class="paused",job="job",namespace="ns",node="node-0",pod="pod-0",rank="3"}'


def said(programs: Path, folder: Path, job: Job, *verdicts: str, at: int = LATE) -> None:
    """The verdicts at a moment are these, and the matching went without an error."""
    expected = Expectations()
    expected.only(at, *verdicts)
    check(programs, folder, job.series, expected)


def test_a_calm_job(programs: Path, tmp_path: Path) -> None:
    said(programs, tmp_path, Job(4))


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_slow_link_among_all_to_all(programs: Path, tmp_path: Path, ranks: int) -> None:
    job = Job(ranks)
    job.slow_link(1)
    said(programs, tmp_path, job, job.verdict(1, "network-latency"))


def test_a_job_that_just_began_is_left_alone(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(1)
    expected = Expectations()
    for moment in range(0, 25, 5):
        expected.only(moment)
    expected.only(30, job.verdict(1, "network-latency"))
    check(programs, tmp_path, job.series, expected)


RING = [(rank, (rank + 1) % 8) for rank in range(8)]
CHAIN = RING[:-1]
TREE = [(child, (child - 1) // 2) for child in range(1, 15)]
STAR = [(0, rank) for rank in range(1, 8)]


@pytest.mark.parametrize(
    ("ranks", "pairs", "slow"),
    [
        pytest.param(8, RING, [0, 2], id="ring, rank 1 between both"),
        pytest.param(8, RING, [0, 1], id="ring, side by side"),
        pytest.param(8, CHAIN, [1], id="chain, rank 0 at its end"),
        pytest.param(15, TREE, [3], id="tree, leaves 7 and 8"),
    ],
)
def test_who_only_talks_to_the_slow_is_not_named(
    programs: Path, tmp_path: Path, ranks: int, pairs: list[tuple[int, int]], slow: list[int]
) -> None:
    job = Job(ranks)
    job.connect(pairs)
    for rank in slow:
        job.slow_link(rank)
    said(programs, tmp_path, job, *(job.verdict(rank, "network-latency") for rank in slow))


def test_a_link_with_one_end_in_nothing_else_is_a_path(programs: Path, tmp_path: Path) -> None:
    job = Job(8)
    job.connect(STAR)
    job.slow_link(3)
    paths = [
        f'{{class="path",job="job",namespace="ns",peer_pod="pod-{b}",pod="pod-{a}"}}'
        for a, b in ((0, 3), (3, 0))
    ]
    said(programs, tmp_path, job, *paths)


def test_two_starved_ranks_are_named_and_not_the_one_between(
    programs: Path, tmp_path: Path
) -> None:
    job = Job(8)
    job.connect(RING)
    for rank in (0, 2):
        job.slow_link(rank)
        job.put(rank, "kitty_rank_run_queue_delay_seconds_total", growing(0.8))
    said(programs, tmp_path, job, job.verdict(0, "cpu"), job.verdict(2, "cpu"))


def test_ranks_of_one_pod_are_compared_with_each_other(programs: Path, tmp_path: Path) -> None:
    job = Job(8)
    job.connect([])
    job.put(3, "kitty_rank_wait_seconds_total", growing(0.5), 'on="stopped"')
    for rank in set(range(8)) - {3}:
        job.put(rank, "kitty_rank_wait_seconds_total", growing(0), 'on="stopped"')
    series = {
        re.sub(r'(pod|node)="(pod|node)-\d"', r'\1="\2-0"', k): v for k, v in job.series.items()
    }
    expected = Expectations()
    expected.value('kitty:verdict{class="paused", rank="3"} > bool 0.9', LATE, 1, LABELS_OF_RANK_3)
    expected.value("count(kitty:verdict)", LATE, 1)
    check(programs, tmp_path, series, expected)


def test_a_pod_that_misses_scrapes_keeps_its_verdict(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(1)
    job.put(1, "kitty_pod_info", " ".join(["1 1 1 stale"] * (LENGTH // 4)))
    expected = Expectations()
    for moment in range(60, LATE, 5):
        expected.only(moment, job.verdict(1, "network-latency"))
    check(programs, tmp_path, job.series, expected)


def test_a_rank_that_starts_up_while_others_train_is_left_alone(
    programs: Path, tmp_path: Path
) -> None:
    job, first, busy = Job(8), 16, 8
    for name, values in job.series.items():
        if 'rank="5"' in name:
            job.series[name] = f"_x{first - 1} {values}"
    queue = f"_x{first - 1} 0+3x{busy} 24+0.1x{LENGTH}"
    job.put(5, "kitty_rank_run_queue_delay_seconds_total", queue)
    expected = Expectations()
    for moment in range(5 * first, LATE, 5):
        expected.none('kitty:verdict{class!="inconclusive"}', moment)
    check(programs, tmp_path, job.series, expected)


def test_a_state_that_is_no_share_names_nobody(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.put(2, "proc_state", " ".join(["Inf"] * LENGTH), 'state="T"')
    said(programs, tmp_path, job)


def test_two_slow_links_in_a_larger_job(programs: Path, tmp_path: Path) -> None:
    job = Job(8)
    job.slow_link(1)
    job.slow_link(6, rtt_s=0.001, lost=0.05)
    job.cell(1, 6, rtt_s=0.05, lost=0.05)
    job.cell(6, 1, rtt_s=0.05, lost=0.05)
    verdicts = [job.verdict(1, "network-latency"), job.verdict(6, "network-loss")]
    said(programs, tmp_path, job, *verdicts)


def test_a_narrow_way_out_keeps_its_own_pod_busy(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(2)
    job.put(2, "kitty_tcp_busy_seconds_total", growing(0.95))
    said(programs, tmp_path, job, job.verdict(2, "network-throttle"))


@pytest.mark.parametrize(
    ("quick", "outside", "kind"),
    [
        (0.01, 2, "network-throttle"),
        (0.0, 2, "network-latency"),
        (0.01, 20, "network-latency"),  # the quick ones may be those with peers outside of the job
    ],
)
def test_a_narrow_way_in_both_directions_lets_some_round_trips_be_quick(
    programs: Path, tmp_path: Path, quick: float, outside: float, kind: str
) -> None:
    job = Job(4)
    job.slow_link(2)
    for rank in range(4):
        job.put(rank, "kitty_tcp_busy_seconds_total", growing(0.9))
        # More than the peers' 60 a second: counted at other moments.
        job.put(rank, "kitty_tcp_rtt_seconds_count", growing(70))
        share = quick if rank == 2 else 1.0
        job.put(rank, "kitty_tcp_rtt_seconds_bucket", growing(70 * share), 'le="0.002048"')
        peer = 'peer="192.0.2.1"'
        job.put(rank, "kitty_pod_peer_rtt_seconds_count", growing(outside), peer)
    said(programs, tmp_path, job, job.verdict(2, kind))


def test_the_first_class_said_is_kept(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(2)
    job.put(2, "kitty_tcp_busy_seconds_total", turning(0.1, 0.95, 20))
    expected = Expectations()
    expected.only(60, job.verdict(2, "network-latency"))
    expected.only(LATE, job.verdict(2, "network-latency"))
    check(programs, tmp_path, job.series, expected)


def test_one_hot_cell_is_a_path_and_names_no_rank(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.cell(0, 3, rtt_s=0.05)
    path = '{class="path",job="job",namespace="ns",peer_pod="pod-3",pod="pod-0"}'
    said(programs, tmp_path, job, path)


def test_a_pod_with_one_cell_is_not_named(programs: Path, tmp_path: Path) -> None:
    job = Job(5)
    for peer in range(1, 5):  # pod 4 talks to pod 0 alone
        for name in [name for name in job.series if f'peer="{job.address(4)}"' in name]:
            del job.series[name]
        for name in [name for name in job.series if "peer=" in name and 'pod="pod-4"' in name]:
            if f'peer="{job.address(peer)}"' in name:
                del job.series[name]
    job.cell(4, 0, rtt_s=0.05)
    path = '{class="path",job="job",namespace="ns",peer_pod="pod-0",pod="pod-4"}'
    said(programs, tmp_path, job, path)


def test_too_few_samples_do_not_count(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(2)
    for name in job.series:
        if "rtt_seconds_count" in name and ('pod="pod-2"' in name or "10.0.0.3" in name):
            job.series[name] = growing(0.2)  # 4 in a window of 20 s
    said(programs, tmp_path, job)


def test_a_cpu_quota(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    for rank in range(4):
        scope = 'scope="container",container="abc"'
        throttled = 6 if rank == 3 else 0
        job.put(rank, "kitty_cgroup_cpu_periods_total", growing(10), scope)
        job.put(rank, "kitty_cgroup_cpu_throttled_periods_total", growing(throttled), scope)
    said(programs, tmp_path, job, job.verdict(3, "cpu"))


@pytest.mark.parametrize("reason", ["hw_thermal", "thermal"])  # the latter by older drivers
def test_a_hot_gpu(programs: Path, tmp_path: Path, reason: str) -> None:
    job = Job(4)
    for rank in range(4):
        labels = f'reason="{reason}",gpu_id="0"'
        slow = 0.4 if rank == 1 else 0
        job.put(rank, "kitty_gpu_throttled_seconds_total", growing(slow), labels)
    said(programs, tmp_path, job, job.verdict(1, "gpu"))


def test_waiting_for_storage(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    for rank in range(4):
        job.put(rank, "kitty_rank_wait_seconds_total", growing(0.1), 'on="device"')
        waits = 1.8 if rank == 0 else 0.3
        job.put(rank, "kitty_rank_worker_device_wait_seconds_total", growing(waits))
    said(programs, tmp_path, job, job.verdict(0, "input"))


def test_waiting_for_a_loader(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    for rank in range(4):
        waits = 0.8 if rank == 3 else 0.05
        job.put(rank, "kitty_rank_wait_seconds_total", growing(waits), 'on="pipe"')
    said(programs, tmp_path, job, job.verdict(3, "input"))


def test_a_pause_of_a_tenth_of_the_time(programs: Path, tmp_path: Path) -> None:
    """What scrapes see of the state is chance; the sidecar looks ten times a second."""
    job = Job(4)
    for rank in range(4):
        stopped = 0.1 if rank == 2 else 0
        job.put(rank, "kitty_rank_wait_seconds_total", growing(stopped), 'on="stopped"')
    said(programs, tmp_path, job, job.verdict(2, "paused"))


def test_a_local_cause_explains_its_pods_network(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(2)
    job.put(2, "kitty_rank_run_queue_delay_seconds_total", growing(0.8))
    said(programs, tmp_path, job, job.verdict(2, "cpu"))


def test_who_receives_crumbs_from_a_slow_sender_is_not_named(
    programs: Path, tmp_path: Path
) -> None:
    job = Job(4)
    job.slow_link(1)
    job.put(2, "kitty_rank_run_queue_delay_seconds_total", growing(0.3))
    said(programs, tmp_path, job, job.verdict(1, "network-latency"))


def test_addresses_that_two_pods_have_do_not_break_the_matrix(
    programs: Path, tmp_path: Path
) -> None:
    job = Job(4)
    job.slow_link(1)
    for rank in range(4):
        job.put(rank, "kitty_pod_address_info", constant(1), 'address="172.17.0.1"')
        job.put(rank, "kitty_pod_peer_sent_segments_total", growing(100), 'peer="172.17.0.1"')
    said(programs, tmp_path, job, job.verdict(1, "network-latency"))


def test_a_second_interface_belongs_to_its_pod(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(1)
    job.series = {name.replace('"10.0.0.', '"10.9.0.'): row for name, row in job.series.items()}
    for rank in range(4):
        job.put(rank, "kitty_pod_address_info", constant(1), f'address="{job.address(rank)}"')
    said(programs, tmp_path, job, job.verdict(1, "network-latency"))


def test_peers_outside_the_job_do_not_count(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.cell(1, 200, rtt_s=0.5)
    job.cell(1, 201, rtt_s=0.5)
    said(programs, tmp_path, job)


def test_a_job_of_the_same_name_in_another_namespace(programs: Path, tmp_path: Path) -> None:
    job, other = Job(4), Job(4, namespace="other")
    job.slow_link(1)
    job.series |= other.series
    said(programs, tmp_path, job, job.verdict(1, "network-latency"))


def test_counters_that_start_again_are_no_fault(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    for name, values in job.series.items():
        if 'rank="2"' in name and "+" in values:
            job.series[name] = (
                f"{values.split('x')[0]}x20 0+{values.split('+')[1].split('x')[0]}x20"
            )
    expected = Expectations()
    for seconds in range(0, LATE, 5):
        expected.none("kitty:verdict", seconds)
    check(programs, tmp_path, job.series, expected)


def test_values_that_are_no_number_name_nobody(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    for name in job.series:
        if 'rank="2"' in name and "rtt_seconds_sum" in name:
            job.series[name] = " ".join(["NaN"] * LENGTH)
    said(programs, tmp_path, job)


def test_a_rank_that_comes_late_is_not_compared_by_half_a_window(
    programs: Path, tmp_path: Path
) -> None:
    job = Job(4)
    for name, values in job.series.items():
        if 'rank="3"' in name:
            job.series[name] = f"_x20 {values}"
        elif "run_queue" in name:
            job.series[name] = growing(0.5)
    for name in job.series:
        if 'rank="3"' in name and "run_queue" in name:
            job.series[name] = f"_x20 {growing(0.5)}"
    expected = Expectations()
    for seconds in range(0, LATE, 5):
        expected.none("kitty:verdict", seconds)
    check(programs, tmp_path, job.series, expected)


def test_ranks_of_one_pod_share_its_network(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.slow_link(1)
    second = job.labels(1).replace('rank="1"', 'rank="9"')
    job.series[f"kitty_pod_info{{{second}}}"] = constant(1)
    verdicts = [job.verdict(1, "network-latency"), f'{{class="network-latency",{second}}}']
    said(programs, tmp_path, job, *verdicts)


def test_a_shift_of_all_ranks_is_the_jobs(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.series = {name: values.replace(f"x{LENGTH}", "x60") for name, values in job.series.items()}
    for rank in range(4):
        job.put(rank, "kitty_rank_run_queue_delay_seconds_total", turning(0.02, 0.8, 45, 60))
    expected = Expectations()
    expected.none("kitty:verdict", 220)
    expected.only(270, '{class="cpu",job="job",namespace="ns",rank="all"}')
    check(programs, tmp_path, job.series, expected)


def test_a_lost_job_label_withholds_the_verdict_and_alerts(programs: Path, tmp_path: Path) -> None:
    job = Job(4, name="kitty")
    job.slow_link(1)
    job.series = {
        name.replace('job="kitty"', 'exported_job="job",job="kitty"'): values
        for name, values in job.series.items()
    }
    expected = Expectations()
    expected.none("kitty:verdict", LATE)
    expected.alert(
        "KittyJobLabelLost",
        LATE,
        (
            {"exported_job": "job", "namespace": "ns", "severity": "warning"},
            LABEL_LOST,
            "Prometheus scrapes kitty without honor_labels; see docs/verdict.md.",
        ),
    )
    check(programs, tmp_path, job.series, expected)


def test_names_with_quotes_are_asked_for_as_they_are(programs: Path, tmp_path: Path) -> None:
    job = Job(4, name='a \\"7b\\" \\\\ run')
    job.slow_link(1)
    labels = {
        "alertname": "KittyStraggler",
        "class": "network-latency",
        "job": 'a "7b" \\ run',
        "namespace": "ns",
        "node": "node-1",
        "pod": "pod-1",
        "rank": "1",
        "severity": "warning",
    }
    del labels["alertname"]
    expected = Expectations()
    expected.alert(
        "KittyStraggler",
        LATE,
        (
            labels,
            QUOTED,
            FAR,
        ),
    )
    check(programs, tmp_path, job.series, expected)
