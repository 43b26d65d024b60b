"""Records what a Prometheus scrapes from the lab's job, calm and with faults, and what rules say.

    python -m lab.record --programs FOLDER --out FILE [--fault FAULT]... [--rules FILE]

A fault is ``NAME[@RANK][=STRENGTH]``. A recording is a JSON document: ``interval`` (seconds between
two samples), ``length`` (samples), ``faults`` (name, rank, strength, begin and end in seconds after
the first sample), ``series`` (the notation of ``promtool test rules``, by series) and ``verdicts``
(of the rules, by series).
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.admission import AdmissionError
from lab.commands import ToolError
from lab.display import Narration
from lab.faults import KINDS, Kind
from lab.interrupts import ending_signals
from lab.judge import targets_of
from lab.podspec import UnsupportedError
from lab.prometheus import Prometheus
from lab.story import Pace, Story, StoryError

INTERVAL_S = 5
SLACK_S = 15  # a series begins with the first scrape after its target is up
SCRAPED = '{instance!=""}'  # what rules record has no instance
VERDICTS = "kitty:verdict"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens to the job.

    Attributes:
        faults: One after the other, each with the rank that it hits.
        healthy: Seconds before the first.
        during: Seconds that each lasts.
        calm: Seconds after each.
    """

    faults: Sequence[tuple[Kind, int]]
    healthy: float
    during: float
    calm: float


def notation(samples: Sequence[tuple[float, float]], start: float, length: int) -> str:
    """Return samples in promtool's notation, one value for each interval from ``start`` on.

    Example:
        ``[(5.1, 1.0), (14.9, 3.0)]`` from 0 with length 4 gives ``"_ 1 _ 3"``.
    """
    slots: list[float | None] = [None] * length
    for when, value in samples:
        place = round((when - start) / INTERVAL_S)
        if 0 <= place < length:
            slots[place] = value
    return " ".join("_" if value is None else _number(value) for value in slots)


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.10g}"


def series_name(labels: Mapping[str, str]) -> str:
    """Return a series as it is written in an expression."""
    inner = ",".join(
        f"{name}={json.dumps(value)}"
        for name, value in sorted(labels.items())
        if name != "__name__"
    )
    return f"{labels['__name__']}{{{inner}}}"


def record(story: Story, server: Prometheus, plan: Plan, names: str) -> dict[str, Any]:
    """Let the job run as planned; what Prometheus has of it.

    Args:
        story: The running job.
        server: Scrapes it.
        plan: Faults and calm.
        names: Regular expression of the metrics to keep.
    """
    start = time.time()
    faults = []
    wait(story, plan.healthy)
    for kind, rank in plan.faults:
        began = time.time()
        with kind.inject(story.cluster, story.pods[rank], kind.strength):
            story.display.mark(f"{kind.name} at rank {rank}")
            wait(story, plan.during)
        ended = time.time()
        story.display.mark(f"{kind.name} over")
        mark = {"begin": round(began - start, 1), "end": round(ended - start, 1)}
        faults.append({"fault": kind.name, "rank": rank, "strength": kind.strength, **mark})
        wait(story, plan.calm)
    length = math.floor((time.time() - start) / INTERVAL_S)
    seconds = length * INTERVAL_S + SLACK_S
    kept = f'{SCRAPED[:-1]},__name__=~"{names}"}}'
    return {
        "interval": INTERVAL_S,
        "length": length,
        "faults": faults,
        "verdicts": {
            series_name(labels): notation(samples, start, length)
            for labels, samples in server.samples(VERDICTS, seconds)
        },
        "series": {
            series_name(labels): notation(samples, start, length)
            for labels, samples in server.samples(kept, seconds)
        },
    }


def wait(story: Story, seconds: float) -> None:
    """Let time pass, and look whether the job runs."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        story.check()
        time.sleep(min(1.0, left))


def fault_at(text: str) -> tuple[Kind, int]:
    """Parse ``NAME[@RANK][=STRENGTH]``; rank 2 and the usual strength where none is told."""
    found = re.fullmatch(r"([a-z-]+)(?:@([0-9]+))?(?:=([0-9.]+))?", text)
    if not found or found[1] not in KINDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME[@RANK][=STRENGTH]: {', '.join(KINDS)}"
        )
    kind = KINDS[found[1]]
    return replace(kind, strength=float(found[3] or kind.strength)), int(found[2] or 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Record; 0 done, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m lab.record", description=__doc__)
    parser.add_argument("--programs", type=Path, required=True, help="see tools/prometheus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", action="append", type=fault_at, default=[])
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--healthy", type=float, default=60, help="seconds before the first fault")
    parser.add_argument("--during", type=float, default=40, help="seconds with each fault")
    parser.add_argument("--calm", type=float, default=40, help="seconds after each fault")
    parser.add_argument("--rules", type=Path, action="append", default=[])
    parser.add_argument("--names", default=".+", help="regular expression of the metrics to keep")
    options = parser.parse_args(argv)
    if any(rank >= options.world for _, rank in options.fault):
        parser.error("a fault is at a rank that is not there")
    plan = Plan(
        faults=options.fault, healthy=options.healthy, during=options.during, calm=options.calm
    )
    story = Story(display=Narration(), pace=Pace(), world=options.world)
    try:
        with ending_signals(), ExitStack() as stack:
            stack.enter_context(story)
            server = stack.enter_context(
                Prometheus(
                    programs=options.programs,
                    directory=story.cluster.directory / "prometheus",
                    targets=targets_of(story),
                    rules=options.rules,
                    interval_s=INTERVAL_S,
                )
            )
            made = record(story, server, plan, options.names)
        options.out.write_text(json.dumps(made, indent=0) + "\n")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except (StoryError, AdmissionError, ToolError, UnsupportedError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
