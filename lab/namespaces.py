"""Namespaces: the lab's own network, the sandbox of a pod, and processes started inside one.

Nothing is made in the host's network namespace. A sandbox lives as long as the lab holds the
other end of its standard input, so a lab that is killed takes its pods with it: the first process
reads end of file and leaves, and the kernel ends every other process of its PID namespace.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lab.cgroups import Cgroup
from lab.commands import ToolError, run

CLONE_NEWNET = 0x40000000  # include/uapi/linux/sched.h

# Enters the cgroups whose files are named before "--", then becomes the command after it.
ENTER_CGROUPS = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit; shift; done; shift; exec "$@"'

# The first process of a pod. Ignored SIGCHLD outlives exec: orphans are reaped by the kernel. Its
# own memory file system only where /dev/shm is a mount: else the mount could spread to the host.
SANDBOX = """
mount --make-rprivate / 2>/dev/null
hostname "$1" && ip link set lo up || exit
if mount --make-private /dev/shm 2>/dev/null; then mount -t tmpfs -o size=64m shm /dev/shm; fi
for name in cubic reno; do
  echo "$name" 2>/dev/null > /proc/sys/net/ipv4/tcp_congestion_control && break
done
echo ready
trap '' CHLD
exec cat
"""


@contextmanager
def private_network() -> Iterator[None]:
    """Move this thread (and what it starts) into an empty network namespace, and back at the end.

    Raises:
        OSError: The kernel refused; it needs CAP_SYS_ADMIN.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare and os.setns came with Python 3.12
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "no network namespace of our own")
        try:
            run("ip", "link", "set", "lo", "up")
            yield
        finally:
            libc.setns(before.fileno(), CLONE_NEWNET)


def in_cgroup(cgroup: Cgroup, argv: Sequence[str]) -> list[str]:
    """Return a command line that runs ``argv`` inside a cgroup from its first instruction on."""
    return ["sh", "-c", ENTER_CGROUPS, "sh", *cgroup.entrances(), "--", *argv]


def only_child(pid: int) -> int | None:
    """Return the pid of the child of a process that has at most one."""
    with suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(words[0]) if words else None
    return None


class Contained:
    """A process in a sandbox, as the lab sees it.

    Attributes:
        pid: Its pid in the lab's own PID namespace.
    """

    def __init__(self, door: subprocess.Popen[bytes]) -> None:
        self._door = door  # nsenter, which waits for the process and passes its exit status on
        self.pid = self._child(door)

    @staticmethod
    def _child(door: subprocess.Popen[bytes]) -> int:
        while door.poll() is None:
            if (pid := only_child(door.pid)) is not None:
                return pid
            time.sleep(0.002)
        return door.pid  # it ended at once; the number only serves messages

    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._door.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens once the process has ended."""
        if self._door.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            if number == signal.SIGCONT:  # nsenter stops itself along with its child
                self._door.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False when it still runs after ``timeout_s``."""
        try:
            self._door.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class Sandbox:
    """The namespaces of a pod: network, PID, mounts, host name, IPC.

    Args:
        hostname: The pod's name.
        env: Environment of the first process.
        cgroup: Where the first process goes.
    """

    def __init__(self, *, hostname: str, env: Mapping[str, str], cgroup: Cgroup) -> None:
        unshare = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--mount-proc"]
        unshare += ["--propagation", "unchanged", "--fork", "--kill-child=KILL"]
        self._holder = subprocess.Popen(
            in_cgroup(cgroup, [*unshare, "sh", "-c", SANDBOX, "sh", hostname]),
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the lab's to handle
        )
        assert self._holder.stdout is not None
        pid = only_child(self._holder.pid) if self._holder.stdout.readline() else None
        if pid is None:
            assert self._holder.stderr is not None
            reason = self._holder.stderr.read().decode(errors="replace").strip()
            self.close()
            raise ToolError(f"no sandbox for {hostname}: {reason}")
        self.pid = pid

    def inside(self, *argv: str) -> list[str]:
        """Return a command line that runs ``argv`` with the sandbox's view of everything."""
        return [
            *self._enter("--net", "--pid", "--mount", "--uts", "--ipc", "--root", "--wd"),
            *argv,
        ]

    def run_on_network(self, *argv: str, stdin: str = "") -> str:
        """Run one of the host's tools on the sandbox's network; its output."""
        return run(*self._enter("--net"), *argv, stdin=stdin)

    def _enter(self, *namespaces: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), *namespaces, "--"]

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cgroup: Cgroup,
        output: IO[bytes] | int = subprocess.DEVNULL,
    ) -> Contained:
        """Start a process inside, with mounts of its own; both outputs go to ``output``."""
        own_mounts = ["unshare", "--mount", "--propagation", "unchanged", "--"]
        door = subprocess.Popen(
            in_cgroup(cgroup, self.inside(*own_mounts, *argv)),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return Contained(door)

    def close(self) -> None:
        """End the first process, and by that every process inside."""
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()
        try:
            self._holder.wait(5)
        except subprocess.TimeoutExpired:
            self._holder.kill()  # --kill-child
            self._holder.wait()
