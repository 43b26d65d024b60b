"""The command line of the fault lab."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from lab import __version__
from lab.admission import AdmissionError
from lab.commands import ToolError
from lab.demo import Judge, Judged, judge_of, programs_or_why, said
from lab.display import PLAIN_WIDTH, Narration, display_for, summary
from lab.evalreport import markdown, plot
from lab.evaluation import FULL_SEED, QUICK_SEED, Record, evaluate, make_plan
from lab.faults import KINDS, Kind
from lab.interrupts import ending_signals
from lab.job import NAMESPACE, WORKLOADS, Workload
from lab.podspec import UnsupportedError
from lab.scoring import EXPECTED
from lab.signals import SIGNALS
from lab.story import Finding, Pace, Story, StoryError

DONE, FAILED = 0, 1
WORLD = 4
QUICK_F1 = 0.8
STORY = ("throttle", "loss", "latency")

DESCRIPTION = """\
Runs a training job of four pods on this machine, each with a kitty sidecar that the real
webhook put there, and injects faults into one of them. Everything is real: TLS, admission
reviews, namespaces, TCP, /proc. It needs root, and leaves nothing behind.
"""
EVAL = """\
Runs a job through faults of known kind, rank, strength and time while a real Prometheus scrapes
it every five seconds and evaluates the shipped rules; scores what the verdict series said. Trials
come in an order that the seed gives, two ranks for each fault and strength: about 50 minutes.
"""
EXIT_STATUS = "exit status: 0 done, 1 failed or the faulted rank was not the outlier, 2 wrong usage"


def fault_list() -> str:
    """Return the faults for ``--help``."""
    lines = ["faults, with their usual strength:"]
    for kind in KINDS.values():
        strength = f"{kind.strength:g} {kind.unit}"
        lines.append(f"  {kind.name:9} {strength:12} {kind.summary}; shows by {kind.signals[0]}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    epilog = f"{fault_list()}\n\n{EXIT_STATUS}"
    top = argparse.ArgumentParser(
        prog="kitty-lab", description=DESCRIPTION, epilog=epilog, formatter_class=raw
    )
    top.add_argument("--version", action="version", version=f"kitty-lab {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="the whole story in under a minute and a half",
        description="Admit four pods, start them, inject faults into one rank, and sum up.",
        epilog=epilog,
        formatter_class=raw,
    )
    demo.add_argument(
        "--fault",
        choices=[*KINDS, "all"],
        help=f"only this fault, or all of them (default: {', '.join(STORY)})",
    )
    single = commands.add_parser(
        "run",
        help="one fault",
        description="Admit four pods, start them, and inject one fault into one rank.",
        epilog=epilog,
        formatter_class=raw,
    )
    single.add_argument("fault", choices=list(KINDS), metavar="FAULT", help=", ".join(KINDS))
    single.add_argument(
        "--seconds", type=seconds, default=10.0, help="how long it lasts, 1 to 3600 (default 10)"
    )
    single.add_argument(
        "--calm", type=seconds, default=5.0, help="how long to watch before it (default 5)"
    )
    single.add_argument("--strength", type=positive, help="in the fault's unit (default: as below)")
    for command in (demo, single):
        command.add_argument(
            "--workload",
            choices=list(WORKLOADS),
            default="ring",
            help="the lab's own trainer, or PyTorch's DDP over gloo (default ring)",
        )
        command.add_argument(
            "--rank",
            type=rank_number,
            default=2,
            help=f"the rank to hit, 0 to {WORLD - 1} (default 2)",
        )
        command.add_argument(
            "--json", action="store_true", help="the summary as JSON on stdout, events on stderr"
        )
    add_eval(commands)
    return top


def add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command ``eval``."""
    command = commands.add_parser(
        "eval",
        help="score the verdicts of the shipped rules against known faults",
        description=EVAL,
        epilog=f"exit status: 0 done, 1 failed or below the bar of --quick "
        f"(F1 {QUICK_F1:g}, no false verdict in healthy time), 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--quick", action="store_true", help="each fault once, at its usual strength: 8 minutes"
    )
    command.add_argument(
        "--workload", choices=list(WORKLOADS), default="ring", help="as of demo (default ring)"
    )
    command.add_argument(
        "--seed",
        type=int,
        help=f"of order and ranks (default {FULL_SEED}; with --quick {QUICK_SEED})",
    )
    command.add_argument(
        "--fault", action="append", choices=list(EXPECTED), help="only this; may be given again"
    )
    command.add_argument(
        "--healthy",
        type=positive,
        metavar="MINUTES",
        help="without a fault, before the first (default 7, with --quick 1)",
    )
    command.add_argument(
        "--minutes", type=positive, help="begin no fault after that; the rest is left for --resume"
    )
    command.add_argument(
        "--resume", action="store_true", help="go on with what is in --out, by the same plan"
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("artifacts/eval"),
        help="folder for eval.json, eval.md and eval.svg (default artifacts/eval)",
    )


def rank_number(text: str) -> int:
    """Parse a rank."""
    if text not in map(str, range(WORLD)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank: 0 to {WORLD - 1}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a length of time."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 3600")
    return value


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def tell(
    kinds: Sequence[Kind],
    *,
    rank: int,
    strength: float | None,
    pace: Pace,
    workload: Workload,
    judged: bool,
    as_json: bool,
) -> int:
    """Run the job and the faults, one after the other; the exit status.

    Args:
        kinds: The faults.
        rank: Where they are.
        strength: The usual ones where None.
        pace: Lengths of the parts.
        workload: What the ranks run.
        judged: Whether a Prometheus with the shipped rules is asked for its verdict.
        as_json: The summary for machines.
    """
    start = time.monotonic()
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=PLAIN_WIDTH)
    programs = programs_or_why() if judged else None
    with (
        display_for(console) as display,
        Story(display=display, pace=pace, workload=workload) as story,
        judge_of(story, programs) if programs else nullcontext(Judge()) as judge,
    ):
        for kind in kinds:
            try:
                if judged:
                    judge.inject(story, kind, rank)
                else:
                    story.inject(kind, rank, strength)
            except ToolError as error:
                if len(kinds) == 1:
                    raise
                display.say(f"left out, it cannot be made here: {error}")
        display.say("ending the job")
    duration = time.monotonic() - start
    if as_json:
        print(json.dumps(report(story, judge, duration), indent=2))
    else:
        print()
        for line in summary(story, story.findings):
            print(line)
        for line in closing(judge):
            print(line)
        print(f"{duration:.0f} s in all; nothing of it is left on this machine")
    named = [finding.named() for finding in story.findings]
    return DONE if named and all(named) else FAILED


def closing(judge: Judge) -> list[str]:
    """Return the verdict of each fault, in a sentence."""
    if judge.server is None:
        return [f"no verdicts: {judge.why_not}"] if judge.why_not else []
    lines = ["", "What the shipped rules said, in a Prometheus that scrapes every 5 s:"]
    lines += [
        f"  {judged.finding.kind.name} at rank {judged.finding.rank}: {said(judged)}"
        for judged in judge.judged
    ]
    return [*lines, ""]


def run_eval(options: argparse.Namespace) -> int:
    """Evaluate; the exit status."""
    quick = bool(options.quick)
    seed = options.seed if options.seed is not None else QUICK_SEED if quick else FULL_SEED
    plan = make_plan(
        workload=options.workload,
        seed=seed,
        quick=quick,
        faults=options.fault or tuple(EXPECTED),
        healthy_minutes=options.healthy,
    )
    folder: Path = options.out
    try:
        record = evaluate(
            plan,
            folder=folder,
            display=Narration(),
            minutes=options.minutes,
            resume=bool(options.resume),
        )
    except (KeyboardInterrupt, StoryError, ToolError):
        with suppress(OSError, ValueError):
            write_report(Record.read(folder), folder)  # of what there is
        raise
    print(write_report(record, folder))
    result = record.score()
    good = (result.f1() or 0) >= QUICK_F1 and not result.false_healthy()
    return FAILED if quick and not good else DONE


def write_report(record: Record, folder: Path) -> str:
    """Write the report and its plot; the report's text."""
    (folder / "eval.svg").write_text(plot(record))
    text = markdown(record, plot_name="eval.svg")
    (folder / "eval.md").write_text(text)
    return text


def report(story: Story, judge: Judge, duration: float) -> dict[str, Any]:
    """Return the summary for machines."""
    return {
        "job": story.workload.name,
        "namespace": NAMESPACE,
        "ranks": [
            {
                "rank": rank,
                "pod": pod.name,
                "node": pod.placement.node,
                "address": pod.link.address,
                "admission_seconds": round(story.answers[rank].duration_s, 4),
                "patch_operations": story.answers[rank].operations,
            }
            for rank, pod in story.pods.items()
        ],
        "notes": story.cluster.notes,
        "faults": [finding_report(finding) for finding in story.findings],
        "verdicts": None
        if judge.server is None
        else [verdict_report(judged) for judged in judge.judged],
        "no_verdicts_because": judge.why_not,
        "passed": all(finding.named() for finding in story.findings),
        "duration_seconds": round(duration, 1),
    }


def verdict_report(judged: Judged) -> dict[str, Any]:
    """Return what the rules said of one fault."""
    return {
        "fault": judged.finding.kind.name,
        "rank": judged.finding.rank,
        "expected_class": EXPECTED[judged.finding.kind.name],
        "right": judged.right(),
        "detected_after_seconds": judged.after_s,
        "verdict": None if judged.verdict is None else asdict(judged.verdict),
        "others": [asdict(verdict) for verdict in judged.others],
    }


def finding_report(finding: Finding) -> dict[str, Any]:
    """Return one fault and what every signal said of it."""
    return {
        "fault": finding.kind.name,
        "rank": finding.rank,
        "strength": finding.strength,
        "unit": finding.kind.unit,
        "started_timestamp_seconds": round(finding.started, 3),
        "stopped_timestamp_seconds": round(finding.stopped, 3),
        "expected_signals": list(finding.kind.signals),
        "named": finding.named(),
        "step_seconds": {"before": finding.step_before, "during": finding.step_during},
        "signals": {
            name: {
                "unit": SIGNALS[name].unit,
                "outlier": comparison.outlier,
                "peers_median": comparison.peers_median(finding.rank),
                "before": comparison.before,
                "during": comparison.during,
                "excess": comparison.excess,
            }
            for name, comparison in finding.comparisons.items()
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 done, 1 failed or the faulted rank was not the outlier, 2 wrong usage.
    """
    options = parser().parse_args(argv)
    if options.command == "run" and (options.strength or 0) > (kind := KINDS[options.fault]).most:
        parser().error(f"argument --strength: more than {kind.most:g} {kind.unit}")
    if os.geteuid() != 0:
        print("kitty-lab: it makes namespaces and links: run it as root", file=sys.stderr)
        return FAILED
    if options.command == "demo":
        names = STORY if options.fault is None else (options.fault,)
        kinds = list(KINDS.values()) if options.fault == "all" else [KINDS[name] for name in names]
        pace, strength = Pace(), None
    elif options.command == "eval":
        return guarded(lambda: run_eval(options))
    else:
        kinds, strength = [KINDS[options.fault]], options.strength
        pace = Pace(before=options.calm, fault=options.seconds)
    return guarded(
        lambda: tell(
            kinds,
            rank=options.rank,
            strength=strength,
            pace=pace,
            workload=WORKLOADS[options.workload],
            judged=options.command == "demo",
            as_json=options.json,
        )
    )


def guarded(work: Callable[[], int]) -> int:
    """Return the exit status of some work; what is expected to fail is said in a line."""
    try:
        with ending_signals():
            return work()
    except KeyboardInterrupt:
        print("kitty-lab: interrupted; everything was removed", file=sys.stderr)
    except (StoryError, AdmissionError, ToolError, UnsupportedError, OSError, ValueError) as error:
        print(f"kitty-lab: {error}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
