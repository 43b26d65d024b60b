"""What the lab's tests share: a cluster of real pods with a probe in them."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.cluster import Cluster, Pod
from lab.commands import ToolError, require_tools, run

PROBE = Path(__file__).parent / "probe.py"


@pytest.fixture(scope="session")
def root() -> None:
    """Skip where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root: it makes namespaces, links and cgroups")
    try:
        require_tools()
    except ToolError as error:
        pytest.skip(str(error))


def probe_pod(name: str) -> dict[str, Any]:
    """A pod whose container answers the probe and burns a little processor time."""
    return {
        "metadata": {"name": name, "namespace": "test"},
        "spec": {
            "nodeName": name,
            "containers": [
                {"name": "probe", "command": [sys.executable, str(PROBE), "serve"]},
            ],
        },
    }


@pytest.fixture(scope="module")
def cluster(root: None) -> Iterator[Cluster]:
    """Three pods: the tests hit the first and see whether the others notice."""
    with Cluster() as made:
        for name in ("hit", "peer", "other"):
            made.start_pod(probe_pod(name))
        yield made


Probe = Callable[..., dict[str, float]]


@pytest.fixture(scope="session")
def probe() -> Probe:
    """Measure a connection between two pods; see probe.py for the figures."""

    def measure(source: Pod, target: Pod, *, pings: int = 20, send: int = 0) -> dict[str, float]:
        argv = [sys.executable, str(PROBE), "ask", target.link.address, str(pings), str(send)]
        answer = json.loads(run(*source.sandbox.inside(*argv)))
        assert isinstance(answer, dict)
        return answer

    return measure
