"""What could outlive a lab that was killed: its cgroups and its run directory.

Both carry their owner in their name, so the next lab can tell whose owner is gone. All else a
lab makes (namespaces, links, queues, rules, processes) ends with its processes.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PREFIX = "kitty-lab-"
VAR_TMP = Path("/var/tmp")  # noqa: S108 -- names in it are ours by pid and start time


def start_time(pid: int, *, proc: Path = Path("/proc")) -> int | None:
    """Return when a process started, in clock ticks since boot; None when there is none.

    Field 22 of ``/proc/<pid>/stat``; the second field may hold spaces and parentheses.
    """
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


def owned_name() -> str:
    """Return the name for what this process makes: ``kitty-lab-<pid>-<start time>``."""
    pid = os.getpid()
    return f"{PREFIX}{pid}-{start_time(pid)}"


def owner_is_gone(name: str) -> bool:
    """Whether the process that a name stands for has ended; False for a name of another kind."""
    pid, _, started = name.removeprefix(PREFIX).partition("-")
    if not name.startswith(PREFIX) or not pid.isdecimal() or not started.isdecimal():
        return False
    return start_time(int(pid)) != int(started)


def temporary_directory() -> Path:
    """Return the directory for temporary files, one on a disk unless ``TMPDIR`` says which.

    Where /tmp is in memory, as on Debian 13, nothing in it ever waits for storage.
    """
    usual = Path(tempfile.gettempdir())
    if "TMPDIR" in os.environ or on_disk(usual) or not on_disk(VAR_TMP):
        return usual
    return VAR_TMP


def on_disk(directory: Path, *, blocks: Path = Path("/sys/dev/block")) -> bool:
    """Whether a directory's files are on a block device."""
    try:
        device = directory.stat().st_dev
    except OSError:
        return False
    return (blocks / f"{os.major(device)}:{os.minor(device)}").exists()


def run_directory() -> Path:
    """Return where this process keeps certificates and logs while it runs."""
    return temporary_directory() / owned_name()


def remove_cgroup(path: Path, *, patience_s: float = 5.0) -> bool:
    """Remove a cgroup and all below it, ending what still runs in them.

    Returns:
        False when a process stayed longer than ``patience_s``.
    """
    deadline = time.monotonic() + patience_s
    while path.is_dir():
        for directory, _, _ in os.walk(path, topdown=False):
            kill_members(Path(directory))
            with suppress(OSError):
                os.rmdir(directory)
        if not path.is_dir():
            break
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)  # the kernel empties a cgroup a moment after its last process
    return True


def kill_members(cgroup: Path) -> None:
    """Send SIGKILL to the processes of one cgroup, those of other PID namespaces excepted."""
    with suppress(OSError):
        for word in (cgroup / "cgroup.procs").read_text().split():
            if int(word) > 0:  # 0 stands for a process that cannot be seen from here
                with suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)


def sweep(cgroup_mounts: Iterable[Path]) -> list[str]:
    """Remove what dead labs left behind.

    Args:
        cgroup_mounts: Roots of the cgroup hierarchies that a lab uses.

    Returns:
        The names of the dead owners, sorted.
    """
    swept = set()
    for mount in cgroup_mounts:
        for path in mount.glob(PREFIX + "*"):
            if owner_is_gone(path.name) and remove_cgroup(path):
                swept.add(path.name)
    for path in temporary_directory().glob(PREFIX + "*"):
        if owner_is_gone(path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            swept.add(path.name)
    return sorted(swept)
