"""Builds a /proc and a /sys out of plain files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DEVICE_ERROR = object()
"""As a file's content: reading it fails, as a driver's counter does with EIO."""


def write(path: Path, content: object) -> None:
    """Writes a file with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is DEVICE_ERROR:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(str(content))


class Fixture:
    """A /proc and a /sys below one folder.

    Attributes:
        proc: the /proc.
        sys: the /sys.
    """

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.sys = folder / "sys"
        self.proc.mkdir(parents=True)
        self.sys.mkdir()
        self.machine()
        self.process(1, comm="pause", environ={})

    def machine(self) -> None:
        """Writes the files of the machine and of the agent's own view."""
        write(self.proc / "stat", "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 100 0 50 800 50 0 0\n")
        write(self.proc / "meminfo", "MemTotal: 1024 kB\nMemAvailable:  512 kB\n")
        write(self.proc / "sys/kernel/task_delayacct", "1\n")
        write(self.proc / "self/net/dev", NET_DEV)
        write(self.proc / "self/ns/net", "")
        write(self.proc / "self/cgroup", "0::/kubepods.slice/kitty\n")

    def process(
        self,
        pid: int,
        *,
        ppid: int = 0,
        comm: str = "python",
        state: str = "S",
        environ: Mapping[str, str] | bytes = {},
        start: int | None = None,
        ticks: tuple[int, int, int, int] = (0, 0, 0, 0),
        faults: tuple[int, int, int, int] = (100, 0, 0, 0),
        rss: int = 10,
        io: tuple[int, int, int] = (0, 0, 0),
        delays: Mapping[int, tuple[int, int]] | None = None,
        cgroup: str = "0::/kubepods.slice/trainer\n",
        pss: int = 20,
    ) -> Path:
        """Writes one process.

        Args:
            pid: its id.
            ppid: its parent's.
            comm: its name.
            state: its letter.
            environ: variables, or the raw file.
            start: start time in ticks, the pid by default.
            ticks: user, system, children's user, children's system.
            faults: minor, children's minor, major, children's major.
            rss: pages.
            io: rchar, read_bytes, write_bytes.
            delays: by thread, nanoseconds in the run queue and ticks for block devices.
            cgroup: the file.
            pss: kB.
        """
        folder = self.proc / str(pid)
        delays = {pid: (0, 0)} if delays is None else delays
        start = pid if start is None else start

        def line(tid: int, block: int) -> str:
            fields = [0] * 50
            fields[0] = ppid
            fields[6:10] = [faults[0], faults[1], faults[2], faults[3]]
            fields[10:14] = ticks
            fields[16] = len(delays)
            fields[18] = start
            fields[20] = rss
            fields[38] = block
            fields[44], fields[46] = 4096, 8192
            return f"{tid} ({comm}) {state} {' '.join(map(str, fields))}\n"

        write(folder / "stat", line(pid, 0))
        for tid, (waited, block) in delays.items():
            write(folder / f"task/{tid}/schedstat", f"1000 {waited} 5\n")
            write(folder / f"task/{tid}/stat", line(tid, block))
        write(
            folder / "status",
            f"Name:\t{comm}\nVmRSS:\t{rss * 4} kB\nCpus_allowed_list:\t0-3\n"
            "voluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t3\n",
        )
        write(
            folder / "io",
            f"rchar: {io[0]}\nwchar: 0\nsyscr: 0\nsyscw: 0\n"
            f"read_bytes: {io[1]}\nwrite_bytes: {io[2]}\ncancelled_write_bytes: 0\n",
        )
        if not isinstance(environ, bytes):
            environ = b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
        write(folder / "environ", environ)
        write(folder / "cgroup", cgroup)
        write(folder / "smaps_rollup", f"0-1 ---p 0 00:00 0 [rollup]\nRss: 40 kB\nPss: {pss} kB\n")
        write(folder / "net/snmp", SNMP)
        (folder / "fd").mkdir(exist_ok=True)
        if not (folder / "ns/net").exists():
            (folder / "ns").mkdir()
            # One network namespace: what tells is the number of the file.
            (folder / "ns/net").hardlink_to(self.proc / "self/ns/net")
        return folder

    def descriptor(self, pid: int, number: int, target: str) -> None:
        """Gives a process an open file."""
        (self.proc / str(pid) / "fd" / str(number)).symlink_to(target)

    def mount(
        self,
        viewer: int | str,
        folder: Path,
        *,
        root: str,
        controllers: str = "",
        point: str | None = None,
        mount_id: int | None = None,
    ) -> None:
        """Shows a folder as a mounted cgroup hierarchy in a process's view.

        Args:
            viewer: pid or "self".
            folder: what is mounted.
            root: the group at its top, as the agent sees it.
            controllers: of version 1; version 2 without any.
            point: where the process sees it, the folder itself by default.
            mount_id: the number claimed for the mount, the folder's own by default.
        """
        kind = f"cgroup cgroup rw,{controllers}" if controllers else "cgroup2 cgroup2 rw"
        number = mount_id_of(folder) if mount_id is None else mount_id
        path = self.proc / str(viewer) / "mountinfo"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{number} 1 0:9 {root} {point or folder} rw - {kind}\n")


def mount_id_of(folder: Path) -> int:
    """Returns the number of the mount that a folder is on."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        return int(text.split("mnt_id:")[1].split()[0])
    finally:
        os.close(descriptor)


NET_DEV = """\
Inter-|   Receive                                              |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo
    lo:  900       9    0    0    0     0          0         0   900       9    0    0 0 0 0 0
  eth0: 1000      10    1    2    0     0          0         0  2000      20    3    4 0 0 0 0
  net1: 5000000 5000    0    0    0     0          0         0  6000000 6000    0    0 0 0 0 0
"""
SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm ActiveOpens PassiveOpens RetransSegs OutSegs
Tcp: 1 11 12 42 4000
"""
CGROUP_2 = {
    "cgroup.events": "populated 1\nfrozen 0\n",
    "cpu.max": "200000 100000\n",
    "cpu.stat": "usage_usec 5000000\nuser_usec 4000000\nsystem_usec 1000000\nnr_periods 100\n"
    "nr_throttled 25\nthrottled_usec 1500000\n",
    "memory.current": "800000\n",
    "memory.max": "1000000\n",
    "memory.peak": "900000\n",
    "memory.stat": "anon 500000\nfile 300000\ninactive_file 200000\n",
    "memory.events": "low 0\nhigh 3\nmax 2\noom 1\noom_kill 1\noom_group_kill 0\n",
    "cpu.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=500000\n",
    "memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=500\n",
    "io.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=7000000\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=6000000\n",
}
CGROUP_1 = {
    "cpu": {
        "cpu.cfs_quota_us": "150000\n",
        "cpu.cfs_period_us": "100000\n",
        "cpu.stat": "nr_periods 40\nnr_throttled 10\nthrottled_time 2000000000\n",
    },
    "cpuacct": {"cpuacct.usage": "3000000000\n"},
    "memory": {
        "memory.usage_in_bytes": "600000\n",
        "memory.limit_in_bytes": "1000000\n",
        "memory.max_usage_in_bytes": "700000\n",
        "memory.failcnt": "4\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "memory.stat": "cache 5\ntotal_inactive_file 100000\n",
    },
}


def group(folder: Path, files: Mapping[str, object]) -> Path:
    """Writes a control group's files."""
    for name, content in files.items():
        write(folder / name, content)
    return folder
