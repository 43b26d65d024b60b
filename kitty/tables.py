"""Jobs and ranks as tables: colour on a terminal, the same marks without it elsewhere."""

import os
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kitty.job import Rank, Snapshot
from kitty.jobs import BLIND, INCONCLUSIVE, NO_DATA, OK, VERDICT, JobState
from kitty.signals import Signal
from kitty.text import clean, clock, duration, figure, several, shortened

STRONG, WEAK = 3.5, 2.0
"""z from which a signal names a cause, and from which it counts at all (docs/verdict.md)."""

STYLES = {
    OK: "green",
    VERDICT: "bold red",
    INCONCLUSIVE: "yellow",
    BLIND: "yellow",
    NO_DATA: "dim",
}
PLAIN_WIDTH = 200
PLACE_WIDTH = 24


def console() -> Console:
    """Return standard output; a pipe is wide and has no colour (rich knows NO_COLOR)."""
    made = Console(highlight=False)
    if made.is_terminal or os.environ.get("COLUMNS"):
        return made
    return Console(highlight=False, width=PLAIN_WIDTH)


def _table(*headings: str) -> Table:
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for heading in headings:
        drawn.add_column(heading, overflow="fold")
    return drawn


def jobs_table(jobs: Sequence[JobState], at: float) -> RenderableType:
    """Return the list of jobs."""
    drawn = _table("namespace", "job", "pods", "ranks", "health", "since")
    for column in drawn.columns[2:4]:
        column.justify = "right"
    for job in jobs:
        details = job.details()
        drawn.add_row(
            clean(job.namespace),
            clean(job.name),
            str(job.pods) if job.present else "-",
            str(job.ranks) if job.present else "-",
            Text(f"{job.health}: {details}" if details else job.health, style=STYLES[job.health]),
            "-" if job.since is None else f"{clock(job.since)} ({duration(at - job.since)})",
        )
    return drawn


def job_view(snapshot: Snapshot, *, limit: int | None, width: int, wrap: bool) -> RenderableType:
    """Return a job: the verdict, then its ranks.

    Args:
        snapshot: The job.
        limit: Ranks to show at most; None shows all.
        width: Columns of the terminal; signals that have no place are named below.
        wrap: Whether sentences may take several lines.
    """
    shown = snapshot.ranks if limit is None else snapshot.ranks[:limit]
    signals, hidden = _fitting(snapshot, shown, width)
    parts: list[RenderableType] = list(_head(snapshot))
    for part in parts:
        if isinstance(part, Text) and not wrap:
            part.no_wrap, part.overflow = True, "ignore"
    if snapshot.ranks:
        parts += [Text(), ranks_table(snapshot, shown, signals)]
    if (more := len(snapshot.ranks) - len(shown)) > 0:
        parts.append(Text(f"{several(more, 'more rank')} that stand out less (--all)", style="dim"))
    if hidden:
        names = ", ".join(signal.heading for signal in hidden)
        parts.append(Text(f"not shown for want of room: {names}", style="dim"))
    return Group(*parts)


def _head(snapshot: Snapshot) -> Iterator[Text]:
    style = STYLES[snapshot.state.health]
    for sentence in snapshot.headline():
        yield Text(sentence, style=style)
    limits = {verdict.kind: verdict.limit() for verdict in snapshot.state.verdicts}
    for kind, limit in limits.items():
        if limit:
            yield Text(f"Not told by {clean(kind)}: {limit}.", style="dim")
    if snapshot.sudden:
        yield Text(f"Sudden changes seen by sidecars: {shortened(snapshot.sudden)}.")
    if snapshot.unseen:
        yield Text(f"Not seen: {'; '.join(snapshot.unseen)}.", style="dim")


def _fitting(
    snapshot: Snapshot, shown: Sequence[Rank], width: int
) -> tuple[list[Signal], list[Signal]]:
    """Return the signals that have room, in their order, and those left out: the calmest."""
    cells = {
        signal.name: max(
            [len(signal.heading), len(figure(snapshot.medians.get(signal.name, 0), signal.unit))]
            + [len(_figure(rank, signal)) for rank in shown]
        )
        for signal in snapshot.signals
    }
    room = (
        width
        - 8
        - sum(
            min(PLACE_WIDTH, max([4, *(len(clean(name)) for name in names)])) + 2
            for names in ([r.pod for r in shown], [r.node for r in shown])
        )
    )
    calm = sorted(
        snapshot.signals,
        key=lambda signal: -max((r.z.get(signal.name, 0) for r in shown), default=0),
    )
    kept: set[str] = set()
    for signal in calm:
        room -= cells[signal.name] + 2
        if room < 0 and kept:
            break
        kept.add(signal.name)
    return (
        [signal for signal in snapshot.signals if signal.name in kept],
        [signal for signal in snapshot.signals if signal.name not in kept],
    )


def ranks_table(
    snapshot: Snapshot, shown: Sequence[Rank], signals: Sequence[Signal]
) -> RenderableType:
    """Return one row a rank below the job's medians; `!` marks what stands out."""
    drawn = _table("rank", "pod", "node")
    for column in drawn.columns[1:]:
        column.max_width = PLACE_WIDTH
    for signal in signals:
        drawn.add_column(signal.heading, justify="right", no_wrap=True)
    medians = [snapshot.medians.get(signal.name) for signal in signals]
    drawn.add_row(
        Text("median", style="dim"),
        "",
        "",
        *(
            Text("-" if median is None else figure(median, signal.unit) + " ", style="dim")
            for median, signal in zip(medians, signals, strict=True)
        ),
    )
    for rank in shown:
        drawn.add_row(
            clean(rank.rank) or "?",
            clean(rank.pod),
            clean(rank.node),
            *(_cell(rank, signal) for signal in signals),
        )
    return drawn


def _figure(rank: Rank, signal: Signal) -> str:
    if signal.name not in rank.values:
        return "- "
    mark = "!" if rank.z.get(signal.name, 0) >= WEAK else " "
    return figure(rank.values[signal.name], signal.unit) + mark


def _cell(rank: Rank, signal: Signal) -> Text:
    z = rank.z.get(signal.name, 0)
    style = "bold red" if z >= STRONG else "yellow" if z >= WEAK else ""
    return Text(_figure(rank, signal), style=style)
