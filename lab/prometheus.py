"""A real Prometheus inside the lab's network: it scrapes the sidecars and evaluates the rules."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lab.cluster import MARKER
from lab.commands import ToolError
from lab.leftovers import owned_name

ADDRESS = "127.0.0.1:9090"  # of the lab's own network namespace
START_TIMEOUT_S = 30.0
TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """A sidecar, with the labels that service discovery would give its series.

    Attributes:
        address: Host and port.
        namespace: Of the pod.
        pod: Its name.
        node: Where it runs.
        job: Value of the pod's job annotation.
    """

    address: str
    namespace: str
    pod: str
    node: str
    job: str


def configuration(
    targets: Sequence[Target], rules: Sequence[Path], *, interval_s: int
) -> dict[str, Any]:
    """Return a Prometheus configuration that scrapes as the shipped one does.

    Only the discovery differs: the targets are listed with the labels that the shipped relabelling
    takes from the pods.
    """
    return {
        "global": {
            "scrape_interval": f"{interval_s}s",
            "scrape_timeout": f"{max(1, interval_s - 1)}s",
            "evaluation_interval": f"{interval_s}s",
        },
        "rule_files": [str(path.absolute()) for path in rules],
        "scrape_configs": [
            {
                "job_name": "kitty",
                "honor_labels": True,
                "static_configs": [
                    {
                        "targets": [target.address],
                        "labels": {
                            "namespace": target.namespace,
                            "pod": target.pod,
                            "node": target.node,
                            "job": target.job,
                        },
                    }
                    for target in targets
                ],
            }
        ],
    }


class Prometheus:
    """A running Prometheus; use it as a context manager, on the thread that owns the network.

    Args:
        programs: The folder of the program ``prometheus``.
        directory: For its configuration and its samples; the caller removes it.
        targets: What to scrape.
        rules: Files of rules.
        interval_s: Between two scrapes, and between two evaluations.
    """

    def __init__(
        self,
        *,
        programs: Path,
        directory: Path,
        targets: Sequence[Target],
        rules: Sequence[Path] = (),
        interval_s: int = 5,
    ) -> None:
        self._programs = programs
        self._directory = directory
        self._config = configuration(targets, rules, interval_s=interval_s)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            ToolError: It does not come up; the text holds the end of its log.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        config = self._directory / "prometheus.yml"
        config.write_text(json.dumps(self._config))  # JSON is YAML
        log = self._directory / "prometheus.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "--"),  # also by kill -9 of the lab
                    str(self._programs / "prometheus"),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address={ADDRESS}",
                ],
                env=os.environ | {MARKER: owned_name()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise ToolError(f"Prometheus does not start:\n{tail}")
            time.sleep(0.1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def _ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://{ADDRESS}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def ask(self, path: str, **arguments: str) -> Any:
        """Return the ``data`` of an answer of the HTTP API, ``/api/v1/<path>``.

        Raises:
            OSError: There is no answer, or an error.
        """
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(
            f"http://{ADDRESS}/api/v1/{path}?{query}", timeout=TIMEOUT_S
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """Return labels and value of each series that an expression has now."""
        result = self.ask("query", query=expression)["result"]
        return [(row["metric"], float(row["value"][1])) for row in result]

    def samples(
        self, selector: str, seconds: int
    ) -> list[tuple[Mapping[str, str], list[tuple[float, float]]]]:
        """Return the raw samples of the last seconds: labels, then times and values."""
        result = self.ask("query", query=f"{selector}[{seconds}s]")["result"]
        return [
            (row["metric"], [(float(when), float(value)) for when, value in row["values"]])
            for row in result
        ]
