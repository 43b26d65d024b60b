"""What the webhook adds to the creation of a pod, on the cluster that KUBECONFIG names.

Run by hand with kitty installed: ``python -m bench.e2e_create [--pods N] [--at-once N..]
[--jobs N]``. Pods are created in turn in a labelled namespace and in one that is not, one after the
other as kubectl does; then batches of several at once by turns; then Jobs of as many pods by
turns, whose controller creates them in parallel batches. None is scheduled; all go at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from webhook.cluster import Cluster, ClusterError

RUN = secrets.token_hex(3)
"""New names each run: for 30 s a deleted namespace's name costs each creation a look into etcd."""
NAMESPACES = {side: f"kitty-bench-{side}-{RUN}" for side in ("with", "without")}
JOB_TIMEOUT = 60
LABEL = "kitty.k10s.dev/inject"


def pod(number: int, *, token: bool) -> dict[str, object]:
    """Return a pod that no node takes, with or without the service account's token."""
    return {
        "metadata": {"name": f"pod-{number}"},
        "spec": {
            "automountServiceAccountToken": token,
            "nodeSelector": {"kitty.k10s.dev/nowhere": "true"},
            "restartPolicy": "Never",
            "containers": [{"name": "trainer", "image": "none"}],
        },
    }


def prepare(cluster: Cluster) -> None:
    """Make both namespaces and wait until pods can be created in them."""
    for side, name in NAMESPACES.items():
        labels = {LABEL: "true" if side == "with" else "false"}
        cluster.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    for name in NAMESPACES.values():
        for _ in range(100):
            with contextlib.suppress(ClusterError):
                cluster.get(f"/api/v1/namespaces/{name}/serviceaccounts/default")
                break
            time.sleep(0.1)


def measure(cluster: Cluster, pods: int, *, token: bool) -> dict[str, list[float]]:
    """Create pods by turns, the first of each pair alternating.

    Returns:
        Milliseconds of each creation, by side.
    """
    took: dict[str, list[float]] = {side: [] for side in NAMESPACES}
    for number in range(pods):
        order = list(NAMESPACES) if number % 2 else list(NAMESPACES)[::-1]
        for side in order:
            start = time.perf_counter()
            path = f"/api/v1/namespaces/{NAMESPACES[side]}/pods"
            made = cluster.create(path, pod(number, token=token))
            took[side].append((time.perf_counter() - start) * 1e3)
            count = len(made["spec"]["containers"]) + len(made["spec"].get("initContainers", []))
            if count != (2 if side == "with" else 1):
                raise SystemExit(f"{side}: a pod of {count} containers: is kitty installed?")
    return took


def measure_batches(
    cluster: Cluster, pods: int, at_once: int, *, token: bool
) -> dict[str, list[float]]:
    """Create batches of pods by turns, the pods of a batch at once.

    Returns:
        Milliseconds a pod from a batch's start to its last answer, by side.
    """
    took: dict[str, list[float]] = {side: [] for side in NAMESPACES}
    with ThreadPoolExecutor(at_once) as clients:
        for number in range(-1, pods // at_once):  # the first opens the connections
            order = list(NAMESPACES) if number % 2 else list(NAMESPACES)[::-1]
            for side in order:
                path = f"/api/v1/namespaces/{NAMESPACES[side]}/pods"
                metadata = {"generateName": f"batch-of-{at_once}-"}
                new = [pod(0, token=token) | {"metadata": metadata} for _ in range(at_once)]
                start = time.perf_counter()
                list(clients.map(partial(cluster.create, path), new))
                if number >= 0:
                    took[side].append((time.perf_counter() - start) * 1e3 / at_once)
    return took


def measure_jobs(cluster: Cluster, pods: int, jobs: int) -> dict[str, list[float]]:
    """Create Indexed Jobs by turns, the first of each pair alternating.

    Returns:
        Milliseconds a pod from the Job's creation to its last pod's, by side.
    """
    took: dict[str, list[float]] = {side: [] for side in NAMESPACES}
    for number in range(jobs):
        order = list(NAMESPACES) if number % 2 else list(NAMESPACES)[::-1]
        for side in order:
            took[side].append(_job(cluster, NAMESPACES[side], pods, f"job-{number}") / pods)
    return took


def _job(cluster: Cluster, namespace: str, pods: int, name: str) -> float:
    """Create a Job, wait for its pods, delete both, and return the milliseconds it took."""
    template = pod(0, token=True) | {"metadata": {}}
    spec = {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    start = time.perf_counter()
    cluster.create(path, {"metadata": {"name": name}, "spec": spec | {"template": template}})
    # The controller counts its pods in the status once it has heard of all of them.
    while cluster.get(f"{path}/{name}").get("status", {}).get("active", 0) < pods:
        if time.perf_counter() - start > JOB_TIMEOUT:
            raise SystemExit(f"{namespace}/{name}: not all of its {pods} pods exist")
        time.sleep(0.01)
    took = (time.perf_counter() - start) * 1e3
    cluster.delete(f"{path}/{name}", propagationPolicy="Background", gracePeriodSeconds="0")
    listing = f"/api/v1/namespaces/{namespace}/pods"
    while next(cluster.items(listing, labelSelector=f"batch.kubernetes.io/job-name={name}"), None):
        time.sleep(0.2)
    return took


def report(took: dict[str, list[float]]) -> None:
    """Print each side and the difference of the pairs."""
    for side, times in took.items():
        q = statistics.quantiles(times, n=10)
        print(
            f"{side:8} p10 {q[0]:6.2f} median {statistics.median(times):6.2f} "
            f"p90 {q[-1]:6.2f} ms a pod"
        )
    pairs = [a - b for a, b in zip(took["with"], took["without"], strict=True)]
    print(f"median difference {statistics.median(pairs):.2f} ms a pod over {len(pairs)} pairs")


def remove(cluster: Cluster, pods: int) -> None:
    """Delete what a first round made."""
    for name in NAMESPACES.values():
        for number in range(pods):
            path = f"/api/v1/namespaces/{name}/pods/pod-{number}"
            cluster.delete(path, gracePeriodSeconds="0")


def wait_until_gone(cluster: Cluster) -> None:
    """Return when both namespaces can be made anew."""
    for name in NAMESPACES.values():
        with contextlib.suppress(ClusterError):
            while cluster.get(f"/api/v1/namespaces/{name}"):
                time.sleep(0.5)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=100, help="pods on each side (%(default)s)")
    parser.add_argument(
        "--at-once",
        type=int,
        nargs="*",
        default=[],
        help="also that many pods at once, in batches by turns",
    )
    parser.add_argument("--jobs", type=int, default=0, help="Jobs on each side (%(default)s)")
    parser.add_argument(
        "--no-token",
        action="store_true",
        help="pods without a service account's token, which the server mounts in every container",
    )
    arguments = parser.parse_args()
    token = not arguments.no_token
    cluster = Cluster.connect()
    try:
        prepare(cluster)
        measure(cluster, 5, token=token)
        remove(cluster, 5)
        took = measure(cluster, arguments.pods, token=token)
        batches = {
            at_once: measure_batches(cluster, arguments.pods, at_once, token=token)
            for at_once in arguments.at_once
        }
        jobs = measure_jobs(cluster, arguments.pods, arguments.jobs) if arguments.jobs else None
    finally:
        for name in NAMESPACES.values():
            cluster.delete(f"/api/v1/namespaces/{name}")
        wait_until_gone(cluster)
    print("one after the other")
    report(took)
    for at_once, figures in batches.items():
        print(f"{at_once} at once")
        report(figures)
    if jobs:
        print("by the Job controller")
        report(jobs)


if __name__ == "__main__":
    main()
