"""The report of an evaluation, for people: Markdown, and a plot."""

from collections.abc import Iterable, Sequence
from html import escape
from statistics import median

from lab.evaluation import ALLOWANCE_S, Record, level_of, slowdown
from lab.faults import KINDS
from lab.scoring import EXPECTED, NO_DATA, NOTHING, WRONG_RANK, Outcome, Score, by_level, middle

COLUMNS = (*dict.fromkeys(EXPECTED.values()), "path", NOTHING, WRONG_RANK, NO_DATA)


def number(value: float | None, form: str = ".3f", unit: str = "") -> str:
    """Write a figure; a dash where it is unknown."""
    return "-" if value is None else f"{value:{form}}{unit}"


def row(cells: Iterable[object]) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table in Markdown."""
    return [row(head), "|" + "---|" * len(head), *(row(cells) for cells in rows)]


def markdown(record: Record, *, plot_name: str) -> str:
    """Return the report in Markdown.

    Args:
        record: A run.
        plot_name: File name of the plot, beside the report.
    """
    result, plan = record.score(), record.plan
    lines = [
        f"# Evaluation of the verdict: workload {plan.workload}",
        "",
        circumstances(record),
        "",
        *table(("what", "figure"), headline(result)),
        "",
        f"![Time to detect]({plot_name})",
        "",
        "## By fault and strength",
        "",
        "Slower: a step's median with the fault against the calm before, from the trainers' logs.",
        "Held-out strengths are marked *.",
        "",
        *table(
            ("fault", "strength", "slower", "right", "rank right", "detected", "cleared", "said"),
            strength_rows(result),
        ),
        "",
        "## What was said, by fault",
        "",
        *table(("fault", *COLUMNS), confusion_rows(result)),
        "",
        "## Not detected",
        "",
        *missed(record, result),
        "",
        "## Said wrongly",
        "",
        *said_wrongly(record, result),
        "",
    ]
    return "\n".join(lines)


def circumstances(record: Record) -> str:
    """Return where, when and with what it was measured."""
    plan, place = record.plan, record.place
    parts = [
        f"{place['date']}",
        f"{'quick, ' if plan.quick else ''}seed {plan.seed}",
        (
            f"{len(record.score().outcomes)} of {len(plan.trials)} trials, {plan.fault_s:g} s each"
            f" with {plan.calm_s:g} s between, in {place['seconds'] / 60:.0f} minutes"
        ),
        f"{place['cores']} cores, kernel {place['kernel']}",
        (
            f"load {number(place['load_median'], '.1f')} at the median and"
            f" {number(place['load_highest'], '.1f')} at most"
        ),
        f"{place['prometheus']}, Python {place['python']}, kitty {place['kitty']}",
    ]
    if "torch" in place:
        parts.append(f"PyTorch {place['torch']}")
    return "; ".join(parts) + "."


def headline(result: Score) -> list[tuple[str, str]]:
    """Return the figures that are looked at first."""
    detected, cleared = result.times("detected_s"), result.times("cleared_s")
    return [
        ("rank and class: precision", number(result.precision())),
        ("rank and class: recall", number(result.recall())),
        ("rank and class: F1", number(result.f1())),
        (
            "rank alone: precision, recall, F1",
            (
                f"{number(result.rank_precision())}, {number(result.rank_recall())}, "
                f"{number(result.rank_f1())}"
            ),
        ),
        (
            "time to detect: median, longest",
            (
                f"{number(middle(detected), '.0f', ' s')}, "
                f"{number(max(detected, default=None), '.0f', ' s')}"
            ),
        ),
        (
            "time to clear: median, longest",
            (
                f"{number(middle(cleared), '.0f', ' s')}, "
                f"{number(max(cleared, default=None), '.0f', ' s')}"
            ),
        ),
        (
            f"false verdicts in healthy time (from {ALLOWANCE_S:g} s after each fault)",
            (
                f"{result.false_healthy()} in {result.healthy_s / 60:.1f} minutes: "
                f"{number(result.false_an_hour(), '.1f')} an hour"
            ),
        ),
        ("trials without data, not counted", str(sum(o.said == NO_DATA for o in result.outcomes))),
    ]


def strength_rows(result: Score) -> list[tuple[str, ...]]:
    """Return a row for each fault and strength."""
    return [
        (
            fault,
            strengths(outcomes),
            percent([slowdown(outcome.trial) for outcome in outcomes]),
            f"{sum(o.right for o in outcomes)} of {len(outcomes)}",
            f"{sum(o.rank_right for o in outcomes)} of {len(outcomes)}",
            listed(outcome.detected_s for outcome in outcomes),
            listed(outcome.cleared_s for outcome in outcomes),
            ", ".join(dict.fromkeys(outcome.said for outcome in outcomes)),
        )
        for (fault, _), outcomes in by_level(result).items()
    ]


def strengths(outcomes: Sequence[Outcome]) -> str:
    """Return the strength of trials of one fault and level."""
    values = sorted({outcome.trial.strength for outcome in outcomes})
    span = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
    mark = "*" if outcomes[0].trial.held_out else ""
    return f"{outcomes[0].trial.level}: {span} {KINDS[outcomes[0].trial.fault].unit}{mark}"


def percent(shares: Sequence[float | None]) -> str:
    """Return the median of shares in percent; no step ended where one is unknown."""
    known = [value for value in shares if value is not None]
    return f"{100 * median(known):.0f}%" if known else "no step ended"


def listed(values: Iterable[float | None]) -> str:
    """Return times in seconds."""
    known = [f"{value:.0f}" for value in values if value is not None]
    return ", ".join(known) + " s" if known else "-"


def confusion_rows(result: Score) -> list[tuple[str, ...]]:
    """Return what was said of each fault, how often; the right class is bold."""
    rows = []
    for fault, counts in result.confusion().items():
        cells = [str(counts[kind] or "") for kind in COLUMNS]
        right = COLUMNS.index(EXPECTED[fault])
        cells[right] = f"**{counts[EXPECTED[fault]]}**"
        rows.append((fault, *cells))
    return sorted(rows, key=lambda cells: list(EXPECTED).index(cells[0]))


def missed(record: Record, result: Score) -> list[str]:
    """Return a line for each fault that was not told right, or not made."""
    lines = [
        f"- {o.trial.fault} {o.trial.strength:g} {KINDS[o.trial.fault].unit} ({o.trial.level}) at "
        f"rank {o.trial.rank}, steps {percent([slowdown(o.trial)])} slower: {o.said}"
        for o in result.outcomes
        if not o.right
    ]
    lines += [
        f"- {planned.fault} ({level_of(planned).name}) could not be made: {why}"
        for planned, why in record.failures
    ]
    if left := record.left():
        lines.append(f"- {len(left)} trials were not made.")
    return lines or ["Nothing."]


def said_wrongly(record: Record, result: Score) -> list[str]:
    """Return a line for each false verdict, and for those that accuse no rank."""
    trials = [trial for session in record.sessions for trial in session.trials]

    def when(at: float) -> str:
        before = [trial for trial in trials if trial.begin <= at]
        if not before:
            return "before the first fault"
        last = before[-1]
        name = f"{last.fault} ({last.level}) at rank {last.rank}"
        if at <= last.end:
            return f"{at - last.begin:.0f} s into {name}"
        return f"{at - last.end:.0f} s after {name}"

    lines = [
        f"- {wrong.why}: {wrong.episode.kind} at rank {wrong.episode.rank or '(none)'} for "
        f"{wrong.episode.last - wrong.episode.first + 5:.0f} s, {when(wrong.episode.first)}"
        for wrong in result.false
    ]
    lines += [
        f"- accuses no rank, not counted: {episode.kind} for "
        f"{episode.last - episode.first + 5:.0f} s, {when(episode.first)}"
        for episode in result.unnamed
    ]
    return lines or ["Nothing."]


WIDTH, LEFT, TOP, LINE = 780, 250, 30, 22
COLOURS = {"right": "#2a7de1", "rank": "#e8a33d", "missed": "#c0392b"}


def plot(record: Record) -> str:
    """Return the times to detect as an SVG: a line for each fault and strength, a dot a trial."""
    result, longest = record.score(), record.plan.fault_s
    lines = list(by_level(result).items())
    height = TOP + LINE * len(lines) + 46
    right = WIDTH - 90

    def place(seconds: float) -> float:
        return LEFT + (right - LEFT) * seconds / longest

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="16">seconds from the fault to the right verdict</text>',
        f'<text x="{right + 14}" y="16">not said</text>',
    ]
    bottom = TOP + LINE * len(lines)
    for seconds in range(0, int(longest) + 1, 5):
        x = place(seconds)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{seconds}</text>')
    for number_, ((fault, _), outcomes) in enumerate(lines):
        y = TOP + LINE * number_ + LINE / 2
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(fault)} {escape(strengths(outcomes))}</text>"
        )
        for place_, outcome in enumerate(outcomes):
            x = (
                right + 24 + 14 * place_
                if outcome.detected_s is None
                else place(outcome.detected_s)
            )
            name = "right" if outcome.right else "rank" if outcome.rank_right else "missed"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[name]}" '
                f'fill-opacity="0.75"><title>rank {outcome.trial.rank}: '
                f"{escape(outcome.said)}</title></circle>"
            )
    texts = {"right": "rank and class", "rank": "rank, another class", "missed": "neither"}
    for number_, (name, text) in enumerate(texts.items()):
        x, y = LEFT + 150 * number_, height - 10
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 10}" y="{y}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
