"""Pods have namespaces, environment and limits as their manifests say, and vanish at the end."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lab.cgroups import hierarchies
from lab.cluster import MARKER, Cluster
from lab.commands import run
from lab.leftovers import owned_name, run_directory
from lab.podspec import UnsupportedError


def pod(*containers: dict[str, Any], shared: bool = True) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "test"},
        "spec": {
            "nodeName": "n1",
            "shareProcessNamespace": shared,
            "containers": [{"command": ["sleep", "600"], **c} for c in containers],
        },
    }


def until_written(path: Path) -> str:
    deadline = time.monotonic() + 10
    while not path.read_text().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.read_text()


def test_containers_share_the_pods_namespaces_and_leave_the_hosts(root: None) -> None:
    host = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "uts", "mnt")}
    with Cluster() as cluster:
        made = cluster.start_pod(pod({"name": "a"}, {"name": "b"}))
        commands = made.sandbox.inside("ps", "-e", "-o", "comm=")
        deadline = time.monotonic() + 10
        while (seen := sorted(run(*commands).split())) != ["cat", "ps", "sleep", "sleep"]:
            assert time.monotonic() < deadline, seen  # before its exec a container is unshare
        a, b = (made.containers[name].pid for name in "ab")
        for kind in ("net", "pid", "uts", "ipc"):
            assert os.readlink(f"/proc/{a}/ns/{kind}") == os.readlink(f"/proc/{b}/ns/{kind}")
        for kind in ("net", "pid", "uts", "mnt"):
            assert os.readlink(f"/proc/{a}/ns/{kind}") != host[kind]
        assert os.readlink(f"/proc/{a}/ns/mnt") != os.readlink(f"/proc/{b}/ns/mnt")
        assert run(*made.sandbox.inside("hostname")).strip() == "p"
    assert os.readlink("/proc/self/ns/net") == host["net"]


def test_environment_and_output(root: None) -> None:
    container = {
        "name": "a",
        "command": ["sh", "-c", 'echo "$IP $NODE $NAME"; exec sleep 600'],
        "env": [
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "NAME", "value": "at-$(IP)"},
        ],
    }
    with Cluster() as cluster:
        address = cluster.next_address()
        made = cluster.start_pod(pod(container))
        assert made.link.address == address
        assert until_written(made.logs["a"]) == f"{address} n1 at-{address}\n"


def test_limits_of_a_container(root: None) -> None:
    tree = next((tree for tree in hierarchies() if "cpu" in tree.controllers), None)
    if tree is None:
        pytest.skip("no hierarchy with the cpu controller is writable here")
    limits = {"resources": {"limits": {"cpu": "500m", "memory": "64Mi"}}}
    with Cluster() as cluster:
        made = cluster.start_pod(pod({"name": "a", **limits}))
        directory = tree.mount / owned_name() / "p" / "container-a"
        members = (directory / "cgroup.procs").read_text().split()
        assert str(made.containers["a"].pid) in members
        name = "cpu.cfs_quota_us" if tree.version == 1 else "cpu.max"
        assert (directory / name).read_text().split()[0] == "50000"
    assert not directory.exists()


def test_containers_without_a_shared_pid_namespace_are_refused(root: None) -> None:
    with Cluster() as cluster:
        with pytest.raises(UnsupportedError, match="PID namespace"):
            cluster.start_pod(pod({"name": "a"}, {"name": "b"}, shared=False))
        assert cluster.pods == []


def test_a_container_that_ends_tells_its_status(root: None) -> None:
    with Cluster() as cluster:
        made = cluster.start_pod(
            pod({"name": "a", "command": ["sh", "-c", "echo gone; exit 7"]}, {"name": "b"})
        )
        assert made.containers["a"].wait(10)
        assert made.containers["a"].exit_status() == 7
        assert made.containers["b"].exit_status() is None
        assert made.log_tail("a") == "gone"


def test_an_orphan_is_reaped(root: None) -> None:
    code = "import os\nif os.fork() == 0 and os.fork() == 0: os._exit(0)\nos.wait()"
    with Cluster() as cluster:
        made = cluster.start_pod(pod({"name": "a", "command": [sys.executable, "-c", code]}))
        assert made.containers["a"].wait(10)
        assert run(*made.sandbox.inside("ps", "-e", "-o", "stat=")).count("Z") == 0


def test_a_failure_in_the_middle_leaves_nothing(root: None) -> None:
    interfaces = socket.if_nameindex()
    with pytest.raises(ZeroDivisionError), Cluster() as cluster:  # noqa: PT012 -- a story
        made = cluster.start_pod(pod({"name": "a"}))
        pid = made.containers["a"].pid
        environ = Path(f"/proc/{pid}/environ")
        deadline = time.monotonic() + 20
        while f"{MARKER}={owned_name()}".encode() not in environ.read_bytes():
            assert time.monotonic() < deadline, "no marker in its environment"
            time.sleep(0.01)  # around the exec it is another one, or empty
        raise ZeroDivisionError
    assert not Path(f"/proc/{pid}").exists()
    assert not run_directory().exists()
    assert socket.if_nameindex() == interfaces
    for tree in hierarchies():
        assert not (tree.mount / owned_name()).exists()
