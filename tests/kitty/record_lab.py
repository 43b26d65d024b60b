"""Records what a Prometheus has of the lab's job with a GPU of NVML's stub for each pod.

    python -m tests.kitty.record_lab      (root, gcc; five minutes)

Only what the dashboard and the rules ask for is kept. A rank's GPU reports an error, gets hot and
stays so.
"""

import json
import re
import tempfile
from itertools import groupby
from pathlib import Path

from lab.display import Narration
from lab.interrupts import ending_signals
from lab.judge import find_programs, judging
from lab.record import Plan, record
from tests.gpu.harness import build_stub
from tests.gpu.lab_gpus import Gpus, kinds
from tests.kitty.lab_recording import RECORDING
from tests.kitty.servers import ROOT, RULES

ASKED = (RULES, ROOT / "manifests/dashboards/kitty.json")
RANK = 2


def names() -> str:
    """Return a regular expression of all families that are asked for."""
    words = {
        word
        for path in ASKED
        for word in re.findall(r"(?<![\w:$])[a-z]+_\w+(?=[{\[])", path.read_text())
    }
    return "|".join(sorted({"up", *words}))


def shorter(notation: str) -> str:
    """Write what stays the same once: ``1 1 1`` as ``1x2``, as promtool does."""
    runs = [(word, len(list(same))) for word, same in groupby(notation.split())]
    return " ".join(
        word if count == 1 else f"{word}x{count if word == '_' else count - 1}"
        for word, count in runs
    )


def main() -> None:
    """Record, and write the recording where the tests look for it."""
    programs = find_programs()
    with ending_signals(), tempfile.TemporaryDirectory() as name:
        gpus = Gpus(Path(name), build_stub(Path(name)))
        plan = Plan(faults=[(kinds(gpus)["gpu-heat"], RANK)], healthy=25, during=255, calm=0)
        with gpus.job(Narration()) as story, judging(story, programs) as server:
            gpus.report_xid(story.pods[RANK], 48)
            made = record(story, server, plan, names())
    made["series"] = {series: shorter(words) for series, words in made["series"].items()}
    RECORDING.write_text(json.dumps(made, indent=0) + "\n")


if __name__ == "__main__":
    main()
