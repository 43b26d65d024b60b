"""What reading eight GPUs costs the agent: CPU a round, and resident memory.

The library is the stub of tests/gpu_stub, so the driver's own time is not in it, but the stub's
look-ups are. `python -m bench.gpu`; needs gcc.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STUB = Path(__file__).parent.parent / "tests" / "gpu_stub"
ROUNDS = 200
WORDS = ("pod", "gpu")


class _Everything:
    def __contains__(self, uuid: object) -> bool:
        return True


def _resident() -> float:
    """Returns the process's resident memory in MB."""
    rows = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    )
    return int(rows["VmRSS"].split()[0]) / 1024


def rounds() -> None:
    """Prints the CPU time of one round over all GPUs, every value read."""
    from sidecar.sources.nvml import Device, Nvml, load_library  # noqa: PLC0415 # in the child

    load_library()
    nvml = Nvml()
    devices = [Device(nvml, index) for index in range(nvml.start())]
    for device in devices:
        device.read(_Everything())
    time.sleep(0.2)
    costs = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for device in devices:
            device.read(_Everything())
        costs.append((time.thread_time() - began) * 1000)
        # GPM samples lie 100 ms apart.
        time.sleep(0.11)
    costs.sort()
    print(json.dumps({"median": statistics.median(costs), "p99": costs[int(ROUNDS * 0.99)]}))


def memory(collector: str) -> None:
    """Prints the agent's memory and CPU after fifteen seconds with or without the collector."""
    from sidecar.agent import COLLECTORS, Agent  # noqa: PLC0415 # in the child
    from sidecar.config import from_environment  # noqa: PLC0415 # in the child

    # The others would add their own noise; they are measured elsewhere.
    env = {
        "KITTY_BIND": "127.0.0.1",
        "KITTY_PORT": "19400",
        "KITTY_COLLECTORS": collector,
    }
    agent = Agent(from_environment(env, collectors=frozenset(COLLECTORS))[0])
    agent.serve()
    time.sleep(3)
    cpu = time.process_time()
    time.sleep(12)
    cpu = time.process_time() - cpu
    print(json.dumps({"resident": _resident(), "cpu": cpu / 12 * 100}), flush=True)
    os._exit(0)


def _child(*arguments: str, env: dict[str, str]) -> dict[str, float]:
    trainer = subprocess.Popen(
        ["sleep", "60"],
        env={**env, "KITTY_WATCH": "1", "RANK": "0", "NVIDIA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    )
    try:
        out = subprocess.run(
            [sys.executable, "-m", "bench.gpu", *arguments],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    finally:
        trainer.kill()
        trainer.wait()
    return dict(json.loads(out.stdout))


def main() -> None:
    """Runs each measurement in a process of its own."""
    if sys.argv[1:2] == ["rounds"]:
        rounds()
        return
    if sys.argv[1:2] == ["memory"]:
        memory(sys.argv[2])
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnvidia-ml.so.1"
        subprocess.run(
            [
                *("gcc", "-O2", "-shared", "-fPIC", "-pthread"),
                *("-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(STUB / "nvml.c")),
            ],
            check=True,
        )
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": folder,
            "NVML_SCENARIO": str(STUB / "scenarios" / "h100x8"),
        }
        cost = _child("rounds", env=env)
        print(f"a round of 8 GPUs: median {cost['median']:.2f} ms, p99 {cost['p99']:.2f} ms of CPU")
        runs = {word: [_child("memory", word, env=env) for _ in range(3)] for word in WORDS}
        rss, cpu = (
            {word: statistics.median(run[what] for run in runs[word]) for word in WORDS}
            for what in ("resident", "cpu")
        )
        print(
            f"the agent, medians of 3: {rss['pod']:.1f} MB resident without, "
            f"{rss['gpu']:.1f} MB with 8 GPUs: {rss['gpu'] - rss['pod']:+.1f} MB"
        )
        print(f"CPU: {cpu['pod']:.2f}% of a core without, {cpu['gpu']:.2f}% with")


if __name__ == "__main__":
    main()
