"""Scores the verdicts: faults of known kind, rank and time against what the shipped rules say.

A plan of trials is made from a seed, and a job runs through it while a real Prometheus scrapes and
evaluates every five seconds. What happened is written after every trial, so that an interrupted
run keeps its trials and can go on.
"""

import json
import math
import os
import platform
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lab import __version__
from lab.commands import ToolError
from lab.faults import KINDS, Kind
from lab.job import SYSTEM_PYTHON, WORKLOADS
from lab.judge import INTERVAL_S, Said, find_programs, heartbeats, judging, verdicts
from lab.prometheus import Prometheus
from lab.scoring import EXPECTED, Score, Session, Trial, middle, score, up_to
from lab.story import Display, Story, StoryError

WORLD = 4
ALLOWANCE_S = 30.0
SETTLE_S = 35.0  # the rules say nothing of a job in its first 20 s
SLACK_S = 10.0  # of looking back, on top
FULL_SEED, QUICK_SEED = 2026, 1
JOB_ATTEMPTS = 3
RECORD = "eval.json"


@dataclass(frozen=True, kw_only=True)
class Level:
    """How strong a fault is.

    Attributes:
        name: ``usual``, ``mild`` or ``hard``: the last costs about a tenth of a step.
        strength: In the fault's unit.
        of_step: The strength is a multiple of the step time that the job has.
        held_out: It is kept from those who tune the rules.
    """

    name: str
    strength: float
    of_step: bool = False
    held_out: bool = False


LEVELS: Mapping[str, tuple[Level, ...]] = {
    "latency": (
        Level(name="usual", strength=50),
        Level(name="mild", strength=20, held_out=True),
        Level(name="hard", strength=4),
    ),
    "loss": (
        Level(name="usual", strength=3),
        Level(name="mild", strength=1.5, held_out=True),
        Level(name="hard", strength=0.5),
    ),
    "throttle": (
        Level(name="usual", strength=20),
        Level(name="mild", strength=80),
        Level(name="hard", strength=400),
    ),
    "cpu": (
        Level(name="usual", strength=5),
        Level(name="mild", strength=3),
        Level(name="hard", strength=1),
    ),
    "quota": (
        Level(name="usual", strength=5),
        Level(name="mild", strength=10),
        Level(name="hard", strength=15),
    ),
    "pause": (
        Level(name="usual", strength=100),
        Level(name="mild", strength=40),
        Level(name="hard", strength=10),
    ),
    "slow-input": (
        Level(name="usual", strength=3, of_step=True),
        Level(name="mild", strength=1.5, of_step=True),
        Level(name="hard", strength=1.1, of_step=True),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A trial that is to be made."""

    fault: str
    level: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does.

    Attributes:
        workload: Name of the job.
        seed: Of the order and the ranks.
        quick: The usual strengths at one rank only.
        trials: In order.
        fault_s: How long each lasts.
        calm_s: How long after each.
        healthy_s: The stretch without a fault, before the first.
    """

    workload: str
    seed: int
    quick: bool
    trials: tuple[Planned, ...]
    fault_s: float
    calm_s: float
    healthy_s: float


def make_plan(
    *,
    workload: str,
    seed: int,
    quick: bool,
    faults: Sequence[str] = tuple(EXPECTED),
    healthy_minutes: float | None = None,
) -> Plan:
    """Return the plan of a seed: in random order, no rank and no class twice in a row."""
    if healthy_minutes is None:
        healthy_minutes = 1 if quick else 7
    chance = random.Random(seed)  # noqa: S311 -- an order, not a secret
    ranks = 1 if quick else 2
    waiting = [
        Planned(fault=fault, level=level.name, rank=rank)
        for fault in faults
        for level in (LEVELS[fault][:1] if quick else LEVELS[fault])
        for rank in chance.sample(range(WORLD), ranks)
    ]
    chance.shuffle(waiting)
    trials: list[Planned] = []
    while waiting:
        trials.append(waiting.pop(_next_one(waiting, trials[-1:])))
    return Plan(
        workload=workload,
        seed=seed,
        quick=quick,
        trials=tuple(trials),
        fault_s=30 if quick else 35,
        calm_s=25,
        healthy_s=60 * healthy_minutes,
    )


def _next_one(waiting: Sequence[Planned], before: Sequence[Planned]) -> int:
    """Return the place of the first that has neither rank nor class of the one before.

    Of a rank that has many left, so that not all of one are left at the end.
    """
    left = Counter(planned.rank for planned in waiting)

    def likeness(number: int) -> tuple[int, int]:
        one = waiting[number]
        alike = sum(
            2 * (one.rank == other.rank) + (EXPECTED[one.fault] == EXPECTED[other.fault])
            for other in before
        )
        return alike, -left[one.rank]

    return min(range(len(waiting)), key=likeness)


def level_of(planned: Planned, levels: Mapping[str, Sequence[Level]] = LEVELS) -> Level:
    """Return the level that a planned trial names."""
    return next(level for level in levels[planned.fault] if level.name == planned.level)


def open_story(display: Display, plan: Plan) -> Story:
    """Return the job of a plan, to be entered."""
    return Story(display=display, world=WORLD, workload=WORKLOADS[plan.workload])


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What trials are made of; by default the lab's own faults on its own jobs.

    Attributes:
        kinds: The faults, by name.
        levels: Their strengths, by name.
        story: Makes the job that is hurt.
    """

    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    levels: Mapping[str, Sequence[Level]] = field(default_factory=lambda: LEVELS)
    story: Callable[[Display, Plan], AbstractContextManager[Story]] = open_story


@dataclass(kw_only=True)
class Record:
    """What happened so far; it is written as JSON and read again.

    Attributes:
        plan: What is to happen.
        place: Where it happens.
        sessions: One for each job that ran.
        failures: Trials that could not be made, with the reason.
    """

    plan: Plan
    place: Mapping[str, Any]
    sessions: list[Session]
    failures: list[tuple[Planned, str]]

    def left(self) -> list[Planned]:
        """Return the trials that were neither made nor failed."""
        done = [
            (trial.fault, trial.level, trial.rank)
            for session in self.sessions
            for trial in session.trials
        ]
        done += [(planned.fault, planned.level, planned.rank) for planned, _ in self.failures]
        return [t for t in self.plan.trials if (t.fault, t.level, t.rank) not in done]

    def healthy_left(self) -> float:
        """Return how much of the stretch without a fault is missing."""
        had = sum(
            (session.trials[0].begin if session.trials else session.end) - session.start
            for session in self.sessions
        )
        return max(0.0, self.plan.healthy_s - had)

    def score(self) -> Score:
        """Return the score so far."""
        return score(self.sessions, interval=INTERVAL_S, allowance=ALLOWANCE_S)

    def write(self, folder: Path) -> None:
        """Write what happened and its score, at once or not at all."""
        text = json.dumps(asdict(self) | {"score": summary(self.score())}, indent=1)
        part = folder / f"{RECORD}.part"
        part.write_text(text + "\n")
        part.rename(folder / RECORD)

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read what ``write`` wrote.

        Raises:
            OSError: It cannot be read.
            ValueError: There is none, or it is not of this kind.
        """
        try:
            data = json.loads((folder / RECORD).read_text())
        except FileNotFoundError:
            raise ValueError(f"{folder}: no {RECORD} to go on with") from None
        except ValueError as error:
            raise ValueError(f"{folder / RECORD}: {error}") from error
        try:
            plan = data["plan"]
            plan["trials"] = tuple(Planned(**planned) for planned in plan["trials"])
            return cls(
                plan=Plan(**plan),
                place=data["place"],
                sessions=[_session(session) for session in data["sessions"]],
                failures=[(Planned(**planned), why) for planned, why in data["failures"]],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / 'eval.json'} is of another version: {error}") from error


def _session(data: Mapping[str, Any]) -> Session:
    said = [
        Said(**{**series, "samples": tuple((when, value) for when, value in series["samples"])})
        for series in data["said"]
    ]
    trials = [Trial(**trial) for trial in data["trials"]]
    return Session(**{**data, "said": said, "trials": trials})


def summary(result: Score) -> dict[str, Any]:
    """Return a score for machines."""
    return {
        "trials": len(result.outcomes),
        "counted": len(result.counted()),
        "precision": result.precision(),
        "recall": result.recall(),
        "f1": result.f1(),
        "rank_precision": result.rank_precision(),
        "rank_recall": result.rank_recall(),
        "rank_f1": result.rank_f1(),
        "median_seconds_to_detect": middle(result.times("detected_s")),
        "median_seconds_to_clear": middle(result.times("cleared_s")),
        "worst_seconds_to_clear": max(result.times("cleared_s"), default=None),
        "healthy_seconds": round(result.healthy_s, 1),
        "false_in_healthy_time": result.false_healthy(),
        "false_an_hour": result.false_an_hour(),
        "confusion": {fault: dict(counts) for fault, counts in result.confusion().items()},
        "wrong": [{"why": wrong.why, **asdict(wrong.episode)} for wrong in result.false],
        "outcomes": [
            {
                "fault": outcome.trial.fault,
                "level": outcome.trial.level,
                "strength": outcome.trial.strength,
                "rank": outcome.trial.rank,
                "said": outcome.said,
                "right": outcome.right,
                "detected_seconds": outcome.detected_s,
                "cleared_seconds": outcome.cleared_s,
                "flaps": outcome.flaps,
                "slowdown": slowdown(outcome.trial),
            }
            for outcome in result.outcomes
        ],
    }


def slowdown(trial: Trial) -> float | None:
    """Return how much longer a step took with the fault, as a share; None where none ended."""
    if not trial.step_before or trial.step_during is None:
        return None
    return trial.step_during / trial.step_before - 1


def place(programs: Path, workload: str) -> dict[str, Any]:
    """Return where and with what a run happens."""
    version = subprocess.run(
        [programs / "prometheus", "--version"], capture_output=True, text=True, check=False
    )
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "prometheus": (version.stdout or version.stderr).split("\n")[0].split(" (")[0],
        "kitty": __version__,
        "load_at_start": os.getloadavg()[0],
    }
    if workload == "torch":
        look = "import torch; print(torch.__version__)"
        done = subprocess.run(
            [SYSTEM_PYTHON, "-c", look], capture_output=True, text=True, check=False
        )
        found["torch"] = done.stdout.strip()
    return found


class Evaluation:
    """A run through a plan.

    Args:
        record: What happened so far.
        display: Told of everything.
        folder: Where the record is written.
        programs: The folder of Prometheus.
        deadline: Monotonic time after which no new trial begins.
        ground: What trials are made of.
    """

    def __init__(
        self,
        *,
        record: Record,
        display: Display,
        folder: Path,
        programs: Path,
        deadline: float,
        ground: Ground,
    ) -> None:
        self._record = record
        self._display = display
        self._folder = folder
        self._programs = programs
        self._deadline = deadline
        self._ground = ground
        self._loads: list[float] = []
        self._begun: float | None = None  # of a fault that has not ended

    def run(self) -> None:
        """Make the trials that are left; a job that dies is started anew.

        Raises:
            StoryError: The job died too often.
            ToolError: Prometheus or a fault could not be started.
        """
        for attempt in range(JOB_ATTEMPTS):
            try:
                self._session()
            except StoryError as error:
                self._display.say(f"the job ended: {error}")
                if attempt == JOB_ATTEMPTS - 1:
                    raise
            else:
                return

    def _session(self) -> None:
        plan = self._record.plan
        chance = random.Random(plan.seed)  # noqa: S311 -- moments, not a secret
        with (
            self._ground.story(self._display, plan) as story,
            judging(story, self._programs) as server,
        ):
            start = time.time()
            trials: list[Trial] = []
            self._record.sessions.append(
                Session(start=start, end=start, trials=trials, said=[], heartbeats=[])
            )
            try:
                self._wait(story, max(SETTLE_S, self._record.healthy_left()))
                self._keep(server, trials)
                for planned in self._affordable(self._record.left()):
                    self._try(story, planned, trials)
                    # A fault may begin at any moment between two evaluations.
                    self._wait(story, plan.calm_s + chance.uniform(0, INTERVAL_S))
                    self._keep(server, trials)
            except (StoryError, KeyboardInterrupt):
                with suppress(OSError):
                    self._keep(server, trials)
                raise

    def _affordable(self, left: Sequence[Planned]) -> Iterator[Planned]:
        for number, planned in enumerate(left):
            if time.monotonic() + self._record.plan.fault_s > self._deadline:
                self._display.say(f"out of time: {len(left) - number} trials are left")
                return
            yield planned

    def _try(self, story: Story, planned: Planned, trials: list[Trial]) -> None:
        try:
            self._trial(story, planned, trials)
        except ToolError as error:
            self._display.say(f"{planned.fault} cannot be made here: {error}")
            self._record.failures.append((planned, str(error)))
            self._begun = None

    def _trial(self, story: Story, planned: Planned, trials: list[Trial]) -> None:
        plan, kind = self._record.plan, self._ground.kinds[planned.fault]
        level = level_of(planned, self._ground.levels)
        now = time.time()
        before = story.step_time(now - plan.calm_s / 2, now)
        strength = level.strength
        if level.of_step:
            strength = round(strength * 1000 * (before or 0.25), 1)
        text = f"{kind.name} {strength:g} {kind.unit} ({level.name}) at rank {planned.rank}"
        begin = self._begun = time.time()
        with kind.inject(story.cluster, story.pods[planned.rank], strength):
            self._display.mark(f"fault on: {text}")
            self._wait(story, plan.fault_s)
            end = time.time()
        self._display.mark(f"fault off: {text}")
        trials.append(
            Trial(
                fault=planned.fault,
                level=level.name,
                strength=strength,
                rank=planned.rank,
                begin=round(begin, 3),
                end=round(end, 3),
                held_out=level.held_out,
                step_before=before,
                step_during=story.step_time(begin, end),
            )
        )
        self._begun = None

    def _keep(self, server: Prometheus, trials: Sequence[Trial]) -> None:
        # What an unfinished fault made the rules say is neither right nor false.
        session, now = self._record.sessions[-1], self._begun or time.time()
        back = time.time() - session.start + SLACK_S
        self._record.sessions[-1] = replace(
            session,
            end=now,
            trials=trials,
            said=up_to(now, verdicts(server, back)),
            heartbeats=heartbeats(server, back),
        )
        self._loads.append(os.getloadavg()[0])
        self._record.place = {
            **self._record.place,
            "load_median": middle(self._loads),
            "load_highest": max(self._loads),
            "seconds": round(sum(s.end - s.start for s in self._record.sessions)),
        }
        self._record.write(self._folder)
        if trials:
            last = self._record.score().outcomes[-1]
            when = "" if last.detected_s is None else f", right after {last.detected_s:.0f} s"
            self._display.say(f"the rules said: {last.said}{when}")

    @staticmethod
    def _wait(story: Story, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            story.check()
            time.sleep(min(1.0, left))


def put_aside(folder: Path) -> None:
    """Rename the record that is there: an hour's work is not written over."""
    if (folder / RECORD).exists():
        number = 1 + len(list(folder.glob(f"{RECORD}.[0-9]*")))
        (folder / RECORD).rename(folder / f"{RECORD}.{number}")


def evaluate(
    plan: Plan,
    *,
    folder: Path,
    display: Display,
    minutes: float | None,
    resume: bool,
    ground: Ground | None = None,
) -> Record:
    """Run a plan, or what is left of it.

    Raises:
        StoryError: The job does not run.
        ToolError: Prometheus or a fault could not be started.
        OSError: The folder cannot be written, or there is nothing in it to go on with.
        ValueError: The plan in the folder is another one.
    """
    programs = find_programs()
    if resume:
        record = Record.read(folder)
        if record.plan != plan:
            raise ValueError(f"{folder}: what is there has another plan (seed, workload, quick)")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        put_aside(folder)
        record = Record(plan=plan, place=place(programs, plan.workload), sessions=[], failures=[])
    deadline = time.monotonic() + 60 * minutes if minutes else math.inf
    if record.left() or record.healthy_left():
        Evaluation(
            record=record,
            display=display,
            folder=folder,
            programs=programs,
            deadline=deadline,
            ground=ground or Ground(),
        ).run()
    return record
