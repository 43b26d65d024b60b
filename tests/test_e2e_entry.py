"""``make e2e`` asked for by name: what is missing is a failure there, not a run of skips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("given", [None, "", "{home}/other"])
def test_no_cluster_is_one_line_and_a_failure(given: str | None, tmp_path: Path) -> None:
    """Without KUBECONFIG the home directory's is meant, as for kubectl."""
    ours = ("KUBECONFIG", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env["HOME"] = str(tmp_path)
    if given is not None:
        env["KUBECONFIG"] = given.format(home=tmp_path)
    done = subprocess.run(
        ["make", "-s", "-o", "venv", f"BIN={Path(sys.executable).parent}", "e2e"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    named = given.format(home=tmp_path) if given else f"{tmp_path}/.kube/config"
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert said == [f"e2e: KUBECONFIG names no cluster: {named} does not exist"]
    assert done.returncode == 2
    assert done.stdout == ""
