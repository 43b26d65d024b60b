"""The command `kitty-sidecar`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import sidecar
from sidecar import agent
from sidecar.config import from_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

EPILOG = """\
Settings come from the environment, as the webhook writes them:
  KITTY_PORT            port of /metrics, default 9100; the next free one where it is taken
  KITTY_BIND            address to listen on, default all
  KITTY_COLLECTORS      collectors to run, comma separated, default all: {collectors}
  KITTY_NODE, KITTY_POD, KITTY_NAMESPACE, KITTY_POD_UID, KITTY_POD_IP
                        the pod's names, for labels
  KITTY_JOB, KITTY_RANK job and rank of the pod, where its controller tells them
  KITTY_PROFILE         privileged (default), capabilities, unprivileged
  KITTY_RTT_HOOK        auto (default), or the name of a hook
  KITTY_LIFECYCLE       native (default), or ordinary: leave when no watched process is left,
  KITTY_RESTART_POLICY  after 10 s under Never and 30 s under OnFailure; Always (default): stay
  KITTY_PROC, KITTY_SYS where /proc and /sys are
  KITTY_BCC_PYTHON      the Python that can import bcc, default /usr/bin/python3
  KITTY_DRIVER_ROOT     where the node's GPU driver is mounted; looked through for NVML
  KITTY_DCGM_EXPORTER   http address of a dcgm-exporter on the node, for the profiling rows of
                        GPUs before Hopper; default none

It watches the processes whose environment holds KITTY_WATCH=1, and those below them.
A value that cannot be used is named in the log and its default is used.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the agent until it is told to end."""
    parser = argparse.ArgumentParser(
        prog="kitty-sidecar",
        description="Serves what it sees of the pod's training processes as Prometheus metrics.",
        epilog=EPILOG.format(collectors=", ".join(agent.COLLECTORS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=sidecar.__version__)
    parser.parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    config, problems = from_environment(os.environ, collectors=frozenset(agent.COLLECTORS))
    for problem in problems:
        logging.getLogger("kitty").warning("%s", problem)
    agent.run(config)
