"""OOM kills and dropped packets."""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from sidecar.ebpf import events, loader
from sidecar.sources.oom_kills import OomKills
from tests.sidecar.sandbox import ROOT, Sandbox, inside

NOWHERE = 9


def refused_datagrams(count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(count):
            sender.sendto(b"x", ("127.0.0.1", NOWHERE))


def test_drops_of_the_own_namespace_by_reason(
    load: loader.Loader, sandbox: Sandbox, other: Sandbox
) -> None:
    netns = os.stat(f"/proc/{sandbox.init}/ns/net").st_ino
    [loaded] = load.load([events.drop_candidate(netns)])
    if isinstance(loaded, loader.Refused):
        pytest.skip(f"not on this kernel: {loaded.detail}")
    inside(other.init, lambda: refused_datagrams(7))
    assert events.read_drops(loaded) == {}
    inside(sandbox.init, lambda: refused_datagrams(3))
    assert events.read_drops(loaded).get("NO_SOCKET") == 3

    def talk() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
            for _ in range(50):
                near.sendall(b"x")
                far.recv(1)
            near.close()
            far.close()

    inside(sandbox.init, talk)
    grown = events.read_drops(loaded)
    assert grown["NO_SOCKET"] == 3  # packets that were delivered are no drops
    loaded.close()


OOM_STORY = """
import json, os, subprocess, sys
from sidecar.ebpf import events, loader
[tasks] = sys.argv[1:]
[loaded] = loader.Loader().load([events.oom_candidate()])
def eat():
    eater = f"exec {sys.executable} -c 'bytearray(200 << 20)'"
    return subprocess.run(["sh", "-c", f"echo $$ > {tasks}; {eater}"])
counts = [events.read_oom_kills(loaded)]
codes = [eat().returncode]
counts.append(events.read_oom_kills(loaded))
print(json.dumps([counts, codes]), flush=True)
sys.stdin.readline()
print(json.dumps(events.read_oom_kills(loaded)))
"""


@pytest.fixture
def small_cgroup() -> object:
    """A memory cgroup of 40 MB: its folder, the file of the limit, and that of its processes."""
    v1 = Path("/sys/fs/cgroup/memory")
    v2 = Path("/sys/fs/cgroup")
    if (v1 / "memory.limit_in_bytes").exists():
        folder, name = v1 / "kitty-test", "memory.limit_in_bytes"
    elif "memory" in (v2 / "cgroup.controllers").read_text().split():
        (v2 / "cgroup.subtree_control").write_text("+memory")
        folder, name = v2 / "kitty-test", "memory.max"
    else:
        pytest.skip("no memory cgroup can be made here")
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(str(40 << 20))
    yield folder
    with contextlib.suppress(OSError):
        folder.rmdir()


def test_oom_kills_of_the_own_namespace_only(
    load: loader.Loader, sandbox: Sandbox, other: Sandbox, small_cgroup: Path
) -> None:
    tasks = str(small_cgroup / "cgroup.procs")
    story = [sys.executable, "-c", OOM_STORY, tasks]
    env = {"PYTHONPATH": str(ROOT)}
    ours = sandbox.start(*story, env=env)
    assert ours.stdout is not None
    assert json.loads(ours.stdout.readline()) == [[0, 1], [-9]]
    # The victim is gone; one of another pod does not count here.
    theirs = other.start(*story, env=env)
    assert theirs.stdout is not None
    assert json.loads(theirs.stdout.readline()) == [[0, 1], [-9]]
    out, _ = ours.communicate("\n")
    assert json.loads(out) == 1


def test_the_nodes_pid_namespace_is_left_to_the_cgroups() -> None:
    if os.stat("/proc/self/ns/pid").st_ino != events.ROOT_PID_NAMESPACE:
        pytest.skip("the tests run in a PID namespace of their own")
    assert events.oom_candidate() is None


def test_the_cgroups_own_count() -> None:
    kills = OomKills()
    kills.add({})
    totals = [kills.total]
    # The third reading has a new container; in the fourth the first one has ended.
    for counts in ({"a": 4}, {"a": 6, "b": 8}, {"b": 8}, {"a": 1, "b": 9}):
        kills.add(counts)
        totals.append(kills.total)
    assert totals == [None, 0, 2, 2, 3]  # unknown is not 0
