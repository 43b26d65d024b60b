"""Control groups: where they are found, what is read there, and what is refused."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.collectors.cgroup import CgroupCollector, short_name
from sidecar.config import Config
from sidecar.pod import Pod
from sidecar.sources.cgroup import CgroupUsage
from sidecar.sources.cgroup_mounts import CgroupFS, below, pod_path
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS, parse_cgroup
from tests.sidecar.fixture import CGROUP_1, CGROUP_2, Fixture, group
from tests.sidecar.sandbox import ROOT, Sandbox

TRAINER = 40


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    made = Fixture(tmp_path / "machine")
    made.process(TRAINER)
    return made


def usage(fixture: Fixture, paths: str) -> CgroupUsage | None:
    return CgroupFS(str(fixture.proc)).usage(TRAINER, parse_cgroup(paths.encode()))


VERSION_2 = CgroupUsage(
    cpu_usage=5.0,
    cpu_quota=2.0,
    periods=100,
    throttled_periods=25,
    throttled=1.5,
    memory=800000,
    memory_peak=900000,
    memory_limit=1000000,
    working_set=600000,
    events={"high": 3, "max": 2, "oom": 1, "oom_kill": 1},
    pressure={
        ("cpu", "some"): 2.5,
        ("cpu", "full"): 0.5,
        ("memory", "some"): 0.001,
        ("memory", "full"): 0.0005,
        ("io", "some"): 7.0,
        ("io", "full"): 6.0,
    },
)


def test_version_2_below_the_agents_own_mount(fixture: Fixture, tmp_path: Path) -> None:
    """The agent is in the machine's cgroup namespace, as a privileged container is."""
    group(tmp_path / "cg/kubepods/pod7/trainer", CGROUP_2)
    fixture.mount("self", tmp_path / "cg", root="/")
    found = usage(fixture, "0::/kubepods/pod7/trainer\n")
    assert found == VERSION_2
    assert found is not None
    assert found.headroom == pytest.approx(0.4)


def test_version_2_in_private_namespaces(fixture: Fixture, tmp_path: Path) -> None:
    """The trainer's group is `/../x` from here: only its own mount shows it."""
    group(tmp_path / "own", CGROUP_2 | {"memory.current": "1\n"})
    root = tmp_path / "trainer's root"
    group(root / "sys/fs/cgroup", CGROUP_2)
    fixture.mount("self", tmp_path / "own", root="/")
    fixture.mount(TRAINER, root / "sys/fs/cgroup", root="/../x", point="/sys/fs/cgroup")
    (fixture.proc / str(TRAINER) / "root").symlink_to(root)
    assert usage(fixture, "0::/../x\n") == VERSION_2
    group(root / "sys/fs/cgroup/init.scope", CGROUP_2 | {"memory.current": "300000\n"})
    below_it = usage(fixture, "0::/../x/init.scope\n")
    assert below_it is not None
    assert below_it.memory == 300000
    assert usage(fixture, "0::/../y\n") is None


def test_version_1_with_named_controllers(fixture: Fixture, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for controller, point in (("cpu", "cpu,cpuacct"), ("memory", "memory")):
        group(root / point, CGROUP_1[controller] | CGROUP_1.get(f"{controller}acct", {}))
        fixture.mount(
            TRAINER, root / point, root="/kubepods/c1", controllers=point, point=f"/{point}"
        )
    (fixture.proc / str(TRAINER) / "root").symlink_to(root)
    paths = "4:memory:/kubepods/c1\n2:cpu,cpuacct:/kubepods/c1\n1:name=systemd:/kubepods/c1\n"
    assert usage(fixture, paths) == CgroupUsage(
        cpu_usage=3.0,
        cpu_quota=1.5,
        periods=40,
        throttled_periods=10,
        throttled=2.0,
        memory=600000,
        memory_peak=700000,
        memory_limit=1000000,
        working_set=500000,
        events={"max": 4, "oom_kill": 2},
    )


def test_a_hybrid_takes_pressure_from_version_2(fixture: Fixture, tmp_path: Path) -> None:
    group(tmp_path / "memory/c1", CGROUP_1["memory"])
    group(tmp_path / "unified/c1", {k: v for k, v in CGROUP_2.items() if "memory." not in k})
    fixture.mount("self", tmp_path / "memory", root="/", controllers="memory")
    fixture.mount("self", tmp_path / "unified", root="/")
    found = usage(fixture, "4:memory:/c1\n0::/c1\n")
    assert found is not None
    assert (found.memory, found.cpu_usage) == (600000, None)
    assert found.pressure["io", "full"] == 6.0


def test_the_machines_own_figures_are_no_containers(fixture: Fixture, tmp_path: Path) -> None:
    """The root of a hierarchy has pressure and a memory.stat: the node's."""
    top = {k: v for k, v in CGROUP_2.items() if k != "cgroup.events"}
    group(tmp_path / "unified", top)
    group(tmp_path / "memory", CGROUP_1["memory"] | {"cgroup.sane_behavior": "0\n"})
    fixture.mount("self", tmp_path / "unified", root="/")
    fixture.mount("self", tmp_path / "memory", root="/", controllers="memory")
    assert usage(fixture, "0::/\n") is None
    assert usage(fixture, "4:memory:/\n0::/\n") is None


def test_unlimited_is_absent(fixture: Fixture, tmp_path: Path) -> None:
    unlimited = {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.peak": "alien"}
    group(tmp_path / "cg", CGROUP_2 | unlimited)
    fixture.mount("self", tmp_path / "cg", root="/t")
    found = usage(fixture, "0::/t\n")
    assert found is not None
    assert (found.cpu_quota, found.memory_limit, found.memory_peak) == (None, None, None)
    assert found.headroom is None
    assert found.memory == 800000


def test_what_is_mounted_over_the_place_is_not_read(fixture: Fixture, tmp_path: Path) -> None:
    """A trainer can lay its own files where its control group was: the mount is another then."""
    root = tmp_path / "root"
    group(root / "sys/fs/cgroup", CGROUP_2)
    (fixture.proc / str(TRAINER) / "root").symlink_to(root)
    fixture.mount(TRAINER, root, root="/../x", point="/sys/fs/cgroup", mount_id=4_000_000)
    assert usage(fixture, "0::/../x\n") is None


def test_links_and_pipes_are_not_followed(fixture: Fixture, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "secret").write_text("7\n")
    folder = group(root / "sys/fs/cgroup", CGROUP_2 | {"memory.events": "oom 1\n" * 10})
    (folder / "memory.current").unlink()
    (folder / "memory.current").symlink_to(tmp_path / "secret")
    (folder / "memory.peak").unlink()
    os.mkfifo(folder / "memory.peak")
    (fixture.proc / str(TRAINER) / "root").symlink_to(root)
    fixture.mount(TRAINER, folder, root="/../x", point="/sys/fs/cgroup")
    results: list[CgroupUsage | None] = []
    thread = threading.Thread(target=lambda: results.append(usage(fixture, "0::/../x\n")))
    thread.start()
    thread.join(timeout=10)
    (found,) = results
    assert found is not None
    assert (found.memory, found.memory_peak, found.cpu_usage) == (None, None, 5.0)


def test_a_linked_folder_is_not_followed(fixture: Fixture, tmp_path: Path) -> None:
    root = tmp_path / "root"
    group(tmp_path / "elsewhere/cgroup", CGROUP_2)
    (root / "sys").mkdir(parents=True)
    (root / "sys/fs").symlink_to(tmp_path / "elsewhere")
    (fixture.proc / str(TRAINER) / "root").symlink_to(root)
    fixture.mount(TRAINER, tmp_path / "elsewhere", root="/../x", point="/sys/fs/cgroup")
    assert usage(fixture, "0::/../x\n") is None


def test_a_group_that_goes_and_another_that_comes(fixture: Fixture, tmp_path: Path) -> None:
    group(tmp_path / "cg/a", CGROUP_2)
    fixture.mount("self", tmp_path / "cg", root="/")
    cgroups = CgroupFS(str(fixture.proc))
    assert cgroups.usage(TRAINER, {"": "/a"}) == VERSION_2
    (tmp_path / "cg/a").rename(tmp_path / "cg/b")
    assert cgroups.usage(TRAINER, {"": "/a"}) is None
    assert cgroups.usage(TRAINER, {"": "/b"}) == VERSION_2


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/a/b", "/", "a/b"),
        ("/a/b", "/a", "b"),
        ("/a", "/a", ""),
        ("/ab", "/a", None),
        ("/../x", "/", None),
        ("/../x/y", "/../x", "y"),
        ("/../x/../y", "/../x", None),
    ],
)
def test_a_mount_holds_what_is_below_its_root(path: str, root: str, expected: str | None) -> None:
    assert below(path, root) == expected


def test_a_pods_group_is_the_one_that_names_its_uid() -> None:
    uid = "0a-1b"
    systemd = "/kubepods.slice/kubepods-burstable-pod0a_1b.slice"
    assert pod_path(f"{systemd}/cri-containerd-ff.scope", uid) == systemd
    assert pod_path("/kubepods/pod0a-1b/ff", uid) == "/kubepods/pod0a-1b"
    assert pod_path("/kubepods/pod99/ff", uid) is None
    assert pod_path("/kubepods/pod/ff", "") is None


def test_a_containers_short_name() -> None:
    digits = "0123456789abcdef" * 4
    assert short_name(f"/kubepods.slice/cri-containerd-{digits}.scope") == "0123456789ab"
    assert short_name(f"/kubepods/pod7/{digits}") == "0123456789ab"
    assert short_name("/lab/trainer") == "trainer"
    assert short_name("/") == "/"


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    made = real_groups()
    if not made:
        pytest.skip("no control group can be made here")
    yield made
    remove(made)


def remove(groups: list[Path]) -> None:
    """Removes control groups once their killed processes are gone."""
    deadline = time.monotonic() + 10
    for folder in groups:
        while True:
            try:
                folder.rmdir()
                break
            except OSError:
                # Busy: a killed process leaves its group a moment after its list shows it gone.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@pytest.fixture
def pair() -> Iterator[list[Path]]:
    """Two groups of version 2, side by side."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            point = Path(line.split()[4])
            made = [point / f"kitty-test-{os.getpid()}-{name}" for name in ("agent", "trainer")]
            for folder in made:
                folder.mkdir()
            yield made
            remove(made)
            return
    pytest.skip("no control groups of version 2 are mounted here")


@pytest.mark.root
def test_a_real_container(groups: list[Path], sandbox: Sandbox) -> None:
    """The machine's own control groups: memory of version 1, and version 2 where it is there."""
    join = "; ".join(f"echo $$ > {folder}/cgroup.procs" for folder in groups)
    script = f"{join}; exec /usr/bin/python3 -c 'x = bytearray(20 << 20); input()'"
    sandbox.start("sh", "-c", script, env={"KITTY_WATCH": "1", "RANK": "5"})
    sandbox.sidecar()
    current = "kitty_cgroup_memory_current_bytes"
    sandbox.until(
        lambda: any(value > 20 << 20 for value in sandbox.scrape().values(current, rank="5"))
    )
    page = sandbox.scrape()
    assert page.values("kitty_cgroup_memory_max_bytes") == [64 << 20]
    assert 0 < page.value("kitty_memory_headroom_ratio") < 0.7
    assert page.value("kitty_cgroup_memory_events_total", event="oom_kill") == 0
    assert page.label("kitty_cgroup_memory_max_bytes", "container") == [groups[0].name]


@pytest.mark.root
def test_private_cgroup_namespaces_of_the_kernel(pair: list[Path], sandbox: Sandbox) -> None:
    """Agent and trainer each see only their own group, as containers of a runtime do."""

    def boxed(folder: Path, command: str) -> list[str]:
        mounts = "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup"
        mounts = f"mount --make-rprivate /sys/fs/cgroup && {mounts}"
        unshare = "unshare --cgroup --mount --propagation unchanged"
        join = f"echo $$ > {folder}/cgroup.procs"
        return ["sh", "-c", f"{join}; exec {unshare} sh -c '{mounts} && exec {command}'"]

    sandbox.start(*boxed(pair[1], "sleep 60"), env={"KITTY_WATCH": "1", "RANK": "2"})
    sandbox.start(
        *boxed(pair[0], f"{sys.executable} -m sidecar"),
        env={"PYTHONPATH": str(ROOT)},
        cwd=str(ROOT),
    )
    sandbox.until(lambda: sandbox.get("/healthz")[0] == 200)
    sandbox.until(lambda: sandbox.scrape().values("kitty_cgroup_pressure_seconds_total"))
    page = sandbox.scrape()
    used = int((pair[1] / "cpu.stat").read_text().split()[1])
    assert page.label("kitty_cgroup_cpu_usage_seconds_total", "rank") == ["2"]
    assert page.value("kitty_cgroup_cpu_usage_seconds_total") <= used / 1e6


def real_groups() -> list[Path]:
    """Makes a control group with a memory limit of 64 MiB, and one of version 2 for pressure."""
    name = f"kitty-test-{os.getpid()}"
    made: list[Path] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point, kind = line.split()[4], line.split(" - ")[1].split()
        controllers = kind[2].split(",")
        folder = Path(point, name)
        try:
            if kind[0] == "cgroup" and "memory" in controllers:
                folder.mkdir()
                (folder / "memory.limit_in_bytes").write_text(str(64 << 20))
                made.insert(0, folder)
            elif kind[0] == "cgroup2":
                folder.mkdir()
                made.append(folder)
                if (folder / "memory.max").exists():
                    (folder / "memory.max").write_text(str(64 << 20))
        except OSError:
            continue
    if any((folder / "memory.limit_in_bytes").exists() for folder in made) or any(
        (folder / "memory.max").exists() for folder in made
    ):
        return made
    for folder in made:
        folder.rmdir()
    return []


def test_a_working_set_is_never_negative_nor_is_headroom(fixture: Fixture, tmp_path: Path) -> None:
    """The files are read one after the other, and the limit may be lowered below the use."""
    group(tmp_path / "cg/c1", CGROUP_2 | {"memory.stat": "inactive_file 900000\n"})
    group(tmp_path / "cg/c2", CGROUP_2 | {"memory.max": "1000\n"})
    fixture.mount("self", tmp_path / "cg", root="/")
    first, second = usage(fixture, "0::/c1\n"), usage(fixture, "0::/c2\n")
    assert first is not None
    assert second is not None
    assert (first.working_set, second.headroom) == (0, 0.0)


def test_a_pipe_in_the_place_of_a_file_is_left_alone(fixture: Fixture, tmp_path: Path) -> None:
    folder = group(tmp_path / "cg/c1", {k: v for k, v in CGROUP_2.items() if k != "memory.current"})
    os.mkfifo(folder / "memory.current")
    pipe = os.open(folder / "memory.current", os.O_RDWR | os.O_NONBLOCK)
    os.write(pipe, b"5\n")
    fixture.mount("self", tmp_path / "cg", root="/")
    found = usage(fixture, "0::/c1\n")
    assert found is not None
    assert found.memory is None
    assert os.read(pipe, 9) == b"5\n"
    os.close(pipe)


def test_containers_beyond_the_bound_are_counted(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path / "machine")
    group(tmp_path / "cg", {f"c{n}/{k}": v for n in range(10) for k, v in CGROUP_2.items()})
    fixture.mount("self", tmp_path / "cg", root="/")
    for n in range(10):
        fixture.process(100 + n, environ={"KITTY_WATCH": "1"}, cgroup=f"0::/c{n}\n")
    procfs = ProcFS(str(fixture.proc))
    pod = Pod(procfs, ProcessTable(procfs, own_pid=2), Config())
    pod.refresh()
    collector = CgroupCollector(pod, CgroupFS(str(fixture.proc)))
    collector.sample()
    (used,) = [f for f in collector.collect() if f.name == "kitty_cgroup_cpu_usage_seconds"]
    assert (len(used.samples), collector.left_out) == (8, 2 * 10)
