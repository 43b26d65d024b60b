"""What the alerts beside the straggler's say, word by word."""

from pathlib import Path

from sidecar.agent import COLLECTORS
from tests.rules.promtool import Expectations, check
from tests.rules.synthetic import LENGTH, Job, constant, growing, turning

LATE = 5 * (LENGTH - 2)


def fires(programs: Path, folder: Path, series: dict[str, str], *said: str, at: int = LATE) -> None:
    """An alert fires once.

    Args:
        programs: Where promtool is.
        folder: For its input.
        series: Of a job "job" in a namespace "ns".
        said: Name of the alert, its other labels, summary and, where it has one, description.
        at: Seconds after the first sample.
    """
    name, labels, summary, *description = said
    own = dict(pair.split("=") for pair in labels.split())
    expected = Expectations()
    expected.alert(
        name, at, ({"job": "job", "namespace": "ns", **own}, summary, "".join(description))
    )
    check(programs, folder, series, expected)


def test_path(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.cell(0, 3, rtt_s=0.05)
    fires(
        programs,
        tmp_path,
        job.series,
        "KittyPathSlow",
        "class=path pod=pod-0 peer_pod=pod-3 severity=info",
        "The way between pods pod-0 and pod-3 of job ns/job is slow or loses data; it cannot be "
        "told which end is at fault (confidence 93.4%).",
        "Round trips between them take 50ms, and 0% of the segments are sent again.",
    )


def test_two_ranks(programs: Path, tmp_path: Path) -> None:
    job = Job(2)
    job.put(1, "kitty_rank_run_queue_delay_seconds_total", growing(0.8))
    fires(
        programs,
        tmp_path,
        job.series,
        "KittyInconclusive",
        "class=inconclusive reason=two-ranks severity=info",
        "The two ranks of job ns/job differ, and two are too few to say which of them is at fault.",
        "run_queue of one is 0.8, of the other 0.02.",
    )


def test_too_few_of_the_ranks(programs: Path, tmp_path: Path) -> None:
    job = Job(4)
    job.put(1, "kitty_rank_run_queue_delay_seconds_total", growing(0.8))
    for name, values in job.series.items():
        if 'rank="3"' in name:
            job.series[name] = f"{values.split('x')[0]}x20 stale"
    fires(
        programs,
        tmp_path,
        job.series,
        "KittyInconclusive",
        "class=inconclusive reason=ranks-missing severity=info",
        "Something is slow in job ns/job, and no rank is named: ranks that were there within ten "
        "minutes are not seen now.",
        "3 ranks are seen, 4 at most within ten minutes.",
    )


def test_job(programs: Path, tmp_path: Path) -> None:
    job = Job(3)
    job.series = {name: values.replace(f"x{LENGTH}", "x60") for name, values in job.series.items()}
    for rank in range(3):
        job.put(rank, "kitty_rank_run_queue_delay_seconds_total", turning(0.02, 0.8, 45, 60))
    fires(
        programs,
        tmp_path,
        job.series,
        "KittyJobSlow",
        "class=cpu rank=all severity=warning",
        "All ranks of job ns/job are slower than minutes ago, none stands out: cpu, confidence "
        "94.94%.",
        "Medians of its ranks, now and over the ten minutes before: run_queue 0.8 and 0.02.",
        at=270,
    )


def test_memory(programs: Path, tmp_path: Path) -> None:
    job, scope = Job(1), 'scope="container",container="abc"'
    job.put(0, "kitty_memory_headroom_ratio", constant(0.03), scope)
    job.put(0, "kitty_cgroup_memory_working_set_bytes", constant(97 << 20), scope)
    job.put(0, "kitty_cgroup_memory_max_bytes", constant(100 << 20), scope)
    fires(
        programs,
        tmp_path,
        job.series,
        "KittyOutOfMemorySoon",
        "container=abc scope=container pod=pod-0 node=node-0 severity=warning",
        "Pod pod-0 of job ns/job on node-0 is about to run out of memory: 3% of the container's "
        "limit is left.",
        "97MiB are in use of 100MiB; the kernel kills a process of the pod when nothing is left.",
    )


def test_kill(programs: Path, tmp_path: Path) -> None:
    job = Job(1)
    job.put(0, "sys_oom_kill_event_total", f"0x20 1x{LENGTH - 21}")
    fires(
        programs,
        tmp_path,
        job.series,
        "KittyOutOfMemoryKill",
        "pod=pod-0 node=node-0 severity=warning",
        "The kernel killed processes of pod pod-0 of job ns/job on node-0 for want of memory, 1 "
        "within five minutes.",
    )


def test_idle_gpus(programs: Path, tmp_path: Path) -> None:
    job = Job(2)
    for rank in range(2):
        gpu = 'gpu_id="0"'
        job.put(rank, "gpu_sm_utilization", "0x300", gpu)
        job.put(rank, "kitty_gpu_idle_energy_joules_total", "0+450x300", gpu)
    fires(
        programs,
        tmp_path,
        job.series,
        "KittyIdleGpus",
        "severity=info",
        "The GPUs of job ns/job draw 180 W and have run no kernel worth mentioning for ten "
        "minutes.",
        "2 GPUs, the busiest of them 0% of the time.",
        at=1200,
    )


def test_blind(programs: Path, tmp_path: Path) -> None:
    job = Job(2)
    for rank in range(2):
        labels = 'collector="rtt",reason="lockdown"'
        job.put(rank, "kitty_collector_up", constant(0), labels)
        job.put(rank, "kitty_collector_up", constant(0), 'collector="gpu",reason="missing"')
    fires(
        programs,
        tmp_path,
        job.series,
        "KittyBlind",
        "collector=rtt reason=lockdown severity=info",
        '2 sidecars of job ns/job cannot see "rtt" (reason: lockdown); a fault that shows only '
        "there is missed.",
    )


def test_blind_is_whoever_misses_what_the_verdict_reads(programs: Path, tmp_path: Path) -> None:
    needed = {"pod", "rank", "tcp", "rtt", "matrix", "waiting", "cgroup", "netdev"}
    job = Job(2)
    for name in COLLECTORS:
        labels = f'collector="{name}",reason="permission"'
        job.put(0, "kitty_collector_up", constant(0), labels)
    expected = Expectations()
    for name in COLLECTORS:
        alerts = f'count(ALERTS{{alertname="KittyBlind",collector="{name}"}})'
        if name in needed:
            expected.value(alerts, LATE, 1)
        else:
            expected.none(alerts, LATE)
    check(programs, tmp_path, job.series, expected)


def test_silent(programs: Path, tmp_path: Path) -> None:
    job = Job(2)
    up = 'up{instance="10.0.0.2:9100",job="job",namespace="ns",node="node-1",pod="pod-1"}'
    job.series[up] = f"1x20 0x{LENGTH - 21}"
    for name in [name for name in job.series if 'pod="pod-1"' in name and "kitty_" in name]:
        job.series[name] = job.series[name].split("x")[0] + "x20"
    fires(
        programs,
        tmp_path,
        job.series,
        "KittySidecarSilent",
        "instance=10.0.0.2:9100 pod=pod-1 node=node-1 severity=warning",
        "The sidecar of pod pod-1 of job ns/job does not answer; the job's verdicts leave this pod "
        "out.",
    )
