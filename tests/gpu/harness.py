"""A node with GPUs that a scenario describes, and a pod on it that the real agent watches."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STUB = Path(__file__).parent.parent / "gpu_stub"
SHIPPED = [str(Path(sys.executable).parent / "kitty-sidecar")]
QUICK = [sys.executable, str(Path(__file__).parent / "quick_agent.py")]
DEADLINE = 20.0
SET_UP = """
{ mount --make-rprivate / 2>/dev/null ||
  { mount --make-private /proc && mount --make-private /dev; }; } &&
mount -t proc proc /proc &&
mount -t tmpfs tmpfs /dev &&
mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/zero c 1 5 && mknod -m 666 /dev/urandom c 1 9 &&
mkdir /dev/shm /dev/nvidia-caps &&
touch /dev/nvidia0 /dev/nvidia1 /dev/nvidia2 /dev/nvidia3 &&
touch /dev/nvidia4 /dev/nvidia5 /dev/nvidia6 /dev/nvidia7 &&
echo ready && exec sleep 600
"""
"""What a container has: its own /proc and /dev. The device nodes are files, which is all that a
link of /proc/<pid>/fd can tell."""


def build_stub(folder: Path) -> Path:
    """Compiles the library; returns its path."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [
            *("gcc", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-pthread"),
            *("-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(STUB / "nvml.c")),
        ],
        check=True,
        timeout=60,
    )
    return library


class Scenario:
    """What the GPUs of the node do: a file of the stub, and changes to it."""

    def __init__(self, path: Path, base: str) -> None:
        self.path = path
        self._base = (STUB / "scenarios" / base).read_text() if base else ""
        self._changes: dict[str, object] = {}
        self.set({})

    def set(self, changes: Mapping[str, object]) -> None:
        """Changes some values; None takes one back to what the base says."""
        self._changes.update(changes)
        lines = [f"{key} {value}" for key, value in self._changes.items() if value is not None]
        new = self.path.with_suffix(".new")
        new.write_text(self._base + "\n".join(lines) + "\n")
        new.rename(self.path)


class Trainer:
    """A process of the pod.

    Attributes:
        pid: in the pod's PID namespace.
        outer: in the machine's.
    """

    def __init__(
        self, pod: Pod, *, env: Mapping[str, str], nodes: tuple[str, ...], privileged: bool
    ) -> None:
        opened = " ".join(f"{place}</dev/{node}" for place, node in enumerate(nodes, start=3))
        inside = ["/bin/sh", "-c", f"exec sleep 600 {opened}"]
        if not privileged:
            inside = ["setpriv", "--bounding-set=-sys_rawio", "--inh-caps=-sys_rawio", *inside]
        environment = [f"{name}={value}" for name, value in env.items()]
        self._process = subprocess.Popen(
            [*pod.enter, "env", "-i", f"PATH={os.environ['PATH']}", *environment, *inside]
        )
        self.outer = wait(self._slept, "the trainer")
        status = Path(f"/proc/{self.outer}/status").read_text()
        self.pid = int(status.split("NSpid:")[1].splitlines()[0].split()[-1])

    def _slept(self) -> int | None:
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            try:
                if Path(f"/proc/{child}/comm").read_text() == "sleep\n":
                    return int(child)
            except OSError:
                continue
        return None

    def end(self) -> None:
        """Kills it and waits until it is gone."""
        if self._process.poll() is None:
            os.kill(self.outer, signal.SIGKILL)
            self._process.wait(10)


class Agent:
    """The agent in the pod, and its page."""

    def __init__(
        self,
        pod: Pod,
        *,
        command: list[str],
        library: Path,
        scenario: Path,
        log: Path,
        env: Mapping[str, str],
    ) -> None:
        self.log = log
        variables = {
            "LD_LIBRARY_PATH": str(library.parent),
            "NVML_SCENARIO": str(scenario),
            "KITTY_BIND": "127.0.0.1",
            "KITTY_PORT": str(_free_port()),
            "KITTY_COLLECTORS": "gpu",
            "KITTY_NODE": "node-a",
            "KITTY_JOB": "llama",
            **env,
        }
        words = [f"{name}={value}" for name, value in variables.items() if value]
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [*pod.enter, "env", "-i", f"PATH={os.environ['PATH']}", *words, *command],
                stderr=stream,
            )
        self.port = wait(self._port, "the agent's port")

    def _port(self) -> int | None:
        match = re.search(r"kitty-sidecar \S+: port (\d+)", self.log.read_text())
        return int(match[1]) if match else None

    @property
    def pid(self) -> int:
        """The agent's own pid, on the machine."""
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def threads(self) -> int:
        """Returns how many threads the agent has; one of a request may just be ending."""
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def page(self) -> Page:
        """Scrapes once."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return Page(answer.read().decode())

    def until(self, told: Callable[[Page], object], *, within: float = DEADLINE) -> Page:
        """Scrapes until the page tells what is asked; returns it.

        Raises:
            AssertionError: it does not, and what it said last.
        """
        end = time.monotonic() + within
        while True:
            page = self.page()
            if told(page):
                return page
            assert time.monotonic() < end, f"{page.text}\n{self.log.read_text()}"
            time.sleep(0.1)

    def end(self) -> None:
        """Ends the agent."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
            assert self._process.wait(10) == 0


class Page:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def all(self, name: str, **labels: str) -> list[float]:
        """Returns the values of a family's samples that have the labels."""
        return [
            s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()
        ]

    def one(self, name: str, **labels: str) -> float | None:
        """Returns the value of the one sample that has the labels, None without any."""
        found = self.all(name, **labels)
        assert len(found) <= 1, (name, labels, found)
        return found[0] if found else None

    def labels(self, name: str) -> list[dict[str, str]]:
        """Returns the labels of a family's samples."""
        return [s.labels for s in self.samples if s.name == name]

    def gpus(self, name: str = "gpu_temperature_c") -> set[str]:
        """Returns the gpu_id of all samples of a family."""
        return {labels["gpu_id"] for labels in self.labels(name)}


class Pod:
    """A PID and a mount namespace with device nodes of eight GPUs, on the network of the tests."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder = folder
        self._library = library
        self._made: list[Trainer | Agent] = []
        self._logs = 0
        self._pause = subprocess.Popen(
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
                *("--propagation", "unchanged", "sh", "-c", SET_UP),
            ],
            stdout=subprocess.PIPE,
        )
        assert self._pause.stdout is not None
        assert self._pause.stdout.readline() == b"ready\n"
        pid = self._pause.pid
        inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        self.enter = ["nsenter", f"--target={inside}", "--mount", "--pid", "--root", "--wd"]

    def run(self, *command: str) -> None:
        """Runs a command in the pod."""
        subprocess.run([*self.enter, *command], check=True, timeout=10)

    def trainer(self, *nodes: str, privileged: bool = False, **env: str) -> Trainer:
        """Starts a process that holds the device nodes open."""
        variables = {"KITTY_WATCH": "1", **env}
        made = Trainer(self, env=variables, nodes=nodes, privileged=privileged)
        self._made.append(made)
        return made

    def agent(
        self, scenario: Scenario, *, shipped: bool = False, library: Path | None = None, **env: str
    ) -> Agent:
        """Starts the agent: `kitty-sidecar` as it is shipped, or the one of quick_agent.py."""
        self._logs += 1
        made = Agent(
            self,
            command=SHIPPED if shipped else QUICK,
            library=self._library if library is None else library,
            scenario=scenario.path,
            log=self._folder / f"agent{self._logs}.log",
            env=env,
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        """Ends all that runs in the pod."""
        for made in reversed(self._made):
            made.end()
        self._pause.kill()
        self._pause.wait(10)
        assert self._pause.stdout is not None
        self._pause.stdout.close()


def wait(look: Callable[[], int | None], what: str) -> int:
    """Returns what `look` finds, once it does."""
    end = time.monotonic() + DEADLINE
    while (found := look()) is None:
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.01)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
