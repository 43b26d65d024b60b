"""In the guest: what the real sidecar's /metrics shows of delay, loss and a narrow link.

The link's rate may be given (tc's notation); the docs' figures are of the usual 100mbit.
Two pods with the same addresses and ports; only the first one's link is shaped. Prints one
JSON object; nothing is judged here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.guest.network import Pair, enter

BULK = "/run/bulk"
# The real agent. The emulated CPU is some twelve times slower, so is what its rounds may use.
AGENT = "from sidecar import cli, sampler; sampler.TOTAL *= 12; cli.main([])"
SAMPLE = re.compile(r"^(\w+)\{.*\} (\S+)$")
NAMES = ("net_tcp_rtt_us", "net_tcp_retransmits_total", "net_tcp_out_segs_total")


class Pod:
    """A pair with a rank in the near namespace, and a sidecar in the same PID namespace."""

    hook = ""
    interval = 0.0

    def __init__(self, name: str) -> None:
        self.pair = Pair(name)
        script = (
            "env KITTY_WATCH=1 RANK=0 JOB_NAME=guest "
            f"BULK={BULK}-{name} {' '.join(self.pair.ping())} & "
            "KITTY_COLLECTORS=pod,tcp,net,rtt KITTY_BIND=127.0.0.1 KITTY_JOB=guest "
            f"{sys.executable} -c {shlex.quote(AGENT)} & wait"
        )
        words = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", script]
        self.pair.start(name, words)

    def read(self) -> dict[str, float]:
        """The figures of the rank, from /metrics."""
        enter(self.pair.name)
        with urllib.request.urlopen("http://127.0.0.1:9100/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = {}
        for line in text.splitlines():
            match = SAMPLE.match(line)
            if match and match[1] in NAMES:
                found[match[1]] = float(match[2])
            elif line.startswith("kitty_rtt_hook_info"):
                self.hook = line
            elif line.startswith('kitty_sample_interval_seconds{collector="rtt"'):
                self.interval = float(line.rpartition(" ")[2])
        return found

    def wait(self, seconds: float) -> None:
        """Waits until the gauge is there, by a hook: an emulated CPU compiles for half a minute."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if "net_tcp_rtt_us" in self.read() and 'hook="tcp_info"' not in self.hook:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise TimeoutError(f"{self.pair.name}: no net_tcp_rtt_us: {self.read()}")

    def until(self, changed: float, low: float, high: float) -> tuple[float, float]:
        """Seconds from a change until the gauge lies within bounds, and the gauge then."""
        while True:
            value = self.read().get("net_tcp_rtt_us", -1.0)
            took = time.monotonic() - changed
            if low <= value <= high or took > 10:
                return took, value
            time.sleep(0.1)

    def watch(self, seconds: float) -> dict[str, float]:
        """How the counters grow in a while, and the median of the gauge."""
        before, gauges = self.read(), []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            gauges.append(self.read().get("net_tcp_rtt_us", -1.0))
            time.sleep(0.25)
        after = self.read()
        grown = {name: after[name] - before[name] for name in NAMES[1:]}
        return {**grown, "rtt_us": sorted(gauges)[len(gauges) // 2]}


def main() -> None:
    """Runs the story."""
    near, far = Pod("near"), Pod("far")
    near.wait(120)
    far.wait(120)
    report: dict[str, object] = {"kernel": os.uname().release, "hook": near.hook}
    report["healthy"] = near.watch(3)
    rises, falls = [], []
    for turn in range(5):
        rises.append(near.until(near.pair.shape("delay", "50ms"), 45_000, 70_000))
        if turn == 0:
            report["delayed"] = near.watch(3)
            report["far_meanwhile"] = far.watch(1)
            report["interval"] = near.interval
        falls.append(near.until(near.pair.shape(), 1, 10_000))
        time.sleep(0.5)
    report["rises"], report["falls"] = rises, falls
    near.pair.shape("loss", "5%")
    report["lossy"] = near.watch(6)
    report["far_while_lossy"] = far.watch(1)
    near.pair.shape("rate", *(sys.argv[1:] or ["100mbit"]))
    Path(f"{BULK}-near").touch()
    time.sleep(2)
    report["narrow"] = near.watch(4)
    report["far_while_narrow"] = far.watch(1)
    print(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
