"""What the verdict's rules cost: a real Prometheus on one core evaluates them over many ranks.

Run by hand, as root: ``python -m bench.rules [--ranks N] [--ranks-per-pod N] [--peers N]``. A
generator serves the families that the rules read, as N sidecars would, one rank slow by a long
way; Prometheus runs with GOMAXPROCS=1 in a network namespace of its own, first without the rules
and then with them: the difference in CPU time is their cost, which a busy machine bends less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lab.namespaces import private_network
from lab.prometheus import ADDRESS, Prometheus, Target

ROOT = Path(__file__).parent.parent
RULES = ROOT / "manifests/rules/kitty.rules.yaml"
PORT = 9200
SLOW = 7  # the number of the pod behind a long way
INTERVAL_S = 5
FILL_S = 50  # until a job is no longer new and windows are full


def address(pod: int) -> str:
    """Return a pod's address."""
    return f"10.{pod >> 16 & 255}.{pod >> 8 & 255}.{pod & 255}"


def rows(ranks: int, per_pod: int, peers: int) -> list[tuple[str, float, float]]:
    """Return series, value at the beginning, growth a second."""
    pods = ranks // per_pod
    made: list[tuple[str, float, float]] = []
    for pod in range(pods):
        own = f'job="big",namespace="bench",pod="pod-{pod}",node="node-{pod}"'
        made.append((f'kitty_pod_address_info{{{own},address="{address(pod)}"}}', 1, 0))
        made += [
            (f'kitty_collector_up{{{own},collector="{name}",reason=""}}', 1, 0)
            for name in ("pod", "net", "tcp", "rtt", "process", "rank", "kernel")
        ]
        for local in range(per_pod):
            rank = pod * per_pod + local
            labels = f'{own},rank="{rank}"'
            made += rank_rows(labels, pod, pods, peers)
        made += cells("kitty_pod_peer", own, pod, pods, peers)
    return made


def cells(
    prefix: str, labels: str, pod: int, pods: int, peers: int
) -> list[tuple[str, float, float]]:
    """Return what a rank, or a pod, has of its peers."""
    made: list[tuple[str, float, float]] = []
    for step in range(1, peers + 1):
        peer = (pod + step) % pods
        with_peer = f'{labels},peer="{address(peer)}"'
        rtt = 0.05 if SLOW in (pod, peer) else 0.001 + 0.0001 * (step % 5)
        made += [
            (f"{prefix}_rtt_seconds_count{{{with_peer}}}", 1000, 40),
            (f"{prefix}_rtt_seconds_sum{{{with_peer}}}", 1, 40 * rtt),
            (f"{prefix}_sent_segments_total{{{with_peer}}}", 5000, 200),
            (f"{prefix}_retransmitted_segments_total{{{with_peer}}}", 10, 0.1),
        ]
    return made


def rank_rows(labels: str, pod: int, pods: int, peers: int) -> list[tuple[str, float, float]]:
    """Return one rank's series."""
    made: list[tuple[str, float, float]] = [(f"kitty_pod_info{{{labels}}}", 1, 0)]
    made += cells("kitty_tcp_peer", labels, pod, pods, peers)
    made += [
        (f"kitty_tcp_tx_queue_bytes{{{labels}}}", 1e5, 0),
        (f"kitty_tcp_busy_seconds_total{{{labels}}}", 10, 0.3),
        (f"kitty_rank_run_queue_delay_seconds_total{{{labels}}}", 5, 0.02 + 0.001 * (pod % 7)),
        (f"kitty_rank_cpu_seconds_total{{{labels}}}", 100, 1.5),
        (f"kitty_tcp_rtt_seconds_count{{{labels}}}", 1000, 40 * peers),
        (f'kitty_tcp_rtt_seconds_bucket{{{labels},le="0.002048"}}', 900, 39 * peers),
        (f"kitty_rank_worker_device_wait_seconds_total{{{labels}}}", 0, 0.01),
        (f'kitty_rank_wait_seconds_total{{{labels},on="device"}}', 0, 0.01),
        (f'kitty_rank_wait_seconds_total{{{labels},on="stopped"}}', 0, 0),
        (f'kitty_rank_wait_seconds_total{{{labels},on="pipe"}}', 0, 0.01),
        (f"proc_futex_wait_duration_seconds_sum{{{labels}}}", 30, 0.4),
        (f'kitty_rank_workers{{{labels},state="D"}}', 0, 0),
        (f"gpu_power_draw_watts{{{labels}}}", 500, 0),
        (f"gpu_sm_utilization{{{labels}}}", 90, 0),
        (f"kitty_gpu_idle_energy_joules_total{{{labels}}}", 90, 0),
        (f'kitty_gpu_clock_hertz{{{labels},clock="sm"}}', 1.9e9, 0),
    ]
    made += [(f'proc_state{{{labels},state="{state}"}}', 0, 0) for state in "RSDTZ"]
    made += [
        (f'kitty_gpu_throttled_seconds_total{{{labels},reason="{reason}"}}', 3, 0.01)
        for reason in ("sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")
    ]
    scope = f'{labels},scope="container",container="abc"'
    made += [
        (f"kitty_cgroup_cpu_periods_total{{{scope}}}", 100, 10),
        (f"kitty_cgroup_cpu_throttled_periods_total{{{scope}}}", 1, 0.1),
        (f"kitty_memory_headroom_ratio{{{scope}}}", 0.5, 0),
    ]
    return made


def serve(ranks: int, per_pod: int, peers: int) -> None:
    """Serve the rows until killed."""
    made = rows(ranks, per_pod, peers)
    print(f"{len(made)} series of {ranks} ranks in {ranks // per_pod} pods", flush=True)
    start = time.time()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            age = time.time() - start
            text = "".join(f"{name} {value + growth * age:.9g}\n" for name, value, growth in made)
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    ThreadingHTTPServer(("127.0.0.1", PORT), Page).serve_forever()


def own_metrics() -> list[str]:
    """Return the lines of Prometheus's own page."""
    with urllib.request.urlopen(f"http://{ADDRESS}/metrics", timeout=30) as answer:
        return answer.read().decode().splitlines()


def durations() -> dict[str, float]:
    """Return the latest duration of each group, in seconds."""
    return {
        line.split(";")[1].split('"')[0]: float(line.split()[-1])
        for line in own_metrics()
        if line.startswith("prometheus_rule_group_last_duration_seconds{")
    }


def cpu_seconds() -> float:
    """Return the CPU time that Prometheus has used."""
    name = "process_cpu_seconds_total "
    return next(float(line.split()[1]) for line in own_metrics() if line.startswith(name))


def summed(name: str, group: str = "") -> float:
    """Return the sum of a family of Prometheus's own, of one group of rules or of all."""
    return sum(
        float(line.split()[-1])
        for line in own_metrics()
        if line.startswith(name + "{") and group in line
    )


def evaluations() -> float:
    """Return how often the group was evaluated; what came too late for its turn was not."""
    done = summed("prometheus_rule_group_iterations_total", "kitty-verdict")
    return done - summed("prometheus_rule_group_iterations_missed_total", "kitty-verdict")


def dearest(server: Prometheus) -> list[tuple[str, float]]:
    """Return the rules and what each took the last time, in seconds, the dearest first."""
    found = [
        (rule["name"] + " " + " ".join(rule.get("labels", {}).values()), rule["evaluationTime"])
        for group in server.ask("rules")["groups"]
        for rule in group["rules"]
    ]
    return sorted(found, key=lambda row: -row[1])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--ranks-per-pod", type=int, default=8)
    parser.add_argument("--peers", type=int, default=16, help="of each rank; 16 are served at most")
    parser.add_argument("--seconds", type=int, default=40)
    options = parser.parse_args()
    programs = Path(
        subprocess.run(
            [ROOT / "tools/prometheus"], check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    os.environ["GOMAXPROCS"] = "1"
    target = Target(address=f"127.0.0.1:{PORT}", namespace="x", pod="x", node="x", job="x")
    with private_network():
        page = multiprocessing.get_context("fork").Process(
            target=serve, args=(options.ranks, options.ranks_per_pod, options.peers), daemon=True
        )
        page.start()
        usage = {}
        for rules in ([], [RULES]):
            with (
                tempfile.TemporaryDirectory() as folder,
                Prometheus(
                    programs=programs, directory=Path(folder), targets=[target], rules=rules
                ) as server,
            ):
                time.sleep(FILL_S)
                usage[bool(rules)] = watch(server, options.seconds, bool(rules))
        page.kill()
    times, used = usage[True]
    cost = (used - usage[False][1]) / times
    print(f"{cost:.3f} s of CPU an evaluation ({times:.0f} in {options.seconds} s)")
    return 0


def watch(server: Prometheus, seconds: int, rules: bool) -> tuple[float, float]:
    """Return how often it evaluated the group and the CPU seconds that it used in that time."""
    before, done, began, walls = cpu_seconds(), evaluations(), time.monotonic(), []
    while time.monotonic() < began + seconds:
        time.sleep(INTERVAL_S)
        walls.append(durations().get("kitty-verdict", 0.0))
    used = (cpu_seconds() - before) / (time.monotonic() - began) * seconds
    if rules:
        print("verdicts:", [labels["pod"] for labels, _ in server.query("kitty:verdict")])
        print("rules that failed:", summed("prometheus_rule_evaluation_failures_total"))
        for name, cost in dearest(server)[:30]:
            print(f"  {cost:.3f} s {name}")
        print(f"group: median {statistics.median(walls):.3f} s, worst {max(walls):.3f} s (wall)")
    return evaluations() - done, used


if __name__ == "__main__":
    sys.exit(main())
