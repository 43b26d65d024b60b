"""The agent with GPUs read two and a half times as often, so that the tests take less long."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sidecar import agent, cli
from sidecar.collectors.gpu import GpuCollector
from sidecar.sources.dcgm_exporter import DcgmExporter
from sidecar.sources.gpu_attribution import DeviceTable
from sidecar.sources.gpu_nvidia import NvidiaSource
from sidecar.sources.nvml import load_library

if TYPE_CHECKING:
    from sidecar.agent import Sources
    from sidecar.collectors.base import Collector

PERIOD = 0.4


def _gpu(sources: Sources) -> Collector | None:
    assert load_library() is not None
    url = sources.pod.config.dcgm_exporter
    source = NvidiaSource(period=PERIOD, exporter=DcgmExporter(url) if url else None)
    return GpuCollector(sources.pod, source, DeviceTable(sources.proc), period=PERIOD)


if __name__ == "__main__":
    agent.COLLECTORS["gpu"] = _gpu
    sys.exit(cli.main([]))
