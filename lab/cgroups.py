"""Cgroups of pods and containers, under version 1, version 2 or both at once.

Version 1 mounts each controller at a place of its own, version 2 has one tree for all; hybrid
systems have version 1 controllers and an empty version 2 tree. Where none can be written, as in
a bare chroot, the lab goes on without.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lab.leftovers import remove_cgroup

CONTROLLERS = frozenset({"cpu", "cpuacct", "memory", "blkio", "io"})  # io is version 2's blkio
CPU_PERIOD_US = 100_000


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup tree.

    Attributes:
        mount: Where it is mounted.
        version: 1 or 2.
        controllers: Those of ``CONTROLLERS`` that it has.
    """

    mount: Path
    version: int
    controllers: frozenset[str]


def hierarchies(mountinfo: Path = Path("/proc/self/mountinfo")) -> tuple[Hierarchy, ...]:
    """Return the mounted trees that a lab uses and may write to.

    Reads ``/proc/self/mountinfo`` (Documentation/filesystems/proc.rst, section 3.5)::

        31 23 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
    """
    found = {}
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ")[:3]
        mount = Path(left.split(" ")[4])
        if kind == "cgroup":
            controllers = CONTROLLERS.intersection(options.split(","))
            version = 1
        elif kind == "cgroup2":
            controllers = frozenset()
            with suppress(OSError):
                enabled = (mount / "cgroup.subtree_control").read_text().split()
                controllers = CONTROLLERS.intersection(enabled)
            version = 2
        else:
            continue
        if (controllers or version == 2) and os.access(mount, os.W_OK):
            found[mount] = Hierarchy(mount, version, controllers)
    return tuple(found.values())


class Cgroup:
    """One node in every hierarchy: a lab's, a pod's or a container's.

    Args:
        trees: The hierarchies.
        path: Names from the root of each, the lab's own first.
    """

    def __init__(self, trees: Sequence[Hierarchy], *path: str) -> None:
        self._trees = trees
        self._path = path
        for tree in trees:
            directory = tree.mount.joinpath(*path)
            directory.mkdir(exist_ok=True)
            self._pass_controllers_on(tree, directory.parent)

    def _pass_controllers_on(self, tree: Hierarchy, parent: Path) -> None:
        # The root's own list is the host's business and stays as it is.
        if tree.version == 2 and len(self._path) > 1 and tree.controllers:
            words = " ".join(f"+{name}" for name in sorted(tree.controllers - {"cpuacct"}))
            with suppress(OSError):
                (parent / "cgroup.subtree_control").write_text(words)

    def child(self, name: str) -> "Cgroup":
        """Create a cgroup below this one."""
        return Cgroup(self._trees, *self._path, name)

    def directories(self) -> list[Path]:
        """Return this node's directory in each hierarchy."""
        return [tree.mount.joinpath(*self._path) for tree in self._trees]

    def entrances(self) -> list[str]:
        """Return the files into which a process writes 0 to enter."""
        return [str(directory / "cgroup.procs") for directory in self.directories()]

    def has(self, controller: str) -> bool:
        """Whether limits of a controller, by its name in version 1, take effect here."""
        return any(self._offers(tree, controller) for tree in self._trees)

    def limit_cpu(self, cores: float | None) -> None:
        """Bound processor time, None lifts it; no effect where the cpu controller is missing."""
        quota = None if cores is None else max(1000, int(cores * CPU_PERIOD_US))
        self._write(
            "cpu",
            ("cpu.cfs_quota_us", "-1" if quota is None else str(quota)),
            ("cpu.max", f"{quota or 'max'} {CPU_PERIOD_US}"),
        )

    def limit_memory(self, size: int) -> None:
        """Bound memory in bytes; no effect where the memory controller is missing."""
        self._write("memory", ("memory.limit_in_bytes", str(size)), ("memory.max", str(size)))

    def limit_reads(self, device: str, bytes_a_second: int | None) -> None:
        """Bound what is read from a block device (``major:minor``); None lifts it.

        It takes effect where the controller blkio (version 1) or io (version 2) is.
        """
        value = bytes_a_second or 0
        self._write(
            "blkio",
            ("blkio.throttle.read_bps_device", f"{device} {value}"),
            ("io.max", f"{device} rbps={value or 'max'}"),
        )

    @staticmethod
    def _offers(tree: Hierarchy, controller: str) -> bool:
        name = "io" if tree.version == 2 and controller == "blkio" else controller
        return name in tree.controllers

    def _write(self, controller: str, version1: tuple[str, str], version2: tuple[str, str]) -> None:
        for tree, directory in zip(self._trees, self.directories(), strict=True):
            if self._offers(tree, controller):
                name, value = version1 if tree.version == 1 else version2
                with suppress(FileNotFoundError):
                    (directory / name).write_text(value)

    def remove(self) -> None:
        """Remove this node and all below; what still runs in them is killed."""
        for directory in self.directories():
            remove_cgroup(directory)
