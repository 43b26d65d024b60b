"""The whole way from the driver to the verdict: a job of four pods with a GPU each, of the stub."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from lab.commands import ToolError, require_tools
from lab.display import Narration
from lab.judge import find_programs, judging, stragglers, verdicts
from tests.gpu.lab_gpus import Gpus, kinds

if TYPE_CHECKING:
    from pathlib import Path

    from lab.judge import Verdict
    from lab.prometheus import Prometheus

pytestmark = pytest.mark.root

PATIENCE_S = 90.0


def accused(server: Prometheus) -> Verdict:
    """Waits until a GPU is accused; returns the verdict."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with suppress(OSError):  # it is busy
            named = [verdict for verdict in stragglers(server) if verdict.kind == "gpu"]
            if named:
                return named[0]
        time.sleep(0.5)
    raise AssertionError(server.query('kitty:signal{signal="gpu_throttled"}'))


def test_a_hot_gpu_is_named_and_one_at_its_power_limit_is_not(
    tmp_path: Path, library: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: the namespaces of pods cannot be made")
    try:
        require_tools()
        programs = find_programs()
    except ToolError as error:
        pytest.skip(str(error))
    gpus = Gpus(tmp_path, library)
    heat, cap = kinds(gpus)["gpu-heat"], kinds(gpus)["gpu-power-cap"]
    with (
        gpus.job(Narration()) as story,
        judging(story, programs) as server,
        cap.inject(story.cluster, story.pods[0], 90),
        heat.inject(story.cluster, story.pods[2], 90),
    ):
        verdict = accused(server)
        assert verdict.rank == 2
        figures = re.search(r"held back (.+)% of the time; .* is (.+)%", verdict.description)
        assert figures is not None, verdict.description
        assert float(figures[1]) > 50 > float(figures[2])
        said = {series.rank for series in verdicts(server, PATIENCE_S) if series.kind == "gpu"}
        assert said == {"2"}
        owners = {(o["rank"], o["attributed_by"]) for o, _ in server.query("kitty_gpu_info")}
        assert owners == {(str(rank), "processes") for rank in story.pods}
        capped = server.query('rate(kitty_gpu_throttled_seconds_total{reason="sw_power_cap"}[20s])')
        assert {labels["rank"] for labels, share in capped if share > 0.5} == {"0"}
