"""What eBPF costs: memory, reading, a busy connection, and everybody else on the node.

`python bench/ebpf.py [rss] [read] [loopback] [node]`, as root; all of them without a
name. Each figure is a median over alternating runs with and without; the machine should be idle.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sidecar.ebpf import events, loader, rtt, waits  # noqa: E402 # needs the path above
from tests.sidecar.sandbox import Sandbox, inside  # noqa: E402 # same

if TYPE_CHECKING:
    from collections.abc import Callable

BYSTANDER = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);
                          return t.tv_sec + t.tv_nsec / 1e9; }
int main(int argc, char **argv)
{
    int there[2], back[2], n = 200000; char c = 0; double begin;
    if (pipe(there) || pipe(back)) return 1;
    begin = now();
    for (int i = 0; i < 10 * n; i++) syscall(SYS_getppid);
    printf("%f ", 10 * n / (now() - begin));
    if (!fork()) {
        close(there[1]);
        while (read(there[0], &c, 1) == 1 && write(back[1], &c, 1) == 1);
        _exit(0);
    }
    begin = now();
    for (int i = 0; i < n; i++)
        if (write(there[1], &c, 1) != 1 || read(back[0], &c, 1) != 1) return 1;
    printf("%f\n", 2 * n / (now() - begin));
    return 0;
}
"""


def load(*groups: list[loader.Candidate]) -> list[loader.Loaded]:
    """Loads; every group must be usable."""
    results = loader.Loader().load(*groups)
    refused = [result for result in results if isinstance(result, loader.Refused)]
    if refused:
        raise SystemExit(f"eBPF cannot be had here: {refused[0].detail}")
    return [result for result in results if isinstance(result, loader.Loaded)]


def rss() -> None:
    """Resident memory of the whole agent two and ten seconds after its start."""
    plain, full = "pod,tcp,net,system,process", "pod,tcp,net,system,process,rtt,kernel"
    seen: dict[str, list[tuple[int, int]]] = {plain: [], full: []}
    for _ in range(3):
        for collectors, figures in seen.items():
            sandbox = Sandbox()
            sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "RANK": "0"})
            agent = sandbox.sidecar(KITTY_COLLECTORS=collectors)
            pid = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()[0]
            time.sleep(2)
            early = _rss(pid)
            time.sleep(8)
            sandbox.scrape()
            figures.append((early, _rss(pid)))
            sandbox.close()
    for name, figures in seen.items():
        early, late = (statistics.median(column) / 1024 for column in zip(*figures, strict=True))
        print(f"rss: {early:.1f} MiB after 2 s, {late:.1f} after 10 s: {name}")


def _rss(pid: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def read() -> None:
    """Reading the cells of 8 ranks with 16 peers each."""
    sandbox = Sandbox()
    [loaded] = load(rtt.candidates(_scope(sandbox), hook="tcp_probe"))
    probe = rtt.KernelProbe(loaded)
    pairs = inside(sandbox.init, lambda: [_pair() for _ in range(64)])  # both ends count
    busy, idle = [], []
    for _ in range(200):
        for near, far in pairs:
            for end, peer in ((near, far), (far, near)) * 2:
                end.sendall(b"x")
                peer.recv(1)
        for times in (busy, idle):
            began = time.perf_counter()
            count = len(probe.read())
            times.append(time.perf_counter() - began)
            assert count == (128 if times is busy else 0)
    for name, times in (("busy", busy), ("idle", idle)):
        print(f"read: 128 {name} connections {statistics.median(times) * 1e3:.3f} ms")
    probe.close()
    sandbox.close()


def loopback() -> None:
    """One connection as fast as it goes, with the RTT hook and without."""
    sandbox = Sandbox()
    candidates = rtt.candidates(_scope(sandbox), hook="tcp_probe")
    inside(sandbox.init, lambda: _throughput(0.5))
    ratios = []
    for _ in range(15):
        without = inside(sandbox.init, lambda: _throughput(1))
        [loaded] = load(candidates)
        with_hook = inside(sandbox.init, lambda: _throughput(1))
        loaded.close()
        after = inside(sandbox.init, lambda: _throughput(1))
        ratios.append(with_hook / ((without + after) / 2))
    print(f"loopback: throughput with / without {statistics.median(ratios):.3f} {_spread(ratios)}")
    sandbox.close()


def _throughput(seconds: float) -> float:
    near, far = _pair()
    taken = 0

    def take() -> None:
        nonlocal taken
        buffer = bytearray(1 << 20)
        while size := far.recv_into(buffer):
            taken += size

    taker = threading.Thread(target=take)
    taker.start()
    block, end = bytes(1 << 18), time.monotonic() + seconds
    while time.monotonic() < end:
        near.sendall(block)
    near.close()
    taker.join()
    far.close()
    return taken / seconds


def node() -> None:
    """An unwatched process while eight sidecars' programs are attached, and while none is."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "bystander.c"), str(Path(folder, "bystander"))
        source.write_text(BYSTANDER)
        subprocess.run(["gcc", "-O2", "-o", program, str(source)], check=True)
        cpu = str(max(os.sched_getaffinity(0)))

        def measure() -> tuple[float, float]:
            said = subprocess.run(
                ["taskset", "-c", cpu, program], check=True, capture_output=True, text=True
            ).stdout.split()
            return float(said[0]), float(said[1])

        sandboxes = [Sandbox() for _ in range(8)]
        measure()
        calls, switches = [], []
        for _ in range(4):
            before = [measure() for _ in range(3)]
            detach = _eight(sandboxes)
            during = [measure() for _ in range(5)]
            detach()
            after = [measure() for _ in range(3)]
            for index, ratios in enumerate((calls, switches)):
                bare = statistics.median(m[index] for m in before + after)
                ratios.append(statistics.median(m[index] for m in during) / bare)
        for sandbox in sandboxes:
            sandbox.close()
    print(f"node: syscall rate with / without {statistics.median(calls):.3f} {_spread(calls)}")
    print(f"node: switch rate with / without {statistics.median(switches):.3f} {_spread(switches)}")


def _eight(sandboxes: list[Sandbox]) -> Callable[[], None]:
    probes: list[waits.WaitProbe] = []
    others: list[loader.Loaded] = []
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in sandboxes]
    for sandbox, sleeper in zip(sandboxes, sleepers, strict=True):
        hook, wait, drop = load(
            rtt.candidates(_scope(sandbox), hook="tcp_probe"),
            [waits.candidate()],
            [events.drop_candidate(_scope(sandbox).netns)],
        )
        probes.append(waits.WaitProbe(wait))
        probes[-1].watch([sleeper.pid])
        others += [hook, drop]

    def detach() -> None:
        for probe in (*probes, *others):
            probe.close()
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()

    return detach


def _scope(sandbox: Sandbox) -> rtt.Scope:
    return rtt.Scope(os.stat(f"/proc/{sandbox.init}/ns/net").st_ino)


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _spread(ratios: list[float]) -> str:
    return f"({min(ratios):.3f}-{max(ratios):.3f}, {len(ratios)} pairs)"


BENCHES = {"rss": rss, "read": read, "loopback": loopback, "node": node}


def main(names: list[str]) -> int:
    """Runs the benches named, or all."""
    if unknown := set(names) - BENCHES.keys():
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(BENCHES)}")
        return 2
    for name in names or BENCHES:
        BENCHES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
