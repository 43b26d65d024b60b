"""Cgroups of either version are found, and a container's limits reach the kernel."""

from pathlib import Path

import pytest

from lab.cgroups import Cgroup, Hierarchy, hierarchies
from lab.leftovers import owned_name


def mounts(tmp_path: Path, *rows: tuple[str, str, str]) -> Path:
    """A mountinfo with cgroup mounts below tmp_path: directory, type, super options."""
    lines = ["22 1 0:20 / / rw - ext4 /dev/vda rw"]
    for number, (name, kind, options) in enumerate(rows):
        (tmp_path / name).mkdir(exist_ok=True)
        where = f"{30 + number} 22 0:{40 + number} / {tmp_path / name}"
        lines.append(f"{where} rw shared:9 - {kind} cg {options}")
    path = tmp_path / "mountinfo"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_version_1_has_one_tree_for_each_controller(tmp_path: Path) -> None:
    info = mounts(
        tmp_path,
        ("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
        ("memory", "cgroup", "rw,memory"),
        ("blkio", "cgroup", "rw,blkio"),
        ("devices", "cgroup", "rw,devices"),
        ("unified", "cgroup2", "rw"),
    )
    assert hierarchies(info) == (
        Hierarchy(tmp_path / "cpu,cpuacct", 1, frozenset({"cpu", "cpuacct"})),
        Hierarchy(tmp_path / "memory", 1, frozenset({"memory"})),
        Hierarchy(tmp_path / "blkio", 1, frozenset({"blkio"})),
        Hierarchy(tmp_path / "unified", 2, frozenset()),
    )


def test_version_2_offers_what_its_root_passes_on(tmp_path: Path) -> None:
    info = mounts(tmp_path, ("cgroup", "cgroup2", "rw"))
    (tmp_path / "cgroup" / "cgroup.subtree_control").write_text("cpuset cpu io memory pids\n")
    assert hierarchies(info) == (
        Hierarchy(tmp_path / "cgroup", 2, frozenset({"cpu", "memory", "io"})),
    )


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert hierarchies(mounts(tmp_path)) == ()
    nothing = Cgroup(hierarchies(mounts(tmp_path)), "lab").child("pod")
    nothing.limit_cpu(1)
    assert nothing.entrances() == []
    nothing.remove()


def test_version_2_files(tmp_path: Path) -> None:
    tree = Hierarchy(tmp_path, 2, frozenset({"cpu", "memory", "io"}))
    pod = Cgroup([tree], "lab").child("pod")
    directory = tmp_path / "lab" / "pod"
    assert (tmp_path / "lab" / "cgroup.subtree_control").read_text() == "+cpu +io +memory"
    assert pod.has("cpu")
    assert pod.has("blkio")
    pod.limit_cpu(0.5)
    pod.limit_memory(1 << 20)
    pod.limit_reads("8:0", 1000)
    assert (directory / "cpu.max").read_text() == "50000 100000"
    assert (directory / "memory.max").read_text() == "1048576"
    assert (directory / "io.max").read_text() == "8:0 rbps=1000"
    pod.limit_cpu(None)
    pod.limit_reads("8:0", None)
    assert (directory / "cpu.max").read_text() == "max 100000"
    assert (directory / "io.max").read_text() == "8:0 rbps=max"


def test_limits_reach_the_kernel(root: None) -> None:
    trees = [tree for tree in hierarchies() if "cpu" in tree.controllers]
    if not trees:
        pytest.skip("no hierarchy with the cpu controller is writable here")
    made = Cgroup(trees, owned_name())
    try:
        made.limit_cpu(0.25)
        directory = made.directories()[0]
        if trees[0].version == 1:
            assert (directory / "cpu.cfs_quota_us").read_text().strip() == "25000"
        else:
            assert (directory / "cpu.max").read_text().strip() == "25000 100000"
    finally:
        made.remove()
