"""Every parser over its kernel file: what it reads, and truncated and alien text.

A parser returns a value or raises the named error; nothing else may come out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.sources import cgroup, cgroup_mounts, maps, netdev, numa, procfs, snmp, system
from sidecar.sources.addresses import parse_address
from sidecar.sources.errors import MalformedError
from sidecar.sources.files import read
from tests.sidecar import fixture

STAT = (
    b"4021 (pt main) (1)\n) D 17 4021 4021 0 -1 4194560 500 60 7 8 90 10 11 12 20 0 31 0 "
    b"5123 1000000 250 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 1 "
    b"0 0 33 0 0 0 0 0 77 78 79 80 0\n"
)
STATUS = (
    b"Name:\tpython\nVmRSS:\t    120 kB\nCpus_allowed_list:\t0-3,8\n"
    b"voluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n"
)
IO = b"rchar: 5\nwchar: 6\nsyscr: 1\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 8192\n"
NUMA_MAPS = (
    b"7f20 default anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4\n"
    b"7f30 bind:1 file=/dev/N0=9\\040x mapped=1 N1=1 kernelpagesize_kB=2048\n"
    b"7f40 default\n"
)
MOUNTINFO = (
    b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    b"35 31 0:32 /kubepods/c1 /sys/fs/cgroup/mem\\040ory ro shared:9 - cgroup cgroup rw,memory\n"
    b"38 31 0:38 /../x /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
)
PRESSURE = b"some avg10=0.00 avg60=0.26 avg300=0.14 total=4826228\nfull avg10=0.00 total=7\n"

PARSERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "stat": (procfs.parse_stat, STAT),
    "status": (procfs.parse_status, STATUS),
    "io": (procfs.parse_io, IO),
    "schedstat": (procfs.parse_run_queue_delay, b"15300123 2200 17\n"),
    "environ": (lambda data: procfs.parse_environ(data, (b"RANK", b"JOB_NAME")), b"RANK=1\0A=2\0"),
    "cgroup": (procfs.parse_cgroup, b"4:cpu,cpuacct:/kubepods/c1\n0::/x\n"),
    "snmp": (snmp.parse_snmp, fixture.SNMP.encode()),
    "stat of the machine": (system.parse_cpu_times, b"cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1\n"),
    "meminfo": (system.parse_available_memory, b"MemTotal: 5 kB\nMemAvailable:  512 kB\n"),
    "smaps_rollup": (maps.parse_proportional, b"0-1 [rollup]\nRss: 9 kB\nPss:   199 kB\n"),
    "list of CPUs": (numa.parse_cpu_list, b"0-3,8,10-11\n"),
    "allowed CPUs": (numa.parse_allowed_cpus, STATUS),
    "numa_maps": (numa.parse_numa_maps, NUMA_MAPS),
    "net/dev": (netdev.parse_devices, fixture.NET_DEV.encode()),
    "mountinfo": (cgroup_mounts.parse_mounts, MOUNTINFO),
    "cpu.max": (cgroup.parse_cpu_max, b"150000 100000\n"),
    "limit": (cgroup.parse_limit, b"9223372036854771712\n"),
    "number": (cgroup.parse_number, b"4096\n"),
    "rows": (cgroup.parse_rows, b"nr_throttled 12\nmalformed\nother x\n"),
    "pressure": (cgroup.parse_pressure, PRESSURE),
    "RTM_NEWADDR": (
        lambda data: list(parse_address(data)),
        bytes([2, 24, 0x80, 0, 3, 0, 0, 0, 8, 0, 1, 0, 10, 0, 0, 9, 8, 0, 2, 0, 10, 0, 0, 1]),
    ),
}


EXPECTED: dict[str, object] = {
    "stat": procfs.Stat(
        pid=4021,
        comm="pt main) (1)\n",
        state="D",
        ppid=17,
        minor_faults=500,
        child_minor_faults=60,
        major_faults=7,
        child_major_faults=8,
        user_ticks=90,
        system_ticks=10,
        child_ticks=23,
        threads=31,
        start_ticks=5123,
        rss_pages=250,
        block_delay_ticks=33,
        image=(77, 79),
    ),
    "status": procfs.Status(rss=120 * 1024, voluntary_switches=12, involuntary_switches=3),
    "io": procfs.Io(rchar=5, read_bytes=4096, write_bytes=8192),
    "schedstat": 2200,
    "environ": {"RANK": "1"},
    "cgroup": {"cpu": "/kubepods/c1", "cpuacct": "/kubepods/c1", "": "/x"},
    "snmp": snmp.TcpTotals(
        out_segments=4000, retransmitted_segments=42, active_opens=11, passive_opens=12
    ),
    "stat of the machine": system.CpuTimes(idle=9, total=36),
    "meminfo": 512 * 1024,
    "smaps_rollup": 199 * 1024,
    "list of CPUs": {0, 1, 2, 3, 8, 10, 11},
    "allowed CPUs": {0, 1, 2, 3, 8},
    "numa_maps": {0: 4096, 1: 2 * 4096 + (2 << 20)},
    "net/dev": {
        "lo": netdev.DeviceTotals(900, 9, 0, 0, 900, 9, 0, 0),
        "eth0": netdev.DeviceTotals(1000, 10, 1, 2, 2000, 20, 3, 4),
        "net1": netdev.DeviceTotals(5000000, 5000, 0, 0, 6000000, 6000, 0, 0),
    },
    "mountinfo": [
        cgroup_mounts.Mount(
            35, "/kubepods/c1", "/sys/fs/cgroup/mem ory", frozenset({"memory", "rw"})
        ),
        cgroup_mounts.Mount(38, "/../x", "/sys/fs/cgroup", frozenset({""})),
    ],
    "cpu.max": 1.5,
    "limit": None,
    "number": 4096,
    "rows": {"nr_throttled": 12},
    "pressure": {"some": 4.826228, "full": 7e-06},
    "RTM_NEWADDR": [("10.0.0.1", 3)],
}


def check(name: str, data: bytes) -> None:
    parse, _ = PARSERS[name]
    with suppress(MalformedError):
        parse(data)


@pytest.mark.parametrize("name", PARSERS)
def test_the_sample_is_understood(name: str) -> None:
    parse, sample = PARSERS[name]
    assert parse(sample) == EXPECTED[name]


@given(st.sampled_from(sorted(PARSERS)), st.binary(max_size=300))
def test_any_bytes(name: str, data: bytes) -> None:
    check(name, data)


@given(st.sampled_from(sorted(PARSERS)), st.data())
def test_truncated_samples_with_alien_parts(name: str, data: st.DataObject) -> None:
    sample = PARSERS[name][1]
    cut = data.draw(st.integers(0, len(sample)))
    end = data.draw(st.integers(cut, len(sample)))
    alien = data.draw(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"-1", b"1e5", b"\xb2", b"9" * 5000, b"max", b"\n", b" ", b"\0"]),
        )
    )
    check(name, sample[:cut] + alien + sample[end:])


@given(st.binary(max_size=40), st.sampled_from("RSDTZtXIPKW"))
@example(b"a) R 1 (b", "S")
@example(b"tab\tnew\nline)", "D")
def test_a_name_never_hides_what_follows_it(name: bytes, state: str) -> None:
    stat = procfs.parse_stat(b"7 (" + name + b") " + state.encode() + b" 5" + b" 1" * 48)
    assert (stat.pid, stat.state, stat.ppid) == (7, state, 5)


@given(st.lists(st.binary(max_size=60).filter(lambda part: b"\0" not in part), max_size=8))
def test_only_a_whole_variable_counts(variables: list[bytes]) -> None:
    found = procfs.parse_environ(b"\0".join(variables), (b"KITTY_WATCH",))
    whole = [v[12:] for v in variables if v.startswith(b"KITTY_WATCH=")]
    try:
        expected = {"KITTY_WATCH": whole[0].decode()} if whole else {}
    except UnicodeDecodeError:
        expected = {}
    assert found == expected


def test_an_environment_of_megabytes() -> None:
    data = b"PADDING=" + b"x" * (4 << 20) + b"\0RANK=7\0"
    assert procfs.parse_environ(data, (b"RANK",)) == {"RANK": "7"}


@pytest.mark.parametrize(
    ("parse", "data"),
    [
        (procfs.parse_stat, b""),
        (procfs.parse_stat, b"1 (a) S 2"),
        (procfs.parse_io, b"rchar: 5\n"),
        (procfs.parse_run_queue_delay, b"1 2"),
        (snmp.parse_snmp, b"Tcp: OutSegs\n"),
        (system.parse_cpu_times, b"intr 5"),
        (cgroup.parse_cpu_max, b"5 0"),
        (cgroup.parse_limit, b"none"),
        (numa.parse_cpu_list, b"0-x"),
        (maps.parse_proportional, b"Pss: kB"),
    ],
)
def test_a_malformed_known_part_is_named(parse: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(MalformedError):
        parse(data)


@pytest.mark.parametrize("text", [b"max\n", b"9223372036854771712\n", b"18446744073709551615"])
def test_no_limit_is_no_number(text: bytes) -> None:
    assert cgroup.parse_limit(text) is None


def test_no_quota_is_no_number() -> None:
    assert cgroup.parse_cpu_max(b"max 100000\n") is None


def test_run_queue_delay_that_is_not_kept() -> None:
    assert procfs.parse_run_queue_delay(b"0 0 0\n") is None


def test_memory_on_nodes_of_other_cpus_is_misplaced() -> None:
    nodes = {0: frozenset({0, 1}), 1: frozenset({2, 3}), 2: frozenset[int]()}
    memory = {0: 100, 1: 300, 2: 100}
    assert numa.misplaced(memory, frozenset({0}), nodes) == 0.6
    assert numa.misplaced(memory, frozenset({0, 2}), nodes) == 0
    assert numa.misplaced({}, frozenset({0}), nodes) is None


def test_a_file_of_many_records_is_read_to_its_end() -> None:
    """The kernel answers a page at a time, and shorter than asked for."""
    assert len(read("/proc/kallsyms", limit=50_000)) == 50_000
    mounts = Path("/proc/self/mountinfo")
    assert read(str(mounts)) == mounts.read_bytes()
