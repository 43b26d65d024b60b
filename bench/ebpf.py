"""What eBPF costs: memory, reading, a busy connection, and everybody else on the node.

`python bench/ebpf.py [rss] [read] [loopback] [node]`, as root; all of them without a
name. Each figure is a median over alternating runs with and without; the machine should be idle.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sidecar.ebpf import events, loader, rtt, syscall, waits  # noqa: E402 # needs the path above
from tests.sidecar.sandbox import Sandbox, inside  # noqa: E402 # same

PAIRS = 150
SETTLE_S, WINDOW_S = 0.05, 0.3  # attaching stops the processors for a moment

BYSTANDER = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
/* CPU time, which other processes of a busy machine do not take part in. */
static double seconds(struct timeval t) { return t.tv_sec + t.tv_usec / 1e6; }
static double used(int who)
{
    struct rusage u;
    getrusage(who, &u);
    return seconds(u.ru_utime) + seconds(u.ru_stime);
}
int main(int argc, char **argv)
{
    int there[2], back[2], n = 20000; char c = 0; double begin;
    if (pipe(there) || pipe(back)) return 1;
    begin = used(RUSAGE_SELF);
    for (int i = 0; i < 20 * n; i++) syscall(SYS_getppid);
    printf("%f ", 20 * n / (used(RUSAGE_SELF) - begin));
    fflush(stdout);
    if (!fork()) {
        close(there[1]);
        while (read(there[0], &c, 1) == 1 && write(back[1], &c, 1) == 1);
        _exit(0);
    }
    begin = used(RUSAGE_SELF);
    for (int i = 0; i < n; i++)
        if (write(there[1], &c, 1) != 1 || read(back[0], &c, 1) != 1) return 1;
    close(there[1]);
    wait(NULL);
    printf("%f\n", 2 * n / (used(RUSAGE_SELF) - begin + used(RUSAGE_CHILDREN)));
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
    plain = "pod,tcp,net,system,process,rank,matrix,waiting,anomaly,cgroup,rdma,netdev"
    full = f"{plain},rtt,kernel"
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
    """One connection as fast as it goes; the RTT hook comes and goes."""
    sandbox = Sandbox()
    [loaded] = load(rtt.candidates(_scope(sandbox), hook="tcp_probe"))
    program = loaded.programs["on_tcp_probe"]
    os.close(loaded.links.pop())
    if shutil.which("iperf3"):
        _iperf3(sandbox, program)
    else:
        ratios = _own_sender(sandbox, program)
        print(f"loopback: throughput with / without {_middle(ratios)}")
    loaded.close()
    sandbox.close()


def _iperf3(sandbox: Sandbox, program: int) -> None:
    """Attaches and detaches while one stream runs: two streams differ by more than the hook.

    Every other pair attaches nothing: what it differs from 1 is what the method errs by.
    """
    server = sandbox.start("iperf3", "--server", "--bind=127.0.0.1", stdout=subprocess.DEVNULL)
    sandbox.until(lambda: ":5201" in sandbox.run("ss", "--no-header", "-ltn"))
    cpus = sorted(os.sched_getaffinity(0))  # where both are put bends more than the hook does
    client = sandbox.start(
        *("iperf3", "--client=127.0.0.1", f"--affinity={cpus[0]},{cpus[-1]}"),
        *("--time=0", "--interval=0"),
        stdout=subprocess.DEVNULL,
    )
    time.sleep(2)
    devices = Path(f"/proc/{sandbox.init}/net/dev")

    def window() -> float:
        time.sleep(SETTLE_S)
        before, began = _received(devices), time.monotonic()
        time.sleep(WINDOW_S)
        return (_received(devices) - before) / (time.monotonic() - began)

    ratios: dict[str, list[float]] = {"with / without": [], "without / without": []}
    before = window()
    for number in range(2 * PAIRS):
        hooked = number % 2 == 0
        link = syscall.raw_tracepoint(program, "tcp_probe") if hooked else None
        during = window()
        if link is not None:
            os.close(link)
        after = window()
        side = "with / without" if hooked else "without / without"
        ratios[side].append(during / ((before + after) / 2))
        before = after
    client.kill()
    server.kill()
    for side, values in ratios.items():
        print(f"loopback: iperf3, throughput {side} {_middle(values)}")


def _received(devices: Path) -> int:
    """Bytes that the loopback device has received: what one end sent the other has got."""
    line = next(line for line in devices.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def _own_sender(sandbox: Sandbox, program: int) -> list[float]:
    """The same by a sender and a receiver in threads, in windows of 100 ms."""
    near, far = inside(sandbox.init, _pair)
    taken = 0

    def take() -> None:
        nonlocal taken
        buffer = bytearray(1 << 20)
        while size := far.recv_into(buffer):
            taken += size

    def give() -> None:
        block = bytes(1 << 18)
        with contextlib.suppress(OSError):
            while True:
                near.sendall(block)

    threads = [threading.Thread(target=work) for work in (take, give)]
    for thread in threads:
        thread.start()

    def window() -> float:
        began, before = time.monotonic(), taken
        time.sleep(0.1)
        return (taken - before) / (time.monotonic() - began)

    window()
    ratios = []
    for _ in range(150):
        before = window()
        link = syscall.raw_tracepoint(program, "tcp_probe")
        during = window()
        os.close(link)
        ratios.append(during / ((before + window()) / 2))
    near.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    near.close()
    far.close()
    return ratios


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
        eight = [_Programs(sandbox) for sandbox in sandboxes]
        measure()
        calls, switches = [], []
        for _ in range(60):
            before = measure()
            for programs in eight:
                programs.attach()
            during = measure()
            for programs in eight:
                programs.detach()
            after = measure()
            for index, ratios in enumerate((calls, switches)):
                ratios.append(during[index] / ((before[index] + after[index]) / 2))
        for sandbox in sandboxes:
            sandbox.close()
    print(f"node: syscall rate with / without {_middle(calls)}")
    print(f"node: switch rate with / without {_middle(switches)}")


class _Programs:
    """All that one sidecar has in the kernel; it watches a process that sleeps."""

    def __init__(self, sandbox: Sandbox) -> None:
        scope = _scope(sandbox)
        hook, wait, drop = load(
            rtt.candidates(scope, hook="tcp_probe"),
            [waits.candidate()],
            [events.drop_candidate(scope.netns)],
        )
        self._raw = (
            (hook.programs["on_tcp_probe"], "tcp_probe"),
            (drop.programs["on_drop"], "kfree_skb"),
        )
        self._links = hook.links + drop.links
        self._waits = waits.WaitProbe(wait)
        self._sleeper = sandbox.holder.pid
        self.detach()

    def attach(self) -> None:
        self._links = [syscall.raw_tracepoint(program, name) for program, name in self._raw]
        self._waits.watch([self._sleeper])

    def detach(self) -> None:
        for link in self._links:
            os.close(link)
        self._waits.watch([])


def _scope(sandbox: Sandbox) -> rtt.Scope:
    return rtt.Scope(os.stat(f"/proc/{sandbox.init}/ns/net").st_ino)


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _middle(ratios: list[float]) -> str:
    low, median, high = statistics.quantiles(ratios, n=4)
    least, most = _interval(ratios)
    return (
        f"{median:.3f} (95% {least:.3f}-{most:.3f}, "
        f"quartiles {low:.3f}-{high:.3f}, {len(ratios)} pairs)"
    )


def _interval(values: list[float]) -> tuple[float, float]:
    """The median's 95% confidence interval, from the order of the values (binomial)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = len(values) / 2 - half, len(values) / 2 + half
    return ordered[max(0, int(low))], ordered[min(len(values) - 1, int(high))]


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
