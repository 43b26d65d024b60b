"""Real processes and a network namespace of their own for the sidecar's tests."""

from __future__ import annotations

import ctypes
import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
PORT = 9100
T = TypeVar("T")


@dataclass
class Page:
    """One scrape: values by name and labels."""

    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    def values(self, name: str, **labels: str) -> list[float]:
        """Returns the values of a name's series that have these labels."""
        return [
            value for have, value in self.samples.get(name, []) if labels.items() <= have.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        """Returns the one value."""
        (value,) = self.values(name, **labels)
        return value

    def label(self, name: str, label: str) -> list[str]:
        """Returns one label's values over a name's series."""
        return [have[label] for have, _ in self.samples.get(name, [])]


def parse(text: str) -> Page:
    page = Page()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page.samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return page


def inside(pid: int, call: Callable[[], T]) -> T:
    """Runs a call in the network namespace of a process, in a thread of its own."""
    results: list[T] = []

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/proc/{pid}/ns/net").open() as namespace:
            if libc.setns(namespace.fileno(), 0x40000000) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        results.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = results
    return result


class Sandbox:
    """A PID and a network namespace with loopback only, and the processes started in it."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.holder = subprocess.Popen(
            [
                *("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
                # In a changed root / is no mount; unshare makes /proc private by itself then.
                *("--propagation", "unchanged", "--"),
                *("sh", "-c", "ip link set lo up && echo up && exec sleep 600"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "up\n"
        self.init = _child(self.holder.pid)
        self.enter = [
            *("nsenter", f"--target={self.init}", "--net", "--pid"),
            *("--mount", "--root", "--wd", "--"),
        ]

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Starts a command in the namespaces with only the given variables and PATH."""
        process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
            [*self.enter, *command],
            env={"PATH": os.environ["PATH"], **(env or {})},
            text=True,
            **{
                "stdin": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                **options,
            },
        )
        self.processes.append(process)
        return process

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Sends a signal to the command itself: nsenter waits above it."""
        os.kill(_child(process.pid), number)

    def python(self, script: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Starts a Python script text; what closes its stdin tells it to end."""
        return self.start("/usr/bin/python3", "-c", script, *arguments, env=env)

    def run(self, *command: str, stdin: str | None = None) -> str:
        """Runs a command in the namespace to its end."""
        return subprocess.run(
            [*self.enter, *command],
            check=True,
            capture_output=True,
            text=True,
            input=stdin,
        ).stdout

    def sidecar(
        self, *, port: int = PORT, stderr: int = subprocess.PIPE, **env: str
    ) -> subprocess.Popen[str]:
        """Starts the real agent and waits until it serves, on the given port."""
        process = self.start(
            *(sys.executable, "-m", "sidecar"),
            env={"PYTHONPATH": str(ROOT), **env},
            cwd=str(ROOT),
            stderr=stderr,
        )
        self.until(lambda: self.get("/healthz", port)[0] == 200)
        return process

    def get(self, path: str, port: int = PORT) -> tuple[int, str]:
        """Returns status and body of a request to the sidecar; status 0 where none answers."""

        def call() -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read().decode()
            except ConnectionRefusedError:
                return 0, ""
            finally:
                connection.close()

        return inside(self.init, call)

    def scrape(self) -> Page:
        """Returns the sidecar's /metrics."""
        status, text = self.get("/metrics")
        assert status == 200
        return parse(text)

    def until(self, condition: Callable[[], object], *, seconds: float = 20) -> None:
        """Waits for a condition."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.05)

    def close(self) -> None:
        for process in [self.holder, *self.processes]:
            process.kill()
        for process in [self.holder, *self.processes]:
            process.communicate()


def _child(pid: int) -> int:
    deadline = time.monotonic() + 5
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < deadline, "nothing was started"
        time.sleep(0.01)
    return int(children[0])
