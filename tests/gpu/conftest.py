"""Fixtures of the GPU tests: the compiled stub, a pod, and what its GPUs do."""

from __future__ import annotations

import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from tests.gpu.harness import Pod, Scenario, build_stub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnvidia-ml.so.1 that the scenario drives."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed: the stub of NVML cannot be compiled")
    return build_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def pod(tmp_path: Path, library: Path) -> Iterator[Pod]:
    """A pod's namespaces."""
    if os.geteuid() != 0:
        pytest.skip("not root: a pod's namespaces cannot be made")
    made = Pod(tmp_path, library)
    yield made
    made.close()


@pytest.fixture
def scenario(tmp_path: Path) -> Callable[[str], Scenario]:
    """Makes the scenario of a base file, or an empty one."""

    def make(base: str) -> Scenario:
        return Scenario(tmp_path / "scenario", base)

    return make


@pytest.fixture
def dcgm() -> Iterator[Callable[[str], str]]:
    """Serves a page as a dcgm-exporter does; called with the page, it returns the address."""
    page = b""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def serve(text: str) -> str:
        nonlocal page
        page = text.encode()
        return f"http://127.0.0.1:{server.server_port}/metrics"

    yield serve
    server.shutdown()
    thread.join()
    server.server_close()
