"""A trainer's file system that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sidecar.sandbox import Sandbox

HANGING = r"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags, data):
    if libc.mount(source, target, kind, flags, data):
        print(os.strerror(ctypes.get_errno()), flush=True)
        sys.exit()
libc.unshare(0x20000)
# Below a changed root "/" is no mount point; what holds the new mount must be private.
if all(libc.mount(None, place, None, 0x44000, None) for place in (b"/", b"/dev/shm")):
    print(os.strerror(ctypes.get_errno()), flush=True)
    sys.exit()
served = os.open("/dev/fuse", os.O_RDWR)  # by nobody: every question to it waits
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % served
mount(b"hanging", b"/dev/shm", b"fuse", 0, options)
print("mounted", flush=True)
sys.stdin.readline()
os.close(served)
print("let go", flush=True)
sys.stdin.readline()
"""


def test_a_shm_that_hangs_takes_only_its_own_rows(sandbox: Sandbox) -> None:
    if not Path("/dev/fuse").exists():
        pytest.skip("no /dev/fuse: nothing that hangs can be mounted")
    rank = sandbox.python(HANGING, KITTY_WATCH="1", RANK="0")
    assert rank.stdout is not None
    assert rank.stdin is not None
    assert rank.stdout.readline() == "mounted\n"
    sandbox.sidecar(KITTY_COLLECTORS="system,rank")
    sandbox.until(lambda: sandbox.scrape().values("kitty_rank_threads", rank="0") == [1.0])
    sandbox.until(lambda: sandbox.scrape().values("sys_cpu_utilization"))
    before = sandbox.scrape()
    sandbox.until(
        lambda: (
            sandbox.scrape().values("sys_cpu_utilization") != before.values("sys_cpu_utilization")
        )
    )
    page = sandbox.scrape()
    assert set(page.values("kitty_collector_up")) == {1.0}
    assert not page.values("sys_shm_total_bytes")
    rank.stdin.write("\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "let go\n"
