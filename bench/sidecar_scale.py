"""What the sidecar costs on a busy node: real processes, sockets, control groups.

    python -m bench.sidecar_scale round     16 ranks, 128 workers, 10,000 sockets, 5,000 foreign
    python -m bench.sidecar_scale minute    8 ranks, 1,000 sockets, the agent for 60 s

Needs root: a network namespace, and a control group of the name that tells the pod (hostPID).
`round` prints the CPU time of one round of all collectors, by collector, and the memory;
`minute` the share of a core that the agent used while it was scraped every 5 s.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

UID = f"bench-{os.getpid()}"
CLONE_NEWNET = 0x40000000
ROUNDS = 20
THREADS = 8
PORT = 19100


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["round", "minute", "measure", "rank"])
    parser.add_argument("--foreign", type=int, default=5000)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--workers", type=int, help="of each rank")
    parser.add_argument("--sockets", type=int, help="of all ranks")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    if args.what == "rank":
        return rank(args.workers, args.sockets)
    if args.what == "measure":
        return measure(profile=args.profile)
    big = args.what == "round"
    ranks = args.ranks or (16 if big else 8)
    workers = args.workers or (8 if big else 2)
    sockets = args.sockets or (10_000 if big else 1_000)
    with World(ranks, workers, sockets // ranks, args.foreign if big else 0) as world:
        print(world, flush=True)
        if big:
            options = ["--profile"] if args.profile else []
            return subprocess.run(
                [sys.executable, "-m", "bench.sidecar_scale", "measure", *options],
                env={**os.environ, "KITTY_POD_UID": UID},
                check=False,
            ).returncode
        return minute()


class World:
    """A pod's processes, and those of others."""

    def __init__(self, ranks: int, workers: int, sockets: int, foreign: int) -> None:
        if ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
            raise SystemExit("needs root: a network namespace")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self.text = (
            f"{ranks} ranks, {ranks * workers} workers, {ranks * sockets} sockets,"
            f" {foreign} foreign processes"
        )
        self.group = _group()
        self.foreign = [subprocess.Popen(["sleep", "3600"]) for _ in range(foreign)]
        self.ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "bench.sidecar_scale", "rank"),
                    *(f"--workers={workers}", f"--sockets={sockets}"),
                ],
                env={**os.environ, "KITTY_WATCH": "1", "RANK": str(number), "JOB_NAME": "bench"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                preexec_fn=self._join,  # noqa: PLW1509 # no threads yet
            )
            for number in range(ranks)
        ]
        for process in self.ranks:
            assert process.stdout is not None
            process.stdout.readline()

    def __str__(self) -> str:
        return self.text

    def _join(self) -> None:
        (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.ranks, *self.foreign]:
            process.kill()
        for process in [*self.ranks, *self.foreign]:
            process.wait()
        while (self.group / "cgroup.procs").read_text():
            time.sleep(0.1)
        self.group.rmdir()
        self.group.parent.rmdir()


def _group() -> Path:
    """Makes the pod's control group with a container in it, in the memory hierarchy or in v2's."""
    for point in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        if Path(point, "cgroup.procs").exists():
            folder = Path(point, f"pod{UID}", "trainer")
            folder.mkdir(parents=True)
            return folder
    raise SystemExit("needs a control group hierarchy")


def rank(workers: int, sockets: int) -> int:
    """One trainer: threads, forked workers, connections with itself that all carry a little."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (sockets + 100, sockets + 100))
    for _ in range(workers):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            while os.getppid() != 1:
                time.sleep(5)
            os._exit(0)
    for _ in range(THREADS - 1):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        pairs = [
            (socket.create_connection(server.getsockname()), server.accept()[0])
            for _ in range(sockets // 2)
        ]
    print("ready", flush=True)
    while True:
        for left, right in pairs:
            left.send(b"x")
            right.recv(1)
        time.sleep(1)


def measure(*, profile: bool) -> int:
    """Runs rounds as the sampler does, and prints what they cost."""
    from sidecar.agent import COLLECTORS, Agent  # noqa: PLC0415 # its memory is what is measured
    from sidecar.config import from_environment  # noqa: PLC0415
    from sidecar.exposition import text  # noqa: PLC0415

    config, _ = from_environment(os.environ, collectors=frozenset(COLLECTORS))
    agent = Agent(config)
    costs: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        for rounds in agent.rounds:
            began = time.thread_time()
            rounds.run()
            costs.setdefault(rounds.collector.name, []).append(time.thread_time() - began)
        if number == 0:
            print(f"first round {1e3 * sum(c[0] for c in costs.values()):.0f} ms CPU")
        time.sleep(0.5)
    view = agent.sources.pod.view
    print(f"seen: {len(view.ranks)} ranks, {len(view.rank_of)} processes of ranks")
    medians = {name: statistics.median(times[1:]) for name, times in costs.items()}
    for name, seconds in medians.items():
        print(f"  {name:8} {1e3 * seconds:7.2f} ms   worst {1e3 * max(costs[name][1:]):7.2f} ms")
    totals = [sum(times[i] for times in costs.values()) for i in range(1, ROUNDS)]
    print(f"round: median {1e3 * statistics.median(totals):.1f} ms CPU, worst", end=" ")
    print(f"{1e3 * max(totals):.1f} ms; {memory(os.getpid())}")
    began = time.thread_time()
    lines = text(agent.guard.collect()).splitlines()
    series = [line for line in lines if not line.startswith("#")]
    dropped = sum(float(s.split()[-1]) for s in series if s.startswith("kitty_series_dropped"))
    print(f"page: {len(series)} series, {dropped:.0f} dropped,", end=" ")
    print(f"{1e3 * (time.thread_time() - began):.1f} ms CPU")
    if profile:
        _profile(agent)
    return 0


def _profile(agent: object) -> None:
    import cProfile  # noqa: PLC0415
    import pstats  # noqa: PLC0415

    profiler = cProfile.Profile()
    for _ in range(5):
        time.sleep(0.5)
        profiler.enable()
        agent.sampler.once()  # type: ignore[attr-defined]
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def minute() -> int:
    """Runs the real agent for a minute and prints its share of a core."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "sidecar"],
        env={
            **os.environ,
            "KITTY_POD_UID": UID,
            "KITTY_PORT": str(PORT),
            "KITTY_BIND": "127.0.0.1",
        },
    )
    try:
        time.sleep(5)
        before, began = _cpu(agent.pid), time.monotonic()
        scrapes = []
        for _ in range(12):
            time.sleep(5)
            scrapes.append(_scrape())
        used, elapsed = _cpu(agent.pid) - before, time.monotonic() - began
        print(f"agent: {100 * used / elapsed:.2f} % of a core over {elapsed:.0f} s, 12 scrapes")
        print(f"scrape: median {1e3 * statistics.median(s for s, _ in scrapes):.1f} ms,", end=" ")
        print(f"{scrapes[-1][1]} series; {memory(agent.pid)}")
        for line in _page().splitlines():
            if line.startswith(("kitty_sample_interval", "kitty_collector_duration")):
                print(f"  {line}")
    finally:
        agent.terminate()
        agent.wait()
    return 0


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _page() -> str:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def _scrape() -> tuple[float, int]:
    began = time.monotonic()
    text = _page()
    return time.monotonic() - began, sum(not line.startswith("#") for line in text.splitlines())


def memory(pid: int) -> str:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    rss, peak = (int(rows[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return f"RSS {rss:.1f} MiB, peak {peak:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
