"""Records what a Prometheus scrapes from the lab's job, calm and with faults, for tests of rules.

    python -m lab.record --programs FOLDER --out FILE [--fault F]... [--world N] [--rules FILE]

A recording is a JSON document: ``interval`` (seconds between two samples), ``faults`` (name, rank,
strength, first and last sample with the fault) and ``series`` (the notation of ``promtool test
rules``, by series).
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lab.admission import AdmissionError
from lab.cli import ending_signals
from lab.commands import ToolError
from lab.faults import KINDS
from lab.podspec import UnsupportedError
from lab.prometheus import Prometheus, Target
from lab.scrape import Window
from lab.story import Pace, Story, StoryError

INTERVAL_S = 5
SLACK_S = 15  # a series begins with the first scrape after its target is up
JOB_ANNOTATION = "kitty.k10s.dev/job"
HIT = 2

EVERYTHING = '{instance!=""}'


class Narration:
    """Tells what happens on standard error."""

    def say(self, text: str) -> None:
        """Tell one event."""
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def mark(self, text: str) -> None:
        """Tell the beginning or the end of a fault."""
        self.say(text)

    def show(self, story: Story, window: Window) -> None:
        """Show nothing: Prometheus looks."""


def targets_of(story: Story) -> list[Target]:
    """Return the sidecars with the labels that discovery gives them."""
    return [
        Target(
            address="{}:{}".format(*story.endpoint(pod)),
            namespace=pod.manifest["metadata"]["namespace"],
            pod=pod.name,
            node=pod.placement.node,
            job=pod.manifest["metadata"]["annotations"][JOB_ANNOTATION],
        )
        for pod in story.pods.values()
    ]


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
    if math.isnan(value):
        return "NaN"
    return f"{value:.10g}" if value == value else "NaN"


def series_name(labels: dict[str, str]) -> str:
    """Return a series as it is written in an expression."""
    inner = ",".join(
        f"{name}={json.dumps(value)}" for name, value in sorted(labels.items()) if name != "__name__"
    )
    return f"{labels['__name__']}{{{inner}}}"


def record(
    story: Story, server: Prometheus, faults: Sequence[str], *, calm: int, during: int
) -> dict[str, Any]:
    """Let the job run calm, then with each fault and calm after it; what Prometheus has of it."""
    start = time.time()
    marks = []
    wait(story, calm)
    for name in faults:
        kind = KINDS[name]
        hit = min(HIT, story.world - 1)
        began = time.time()
        with kind.inject(story.cluster, story.pods[hit], kind.strength):
            story.display.mark(f"{name} at rank {hit}")
            wait(story, during)
        ended = time.time()
        story.display.mark(f"{name} over")
        marks.append(
            {
                "fault": name,
                "rank": hit,
                "strength": kind.strength,
                "first": math.ceil((began - start) / INTERVAL_S),
                "last": math.floor((ended - start) / INTERVAL_S),
            }
        )
        wait(story, calm)
    length = math.floor((time.time() - start) / INTERVAL_S)
    found = server.samples(EVERYTHING, length * INTERVAL_S + SLACK_S)
    return {
        "interval": INTERVAL_S,
        "length": length,
        "start": start,
        "faults": marks,
        "series": {
            series_name(dict(labels)): notation(samples, start, length) for labels, samples in found
        },
    }


def wait(story: Story, seconds: float) -> None:
    """Let time pass, and look whether the job runs."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        story.check()
        time.sleep(min(1.0, left))


def main(argv: Sequence[str] | None = None) -> int:
    """Record; 0 done, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m lab.record", description=__doc__)
    parser.add_argument("--programs", type=Path, required=True, help="see tools/prometheus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", action="append", choices=list(KINDS), default=[])
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--calm", type=int, default=60, help="seconds before and after each fault")
    parser.add_argument("--during", type=int, default=60, help="seconds with each fault")
    parser.add_argument("--rules", type=Path, action="append", default=[])
    options = parser.parse_args(argv)
    story = Story(display=Narration(), pace=Pace(), world=options.world)
    try:
        with ending_signals(), ExitStack() as stack:
            stack.enter_context(story)
            server = stack.enter_context(
                Prometheus(
                    program=options.programs,
                    directory=story.cluster.directory / "prometheus",
                    targets=targets_of(story),
                    rules=options.rules,
                    interval_s=INTERVAL_S,
                )
            )
            made = record(
                story, server, options.fault, calm=options.calm, during=options.during
            )
        options.out.write_text(json.dumps(made, indent=1) + "\n")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except (StoryError, AdmissionError, ToolError, UnsupportedError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
