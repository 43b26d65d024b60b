"""The page as a whole: what a reader of it may count on, and how it is named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sidecar.agent import COLLECTORS
from tests.sidecar.documented import undocumented
from tests.sidecar.fixture import DEVICE_ERROR, write
from tests.sidecar.golden_page import LIVE, PAGE, page, pod
from tests.sidecar.sandbox import ROOT, Sandbox, parse

LINT_EXCEPTIONS = {"gpu_memory_total", "net_tcp_rtt_us", "proc_fd_count", "proc_socket_count"}
"""Names that the reference gives and that promtool would have otherwise: its words are kept."""


def test_the_page_is_the_reviewed_one(tmp_path: Path) -> None:
    """After a wanted change: python -m tests.sidecar.golden_page, and review the difference."""
    assert page(tmp_path) == PAGE.read_text()


def test_no_collector_is_forgotten() -> None:
    """A new one belongs into `golden_page.page`, or into LIVE with a page of its own elsewhere."""
    served = set(parse(PAGE.read_text()).label("kitty_collector_up", "collector"))
    assert served == COLLECTORS.keys() - LIVE


def test_every_family_is_documented() -> None:
    """Row by row of docs/metrics.md; tests/ebpf and tests/gpu ask the same of the live pages."""
    assert not undocumented(PAGE.read_text())


def test_nothing_of_what_is_not_watched_shows(tmp_path: Path) -> None:
    found = parse(page(tmp_path))
    ranks = {have.get("rank", "") for rows in found.samples.values() for have, _ in rows}
    assert ranks == {"", "0", "1"}


def test_every_series_carries_the_job(tmp_path: Path) -> None:
    found = parse(page(tmp_path))
    assert all("job" in have for rows in found.samples.values() for have, _ in rows)
    assert {rows[0][0]["job"] for rows in found.samples.values()} == {'llm "7b" \\ run'}


def test_files_that_fail_take_only_their_own_series(tmp_path: Path) -> None:
    """One file after another of a rank's process fails; the page stays, the others' rows too."""
    fixture = pod(tmp_path / "model")
    names = sorted(path.name for path in (fixture.proc / "20").iterdir() if path.is_file())
    assert "stat" in names
    for name in names:
        broken = tmp_path / f"broken-{name}"
        found = parse(page_with(broken, name, DEVICE_ERROR))
        assert found.values("proc_threads", rank="1") == [2.0], name
        assert set(found.values("kitty_collector_errors_total")) == {0.0}, name
        found = parse(page_with(tmp_path / f"alien-{name}", name, b"\xff(((\n1 2 3\n"))
        assert found.values("proc_threads", rank="1") == [2.0], name
        assert set(found.values("kitty_collector_errors_total")) == {0.0}, name


def page_with(folder: Path, name: str, content: object) -> str:
    """Returns the page where one file of process 20 holds something else."""

    def spoil(fixture_proc: Path) -> None:
        path = fixture_proc / "20" / name
        path.unlink()
        write(path, content)

    return page(folder, spoil=spoil)


@pytest.fixture(scope="session")
def promtool() -> Path:
    done = subprocess.run([ROOT / "tools/prometheus"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"promtool cannot be had: {done.stderr.strip()}")
    return Path(done.stdout.strip(), "promtool")


def lint(promtool: Path, text: str) -> set[str]:
    """Returns promtool's complaints that are not known exceptions."""
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode in {0, 3}, done.stderr
    complaints = set(filter(None, (done.stdout + done.stderr).splitlines()))
    return {line for line in complaints if line.split()[0] not in LINT_EXCEPTIONS}


def test_names_pass_promtool(promtool: Path, tmp_path: Path) -> None:
    assert not lint(promtool, page(tmp_path))


def test_names_of_the_live_page_pass_promtool(promtool: Path, sandbox: Sandbox) -> None:
    sandbox.start("sleep", "60", env={"KITTY_WATCH": "1", "RANK": "0", "JOB_NAME": "llm"})
    sandbox.sidecar()
    sandbox.until(lambda: sandbox.scrape().values("kitty_rank_allowed_cpus"))
    text = sandbox.get("/metrics")[1]
    assert not lint(promtool, text)
