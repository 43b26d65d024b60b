"""Debian's kernels, with kprobes, fentry and netem, in a guest."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guest import guest

HERE = Path(__file__).parent
ATTACHED = ("fentry:tcp_ack_update_rtt", "kprobe:tcp_ack_update_rtt", "tcp_probe", "sock_ops")
INLINED = {"fentry:tcp_rtt_estimator", "kprobe:tcp_rtt_estimator"}
DELAY = 50_000
# The guest is emulated on a busy machine: its own round trips may take that long (us).
IDLE = 20_000
QUICK = 0.6
"""Seconds, the emulated scrape of about 0.1 included."""

Tell = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tell() -> Tell:
    def run(kernel: str, scenario: str, *arguments: str) -> dict[str, Any]:
        try:
            prepared = guest.prepare(kernel)
        except guest.GuestError as error:
            pytest.skip(f"no guest: {error}")
        python = sys.executable if "sidecar" in scenario else "/usr/bin/python3"
        result = guest.run(prepared, [python, str(HERE / scenario), *arguments])
        assert result.status == 0, result.output
        report: dict[str, Any] = json.loads(result.output.splitlines()[-1])
        print(f"{report['kernel']}, {result.seconds:.0f} s: {json.dumps(report)}")
        return report

    return run


@pytest.mark.parametrize("kernel", [guest.STABLE, guest.BACKPORTS])
def test_every_hook_sees_the_delay_and_nothing_else(tell: Tell, kernel: str) -> None:
    """The node's headers are wrong ones and tracefs is not mounted, in all of it."""
    report = tell(kernel, "scenario_hooks.py")
    assert not report["tracefs"]
    assert report["refused"].keys() == INLINED  # the reference's hook is on no such kernel
    assert all(reason == "unsupported" for reason, _ in report["refused"].values())
    for hook in ATTACHED:
        assert report["before"][hook][0] > 20, hook
        assert 0 < report["before"][hook][1] < IDLE, hook
        assert DELAY < report["during"][hook][1] < DELAY + IDLE or (
            # Smoothed figures lag behind.
            not report["raw"][hook] and report["during"][hook][1] > DELAY / 2
        ), hook
        assert report["after"][hook][1] < IDLE, hook
        # The same addresses and ports in another namespace, delayed, leave no trace.
        assert report["elsewhere"][hook][1] < IDLE, hook
        # Connections from before the attach: only sock_ops does not see them.
        assert (report["earlier"][hook][0] == 0) == (hook == "sock_ops"), hook
    assert all(report["raw"][hook] for hook in ATTACHED[:3])
    # lockdown=confidentiality: what needs to read the kernel's memory says so.
    assert report["lockdown"] == {"tcp_probe": "lockdown", "sock_ops": "loaded"}


def test_what_metrics_show_of_delay_loss_and_a_narrow_link(tell: Tell) -> None:
    # An emulated CPU beside other work fills no faster link for sure.
    report = tell(guest.STABLE, "scenario_sidecar.py", "20mbit")
    assert 'hook="tcp_ack_update_rtt"' in report["hook"]
    assert report["healthy"]["rtt_us"] < IDLE
    assert report["healthy"]["net_tcp_retransmits_total"] == 0
    for _, risen in report["rises"]:
        assert DELAY - 5_000 < risen < DELAY + IDLE
    for _, fallen in report["falls"]:
        assert fallen < IDLE
    # How fast is for a quiet machine to say; here the quickest of five turns has to do.
    assert min(took for took, _ in report["rises"]) < QUICK
    assert min(took for took, _ in report["falls"]) < QUICK
    assert report["delayed"]["net_tcp_retransmits_total"] <= 2  # the emulation may stall
    assert report["delayed"]["rtt_us"] > DELAY - 5_000
    # Loss: segments are sent again; the round trips of those that arrive stay what they were.
    assert report["lossy"]["net_tcp_retransmits_total"] > 5
    assert report["lossy"]["rtt_us"] < IDLE
    # A narrow link under load: the sender's own queue looks like delay.
    assert report["narrow"]["rtt_us"] > IDLE
    for while_other in ("far_meanwhile", "far_while_lossy"):
        assert report[while_other]["net_tcp_retransmits_total"] <= 2  # as above
        assert report[while_other]["rtt_us"] < IDLE
