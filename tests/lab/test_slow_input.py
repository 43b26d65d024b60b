"""The fault of the loader is seen by the loader's own times and its state, at one pod alone."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.cluster import Cluster, Pod
from lab.commands import ToolError
from lab.faults import device_of_batches, slow_input, trainer_processes, training_cgroup
from tests.lab.conftest import probe_pod

LOADER = """
import json, sys, time
from lab.loader import Loader
loader, step = Loader(size=256 << 10), 0
while True:
    start = time.monotonic()
    loader.next(step)
    print(json.dumps([time.time(), time.monotonic() - start]), flush=True)
    time.sleep(0.02)
    step += 1
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def test_slow_input_makes_the_loader_wait_for_storage(root: None) -> None:
    with Cluster() as cluster:
        for name in ("hit", "peer"):
            pod = probe_pod(name)
            pod["spec"]["containers"][0]["command"] = [sys.executable, "-c", LOADER]
            cluster.start_pod(pod)
        hit, peer = cluster.pods
        if not training_cgroup(hit).has("blkio"):
            pytest.skip("no cgroup hierarchy with the block I/O controller can be written")

        def batches(pod: Pod) -> list[tuple[float, float]]:
            lines = pod.logs["probe"].read_text().split("\n")[:-1]
            return [(when, took) for when, took in map(json.loads, lines)]

        assert eventually(lambda: min(len(batches(pod)) for pod in cluster.pods) > 20)
        try:
            device_of_batches(hit)
        except ToolError as error:
            pytest.skip(str(error))
        (worker,) = (pid for pid in trainer_processes(hit) if pid != hit.containers["probe"].pid)
        with slow_input(cluster, hit, 250):
            began = time.time()
            seen = []
            while time.time() < began + 2.5:
                seen.append(state(worker))
                time.sleep(0.02)
        during = [took for when, took in batches(hit) if when > began + 1]
        assert 2 <= len(during) <= 9  # those read ahead may come on top
        assert seen.count("D") > 0.8 * len(seen)
        assert len([when for when, _ in batches(peer) if when > began + 1]) > 25
        count = len(batches(hit))
        assert eventually(lambda: len(batches(hit)) > count + 20)
