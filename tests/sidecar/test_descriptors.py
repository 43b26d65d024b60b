"""What a sidecar without the right to trace learns of other users' descriptors: nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WALK = """
from sidecar.sources.descriptors import DescriptorTable
table = DescriptorTable()
table.walk([{pid}])
print(table.denied, table.get({pid}))
"""


@pytest.mark.parametrize(("drop", "known"), [("-sys_ptrace", False), ("-sys_chroot", True)])
def test_links_that_may_not_be_read_are_a_denial(drop: str, *, known: bool) -> None:
    """Root with a container's usual capabilities lists the folder and reads no link in it."""
    if os.geteuid() != 0:
        pytest.skip("needs root: another user's process")
    with subprocess.Popen(["sleep", "60"], user=65532) as other:
        try:
            limited = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"]
            said = subprocess.run(
                [*limited, sys.executable, "-c", WALK.format(pid=other.pid)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        finally:
            other.kill()
    assert said.startswith("False Descriptors(count=" if known else "True None")
