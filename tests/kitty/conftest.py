"""One real Prometheus with the shipped rules for all of these tests, and a headless browser."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kitty.dataset import all_series
from tests.kitty.lab_recording import recorded_series
from tests.kitty.servers import ROOT, RULES, RealPrometheus


@dataclass(frozen=True)
class Ran:
    """What a run of the command line printed."""

    status: int
    out: str
    err: str


Kitty = Callable[..., Ran]


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of promtool and prometheus; skip where they cannot be had."""
    done = subprocess.run([ROOT / "tools/prometheus"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no prometheus: {done.stderr.strip()}")
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def started(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPrometheus]:
    """A Prometheus that has just been started; the rules may have said nothing yet."""
    folder = tmp_path_factory.mktemp("prometheus")
    with RealPrometheus(
        programs=programs,
        folder=folder,
        rules=[RULES],
        series=[*all_series(), *recorded_series()],
    ) as server:
        yield server
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def _in_the_background(request: pytest.FixtureRequest) -> None:
    """Let the rules judge while tests run that need no Prometheus."""
    with suppress(pytest.skip.Exception):
        request.getfixturevalue("started")


@pytest.fixture(scope="session")
def prometheus(started: RealPrometheus) -> RealPrometheus:
    """A Prometheus whose rules have judged the jobs and gone round once more after that."""
    for kind in ("network-latency", "cpu", "paused"):
        started.wait(f'kitty:verdict{{class="{kind}"}}')
    started.wait('kitty:cell{namespace="lab",signal="retransmits"}')
    started.wait('ALERTS{alertname="KittyStraggler",namespace="lab"}')
    started.wait('kitty:signal:z{namespace="lab",signal="gpu_clock"}')
    started.wait('ALERTS{alertname="KittyStraggler",job="ring"}')
    started.wait('kitty:signal:z{job="ring"} and on () kitty:signal{signal="gpu_clock",job="ring"}')
    return started


@pytest.fixture(scope="session")
def kitty() -> Kitty:
    """Run the command line as its user does, in a process of its own."""

    def run(*arguments: str, url: str | None = None, **environment: str) -> Ran:
        clean = {
            key: value
            for key, value in os.environ.items()
            if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR") and not key.startswith("KITTY_")
        }
        if url is not None:
            clean["KITTY_PROMETHEUS"] = url
        done = subprocess.run(
            [ROOT / ".venv/bin/kitty", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**clean, **environment},
            stdin=subprocess.DEVNULL,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def browser() -> str:
    """The headless browser's program; skip where there is none."""
    for name in ("chromium-headless-shell", "chromium"):
        if found := shutil.which(name):
            return found
    pytest.skip("no chromium-headless-shell and no chromium")


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Where screenshots are kept for a person to look at."""
    folder = ROOT / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder
