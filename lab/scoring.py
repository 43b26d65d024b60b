"""Scores verdicts against the faults that were really there. Nothing here runs anything.

What counts is what the verdict series said: each is cut into episodes (evaluations in a row), and
an episode is right or wrong as a whole. Times are seconds since the epoch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from lab.judge import Said

NOTHING, WRONG_RANK, NO_DATA = "nothing", "wrong rank", "no data"

# Written down before anything was scored.
EXPECTED = {
    "latency": "network-latency",
    "loss": "network-loss",
    "throttle": "network-throttle",
    "cpu": "cpu",
    "quota": "cpu",
    "pause": "paused",
    "slow-input": "input",
}
# The same for what only a stub of the GPU's driver can do; no plan of the lab has it.
EXPECTED_ON_STUB = {
    "gpu-heat": "gpu",
    "gpu-heat-older-driver": "gpu",
    "gpu-power-cap": NOTHING,
}
UNNAMED = frozenset({"path", "inconclusive"})  # they accuse no rank


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A fault as it was made.

    Attributes:
        fault: Name of its kind.
        level: How hard it is to see: ``usual``, ``mild`` or ``hard``.
        strength: In the kind's unit.
        rank: Where it was.
        begin: When it was on.
        end: When it was off again.
        held_out: Whether its strength was kept from those who tune.
        step_before: The trainers' own median step in the calm before, seconds.
        step_during: The same with the fault; None when no step ended.
    """

    fault: str
    level: str
    strength: float
    rank: int
    begin: float
    end: float
    held_out: bool = False
    step_before: float | None = None
    step_during: float | None = None

    @property
    def expected(self) -> str:
        """The class that is right; ``nothing`` of what is no fault, though it looks like one."""
        return (EXPECTED | EXPECTED_ON_STUB)[self.fault]

    @property
    def control(self) -> bool:
        """Whether it is no fault: it lasts in healthy time, and nothing is to be said of it."""
        return self.expected == NOTHING


@dataclass(frozen=True, kw_only=True)
class Session:
    """What happened while one job ran.

    Attributes:
        start: When scrapes began.
        end: When the last was seen.
        trials: In order, without overlap.
        said: The verdict series.
        heartbeats: Evaluations that saw the job.
    """

    start: float
    end: float
    trials: Sequence[Trial]
    said: Sequence[Said]
    heartbeats: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A verdict from its first evaluation to its last."""

    rank: str
    kind: str
    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one trial was judged.

    Attributes:
        trial: The fault.
        said: Class that was said of the right rank most of the time, or ``nothing``,
            ``wrong rank``, ``no data``.
        right: Whether rank and class were right at some evaluation with the fault on; of a
            control, whether nothing was said.
        rank_right: Whether the rank was right, whatever the class.
        detected_s: From the fault's begin to the first right verdict.
        cleared_s: From its end to the first evaluation at which nothing is said of the rank;
            None where that was not seen.
        flaps: How often the right verdict came back after it had gone, with the fault on.
    """

    trial: Trial
    said: str
    right: bool = False
    rank_right: bool = False
    detected_s: float | None = None
    cleared_s: float | None = None
    flaps: int = 0


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A verdict that should not have been given.

    Attributes:
        episode: What was said.
        why: ``wrong class``, ``wrong rank``, ``not cleared`` or ``healthy``.
    """

    episode: Episode
    why: str


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of some sessions.

    Attributes:
        outcomes: One for each trial.
        false: Verdicts that should not have been given.
        healthy_s: Time without a fault, less the allowance after each.
        unnamed: Episodes that accuse no rank, while a fault was on.
    """

    outcomes: Sequence[Outcome]
    false: Sequence[Wrong]
    healthy_s: float
    unnamed: Sequence[Episode] = field(default_factory=tuple)

    def counted(self) -> list[Outcome]:
        """Return the outcomes of faults that there are data of."""
        return [o for o in self.outcomes if o.said != NO_DATA and not o.trial.control]

    def recall(self) -> float | None:
        """Return the share of faults whose rank and class were said while they were on."""
        return share([outcome.right for outcome in self.counted()])

    def precision(self) -> float | None:
        """Return the share of right verdicts: trials told right against those plus false ones."""
        right = sum(outcome.right for outcome in self.counted())
        return right / (right + len(self.false)) if right + len(self.false) else None

    def f1(self) -> float | None:
        """Return the harmonic mean of precision and recall."""
        return harmonic(self.precision(), self.recall())

    def rank_recall(self) -> float | None:
        """Return the share of faults whose rank was said, whatever the class."""
        return share([outcome.rank_right for outcome in self.counted()])

    def rank_precision(self) -> float | None:
        """Return the share of right ranks, whatever the class."""
        right = sum(outcome.rank_right for outcome in self.counted())
        wrong = sum(false.why != "wrong class" for false in self.false)
        return right / (right + wrong) if right + wrong else None

    def rank_f1(self) -> float | None:
        """Return the harmonic mean of the two."""
        return harmonic(self.rank_precision(), self.rank_recall())

    def false_healthy(self) -> int:
        """Return how many verdicts were given in healthy time."""
        return sum(false.why in ("healthy", "not cleared") for false in self.false)

    def false_an_hour(self) -> float | None:
        """Return the false verdicts of a healthy hour."""
        return 3600 * self.false_healthy() / self.healthy_s if self.healthy_s else None

    def times(self, name: str) -> list[float]:
        """Return ``detected_s`` or ``cleared_s`` of the outcomes that have it, in order."""
        values = (getattr(outcome, name) for outcome in self.counted())
        return sorted(value for value in values if value is not None)

    def confusion(self) -> dict[str, Counter[str]]:
        """Return for each fault how often each class was said."""
        table: dict[str, Counter[str]] = {}
        for outcome in self.counted():
            table.setdefault(outcome.trial.fault, Counter())[outcome.said] += 1
        return table


def share(values: Sequence[bool]) -> float | None:
    """Return the share of true values; None of none."""
    return sum(values) / len(values) if values else None


def harmonic(left: float | None, right: float | None) -> float | None:
    """Return the harmonic mean; None where one is unknown."""
    if left is None or right is None:
        return None
    return 2 * left * right / (left + right) if left + right else 0.0


def middle(values: Sequence[float]) -> float | None:
    """Return the median; None of none."""
    return median(values) if values else None


def up_to(end: float, said: Iterable[Said]) -> list[Said]:
    """Return what was said by a time."""
    cut = (
        replace(series, samples=tuple((when, v) for when, v in series.samples if when <= end))
        for series in said
    )
    return [series for series in cut if series.samples]


def episodes(said: Iterable[Said], interval: float) -> list[Episode]:
    """Cut verdict series where more than one evaluation in a row is without them."""
    found = []
    for series in said:
        first = last = None
        for when, _ in series.samples:
            if first is None or last is None:
                first = when
            elif when - last > 2.5 * interval:
                found.append(Episode(rank=series.rank, kind=series.kind, first=first, last=last))
                first = when
            last = when
        if first is not None and last is not None:
            found.append(Episode(rank=series.rank, kind=series.kind, first=first, last=last))
    return sorted(found, key=lambda episode: episode.first)


def score(sessions: Iterable[Session], *, interval: float, allowance: float) -> Score:
    """Score sessions.

    Args:
        sessions: What happened.
        interval: Between two evaluations, seconds.
        allowance: How long after a fault what is said of its rank is still no false verdict.
    """
    outcomes: list[Outcome] = []
    false: list[Wrong] = []
    unnamed: list[Episode] = []
    healthy = 0.0
    for session in sessions:
        told = episodes(session.said, interval)
        outcomes += [judge(trial, session, told, interval=interval) for trial in session.trials]
        faults = [trial for trial in session.trials if not trial.control]
        for episode in told:
            why = fault_of(episode, faults, allowance)
            if why == "unnamed":
                unnamed.append(episode)
            elif why:
                false.append(Wrong(episode=episode, why=why))
        healthy += healthy_time(replace(session, trials=faults), allowance)
    return Score(outcomes=outcomes, false=false, healthy_s=healthy, unnamed=unnamed)


def judge(trial: Trial, session: Session, told: Sequence[Episode], *, interval: float) -> Outcome:
    """Judge one trial by what was said while its session lasted."""
    seen = sum(trial.begin <= beat <= trial.end for beat in session.heartbeats)
    if seen < 0.5 * (trial.end - trial.begin) / interval:
        return Outcome(trial=trial, said=NO_DATA)
    rank = str(trial.rank)
    counts: Counter[tuple[str, str]] = Counter()
    for series in session.said:
        times = [when for when, _ in series.samples if trial.begin <= when <= trial.end]
        # What is left of the fault before this one is not about this one.
        if series.kind in UNNAMED or not times or _left_over(trial, session.trials, series):
            continue
        counts[series.rank, series.kind] += len(times)
    own = Counter({kind: n for (who, kind), n in counts.items() if who == rank})
    said = own.most_common(1)[0][0] if own else WRONG_RANK if counts else NOTHING
    begun = [
        episode
        for episode in told
        if (episode.rank, episode.kind) == (rank, trial.expected)
        and trial.begin <= episode.first <= trial.end
    ]
    return Outcome(
        trial=trial,
        said=said,
        right=said == NOTHING if trial.control else bool(begun),
        rank_right=bool(own),
        detected_s=begun[0].first - trial.begin if begun else None,
        cleared_s=_cleared(trial, session, told, interval) if own else None,
        flaps=max(0, len(begun) - 1),
    )


def _left_over(trial: Trial, trials: Sequence[Trial], series: Said) -> bool:
    """Whether a series is about a rank that the trial before had, and this one has not."""
    before = [other for other in trials if other.end <= trial.begin]
    return bool(before) and series.rank == str(before[-1].rank) != str(trial.rank)


def _cleared(
    trial: Trial, session: Session, told: Sequence[Episode], interval: float
) -> float | None:
    """Return when nothing was said of the rank any more; None where that was not seen."""
    last = max(
        (
            episode.last
            for episode in told
            if episode.rank == str(trial.rank) and episode.first <= trial.end < episode.last
        ),
        default=None,
    )
    if last is None:
        return 0.0
    again = [t.begin for t in session.trials if t.rank == trial.rank and t.begin > trial.end]
    if last + interval > min([*again, session.end]):
        return None
    return last + interval - trial.end


def fault_of(episode: Episode, trials: Sequence[Trial], allowance: float) -> str:
    """Return why an episode is false, ``unnamed`` where it accuses no rank, empty if right."""
    near = [trial for trial in trials if trial.begin <= episode.first <= trial.end + allowance]
    if not near:
        return "healthy"
    own = [trial for trial in near if episode.rank == str(trial.rank)]
    if not own:
        return "unnamed" if episode.kind in UNNAMED else "wrong rank"
    if all(trial.expected != episode.kind for trial in own):
        return "wrong class"
    if episode.last > max(trial.end for trial in own) + allowance:
        return "not cleared"
    return ""


def healthy_time(session: Session, allowance: float) -> float:
    """Return the seconds without a fault, less the allowance after each."""
    healthy, since = 0.0, session.start
    for trial in session.trials:
        healthy += max(0.0, trial.begin - since)
        since = trial.end + allowance
    return healthy + max(0.0, session.end - since)


def by_level(score_: Score) -> Mapping[tuple[str, str], list[Outcome]]:
    """Return the outcomes by fault and level, in the order of the expectation table."""
    table: dict[tuple[str, str], list[Outcome]] = {}
    levels = ("usual", "mild", "hard")
    place = {name: number for number, name in enumerate(EXPECTED)}
    for outcome in sorted(
        score_.outcomes,
        key=lambda o: (place[o.trial.fault], levels.index(o.trial.level), o.trial.rank),
    ):
        table.setdefault((outcome.trial.fault, outcome.trial.level), []).append(outcome)
    return table
