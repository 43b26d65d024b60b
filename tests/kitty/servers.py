"""A real Prometheus on loopback with the shipped rules, history and a page that it scrapes."""

import json
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.kitty import dataset

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "manifests/rules/kitty.rules.yaml"
START_S = 60.0


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RealPrometheus:
    """Debian's Prometheus; `wait` until the rules have said what they say of the data.

    Args:
        programs: Folder of prometheus and promtool.
        folder: For its configuration and data.
        rules: Files of rules.
        series: What it has; empty is nothing.
    """

    def __init__(
        self, *, programs: Path, folder: Path, rules: list[Path], series: list[dataset.Series]
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._programs = programs
        self._folder = folder
        self._rules = rules
        self._series = series
        self._page: ThreadingHTTPServer | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Write the history, serve the page, start the server."""
        self._folder.mkdir(parents=True, exist_ok=True)
        end = float(int(time.time()))
        if self._series:
            self._backfill(end)
        page = self._serve(end)
        target = {"namespace": "training", "pod": "ring-worker-0", "node": "node-0", "job": "ring"}
        configuration = {
            "global": {
                "scrape_interval": "5s",
                "scrape_timeout": "4s",
                "evaluation_interval": "5s",
            },
            "rule_files": [str(path) for path in self._rules],
            "scrape_configs": [
                {
                    "job_name": "kitty",
                    "honor_labels": True,
                    "static_configs": [{"targets": [page], "labels": target}],
                },
                {
                    "job_name": "prometheus",
                    "static_configs": [{"targets": [self.url.removeprefix("http://")]}],
                },
            ],
        }
        config = self._folder / "prometheus.yml"
        config.write_text(json.dumps(configuration))
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._programs / "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def _backfill(self, end: float) -> None:
        history = self._folder / "history.txt"
        with history.open("w", encoding="utf-8") as file:
            file.writelines(dataset.openmetrics([*self._series, dataset.since_series(end)], end))
        subprocess.run(
            [
                self._programs / "promtool",
                *("tsdb", "create-blocks-from", "openmetrics"),
                history,
                self._folder / "data",
            ],
            check=True,
            capture_output=True,
        )
        history.unlink()

    def _serve(self, end: float) -> str:
        series = self._series

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = dataset.live_page(series, end, time.time())
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Stay quiet."""

        self._page = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        threading.Thread(target=self._page.serve_forever, daemon=True).start()
        return f"127.0.0.1:{self._page.server_address[1]}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End what was started."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
        if self._page is not None:
            self._page.shutdown()
            self._page.server_close()

    def ask(self, path: str, **arguments: str) -> Any:
        """Return ``data`` of an answer of its HTTP API."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=20) as answer:
            return json.load(answer)["data"]

    def wait(self, expression: str) -> None:
        """Wait until an expression has a series."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.ask("query", query=expression)["result"]:
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                log = (self._folder / "prometheus.log").read_text(errors="replace")
                raise AssertionError(f"never came: {expression}\n{log[-2000:]}")
            time.sleep(0.25)
