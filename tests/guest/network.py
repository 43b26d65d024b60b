"""Pairs of network namespaces joined by a veth, and processes in them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ADDRESS, PEER, PORT = "10.77.0.1", "10.77.0.2", 7000


def call(*command: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(command, check=True)


def enter(namespace: str) -> None:
    """Moves the calling thread into a network namespace (os.setns came with Python 3.12)."""
    with open(f"/run/netns/{namespace}", encoding="ascii") as file:
        if ctypes.CDLL(None).setns(file.fileno(), 0):
            raise OSError(f"setns {namespace}")


class Pair:
    """Two namespaces, `<name>` with ADDRESS and `<name>-peer` with PEER, where traffic runs."""

    def __init__(self, name: str) -> None:
        self.name, self.peer = name, f"{name}-peer"
        self.processes: list[subprocess.Popen[bytes]] = []
        for namespace in (self.name, self.peer):
            call("ip", "netns", "add", namespace)
            call("ip", "-n", namespace, "link", "set", "lo", "up")
        call(
            "ip",
            "-n",
            name,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.peer,
        )  # one command
        for namespace, address in ((self.name, ADDRESS), (self.peer, PEER)):
            call("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            call("ip", "-n", namespace, "link", "set", "eth0", "up")
        self.start(self.peer, [sys.executable, f"{HERE}/traffic.py", "serve", PEER, str(PORT)])
        time.sleep(1)

    def start(
        self, namespace: str, command: list[str], **environment: str
    ) -> subprocess.Popen[bytes]:
        """Starts a process in a namespace."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            env={"PATH": os.environ["PATH"], **environment},
        )
        self.processes.append(process)
        return process

    def ping(self) -> list[str]:
        """The command of the asking side."""
        return [sys.executable, f"{HERE}/traffic.py", "ping", PEER, str(PORT)]

    def shape(self, *netem: str) -> float:
        """Sets what the near side's link does to packets, by default nothing; gives when.

        The queue is changed, never removed: its packets would be lost.
        """
        words = netem or ("delay", "0ms")
        call("tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", "root", "netem", *words)
        return time.monotonic()
