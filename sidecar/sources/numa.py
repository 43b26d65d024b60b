"""Where memory lies and which CPUs may use it: NUMA nodes, numa_maps, allowed CPUs.

Formats: proc(5), Documentation/admin-guide/mm/numaperf.rst, cpuset(7) for lists of CPUs.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from sidecar.sources.errors import MalformedError
from sidecar.sources.files import read

if TYPE_CHECKING:
    from collections.abc import Mapping

CPUS = 8192
"""Largest number of CPUs that a kernel can be built for."""
_RANGE = re.compile(rb"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_PAGES = re.compile(rb" N([0-9]{1,4})=([0-9]{1,20})\b")
_PAGE_SIZE = re.compile(rb" kernelpagesize_kB=([0-9]{1,20})\b")


def parse_cpu_list(data: bytes) -> frozenset[int]:
    """Parses a list of CPUs or nodes.

    Sample: `0-3,8,10-11`; nothing at all is the empty set.

    Raises:
        MalformedError: not such a list.
    """
    found: set[int] = set()
    for part in filter(None, data.strip().split(b",")):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise MalformedError(f"list of CPUs: {data[:80]!r}")
        last = int(match[2] or match[1])
        found.update(range(int(match[1]), min(last, CPUS) + 1))
    return frozenset(found)


def parse_allowed_cpus(status: bytes) -> frozenset[int] | None:
    """Returns the CPUs that /proc/<pid>/status allows, None where it does not say.

    Raises:
        MalformedError: the row holds no list.
    """
    at = status.find(b"\nCpus_allowed_list:")
    if at < 0:
        return None
    return parse_cpu_list(status[at + 19 :].split(b"\n", 1)[0])


def parse_numa_maps(data: bytes) -> dict[int, int]:
    """Adds up the bytes on each node.

    Sample: `7f20 default anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4`, one line a mapping. Lines
    of another form count nothing.
    """
    found: dict[int, int] = {}
    for line in data.splitlines():
        size = _PAGE_SIZE.search(line)
        if size:
            for node, pages in _PAGES.findall(line):
                found[int(node)] = found.get(int(node), 0) + int(pages) * int(size[1]) * 1024
    return found


def misplaced(
    memory: Mapping[int, int],
    allowed: frozenset[int],
    nodes: Mapping[int, frozenset[int]],
) -> float | None:
    """Returns the share of memory on nodes none of whose CPUs the process may use, 0 to 1.

    Args:
        memory: bytes by node.
        allowed: CPUs that the process may use.
        nodes: CPUs by node; a node without CPUs (memory expansion) is as near to all.
    """
    size = sum(memory.values())
    if not size:
        return None
    far = {node for node, cpus in nodes.items() if cpus and not cpus & allowed}
    return sum(n for node, n in memory.items() if node in far) / size


def nodes(sys: str = "/sys") -> dict[int, frozenset[int]]:
    """Returns the CPUs of each NUMA node, empty where the kernel knows no nodes.

    Raises:
        MalformedError: a node's list of CPUs is none.
    """
    folder = f"{sys}/devices/system/node"
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    return {
        int(name[4:]): parse_cpu_list(read(f"{folder}/{name}/cpulist"))
        for name in names
        if re.fullmatch(r"node[0-9]{1,4}", name)
    }
