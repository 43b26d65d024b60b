"""What the shipped rules say of a GPU whose clocks are held back, on the stub of NVML.

Run by hand, as root: ``python -m bench.gpu_verdict [--repeats N]``; gcc, about 7 minutes and 5 for
each further repeat. A real job of four pods with the real sidecars, NVML's real binding over the
stub of tests/gpu_stub, and a real Prometheus with the shipped rules, scored as ``kitty-lab eval``
is. No GPU is in it: the trainers compute on processors, and no step takes longer while a GPU is
said to be hot.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from lab.display import Narration
from lab.evalreport import circumstances, listed, said_wrongly, table
from lab.evaluation import Ground, Level, Plan, Planned, Record, evaluate
from lab.interrupts import ending_signals
from tests.gpu.harness import build_stub
from tests.gpu.lab_gpus import WORLD, Gpus, kinds

LEVELS = {
    "gpu-heat": (
        Level(name="usual", strength=90),
        Level(name="mild", strength=25),
        Level(name="hard", strength=12),
    ),
    "gpu-heat-older-driver": (Level(name="usual", strength=90),),
    "gpu-power-cap": (Level(name="usual", strength=90),),
}


def make_plan(repeats: int) -> Plan:
    """Return the plan: each once a repeat, every time at the next rank."""
    each = [(fault, level.name) for fault, levels in LEVELS.items() for level in levels]
    return Plan(
        workload="ring",
        seed=1,
        quick=False,
        trials=tuple(
            Planned(fault=fault, level=level, rank=number % WORLD)
            for number, (fault, level) in enumerate(each * repeats, start=1)
        ),
        fault_s=35,
        calm_s=25,
        healthy_s=60,
    )


def report(record: Record) -> str:
    """Return what was said of each, and what was said wrongly."""
    result = record.score()
    rows = [
        (
            o.trial.fault,
            f"{o.trial.level}: {o.trial.strength:g}% of the time",
            str(o.trial.rank),
            o.said,
            "yes" if o.right else "NO",
            listed([o.detected_s]),
            listed([o.cleared_s]),
        )
        for o in result.outcomes
    ]
    healthy = f"{result.healthy_s / 60:.1f} minutes of health, the power limit's included"
    head = ("what", "strength", "rank", "said", "right", "detected after", "cleared after")
    return "\n".join(
        [
            circumstances(record),
            "",
            *table(head, rows),
            "",
            f"False verdicts: {len(result.false)}, {result.false_healthy()} of them in {healthy}.",
            *said_wrongly(record, result),
        ]
    )


def main() -> int:
    """Run it; 0 when all was said right and nothing wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, choices=range(1, WORLD + 1), default=1)
    plan = make_plan(parser.parse_args().repeats)
    with ending_signals(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpus = Gpus(folder, build_stub(folder))
        ground = Ground(
            kinds=kinds(gpus), levels=LEVELS, story=lambda display, _: gpus.job(display)
        )
        record = evaluate(
            plan,
            folder=folder,
            display=Narration(),
            minutes=None,
            resume=False,
            ground=ground,
        )
    print(report(record))
    result = record.score()
    return 0 if all(o.right for o in result.outcomes) and not result.false else 1


if __name__ == "__main__":
    sys.exit(main())
