"""What the webhook adds to the creation of a pod, on the cluster that KUBECONFIG names.

Run by hand with kitty installed: ``python -m bench.e2e_create [--pods N]``. Pods are created in
turn in a labelled namespace and in one that is not, and are never scheduled; all go at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

from webhook.cluster import Cluster, ClusterError

NAMESPACES = {"with": "kitty-bench-with", "without": "kitty-bench-without"}
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
        "--no-token",
        action="store_true",
        help="pods without a service account's token: the server then reviews them once, not twice",
    )
    arguments = parser.parse_args()
    token = not arguments.no_token
    cluster = Cluster.connect()
    try:
        prepare(cluster)
        measure(cluster, 5, token=token)
        remove(cluster, 5)
        took = measure(cluster, arguments.pods, token=token)
    finally:
        for name in NAMESPACES.values():
            cluster.delete(f"/api/v1/namespaces/{name}")
        wait_until_gone(cluster)
    for side, times in took.items():
        p90 = statistics.quantiles(times, n=10)[-1]
        print(f"{side:8} median {statistics.median(times):6.2f} ms  p90 {p90:6.2f} ms a pod")
    pairs = [a - b for a, b in zip(took["with"], took["without"], strict=True)]
    print(f"median difference {statistics.median(pairs):.2f} ms a pod over {len(pairs)} pairs")


if __name__ == "__main__":
    main()
