"""What the tests of the rules share: Debian's promtool, unpacked privately."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of promtool and prometheus; skip where they cannot be had."""
    done = subprocess.run([ROOT / "tools/prometheus"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no promtool: {done.stderr.strip()}")
    return Path(done.stdout.strip())
