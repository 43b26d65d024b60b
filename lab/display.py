"""How the story is told: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lab.scrape import Window
from lab.signals import SIGNALS
from lab.story import Finding, Story

STATES = "RSDTZ"
PLAIN_WIDTH = 110


@dataclass(frozen=True)
class Column:
    """One column of the table: its heading, the figures by rank, and how they are written.

    Attributes:
        heading: With the unit.
        figures: By rank; unknown ones are absent.
        floor: A figure this far over three times the peers' median is marked; None marks nothing.
        digits: After the point.
    """

    heading: str
    figures: dict[int, float]
    floor: float | None
    digits: int = 1

    def cell(self, rank: int) -> Text:
        """Return the figure of a rank, marked when it stands out."""
        if rank not in self.figures:
            return Text("-", style="dim")
        value = self.figures[rank]
        others = [figure for other, figure in self.figures.items() if other != rank]
        hot = (
            self.floor is not None and others and value > self.floor + 3 * max(0.0, median(others))
        )
        return Text(f"{value:,.{self.digits}f}", style="bold red" if hot else "")


def columns(story: Story, window: Window) -> list[Column]:
    """Return the columns for a window of scrapes."""
    now = time.time()
    ranks = list(story.pods)
    step = story.step_time(now - 5, now)
    cpu = {rank: window.rate(rank, "proc_cpu_usage_seconds_total") for rank in ranks}
    ratio = {rank: retransmit_ratio(window, rank) for rank in ranks}
    delay = {cell[0]: value for cell, value in SIGNALS["run queue"].cells(window).items()}
    queue = {cell[0]: value for cell, value in SIGNALS["tx queue"].cells(window).items()}
    return [
        Column("step ms", dict.fromkeys(ranks, 1000 * step) if step else {}, None, 0),
        Column(
            "RTT ms" if rtt_source(window) == "net_tcp_rtt_us" else "sRTT ms",
            known({rank: rtt_ms(window, rank) for rank in ranks}),
            5,
        ),
        Column("retr %", known(ratio), 0.5),
        Column("tx kB", queue, 100, 0),
        Column("runq ms/s", delay, 50, 0),
        Column("CPU %", {rank: 100 * value for rank, value in known(cpu).items()}, None, 0),
    ]


def known(figures: dict[int, float | None]) -> dict[int, float]:
    """Leave out what is unknown."""
    return {rank: value for rank, value in figures.items() if value is not None}


def rtt_source(window: Window) -> str:
    """Return the family that fills the RTT column."""
    raw = any(window.gauge(rank, "net_tcp_rtt_us") for rank in window.ranks.values())
    return "net_tcp_rtt_us" if raw else "kitty_tcp_srtt_seconds"


def rtt_ms(window: Window, rank: int) -> float | None:
    """Return a rank's newest round trip in milliseconds."""
    if rtt_source(window) == "net_tcp_rtt_us":
        values, scale = window.gauge(rank, "net_tcp_rtt_us"), 1e-3
    else:
        values, scale = window.gauge(rank, "kitty_tcp_srtt_seconds", stat="max"), 1e3
    return scale * values[-1] if values else None


def retransmit_ratio(window: Window, rank: int) -> float | None:
    """Return the share of a rank's segments that were sent again, in percent."""
    sent = window.increase(rank, "kitty_tcp_sent_segments_total")
    again = window.increase(rank, "kitty_tcp_retransmitted_segments_total")
    return 100 * again / sent if sent and again is not None else None


def process_state(window: Window, rank: int) -> str:
    """Return the newest state letter of a rank's process."""
    for state in STATES:
        values = window.gauge(rank, "proc_state", state=state)
        if values and values[-1] > 0:
            return state
    return "-"


def table(story: Story, window: Window) -> Table:
    """Return the ranks as a table."""
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown = columns(story, window)
    for heading in ("rank", "pod", "node"):
        drawn.add_column(heading, no_wrap=True)
    for column in shown:
        drawn.add_column(column.heading, justify="right", no_wrap=True)
    drawn.add_column("state")
    for rank, pod in story.pods.items():
        hit = story.fault is not None and story.fault[1] == rank
        drawn.add_row(
            Text(f"{rank}{' <' if hit else ''}"),
            pod.name,
            pod.placement.node,
            *(column.cell(rank) for column in shown),
            process_state(window, rank),
        )
    return drawn


class Terminal:
    """Tells the story on a terminal, with a live table below the events.

    Args:
        console: A terminal.
    """

    def __init__(self, console: Console) -> None:
        self._start = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        """Take over the terminal's last lines."""
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the terminal back."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Print an event above the table."""
        self._live.console.print(stamped(self._start, text), highlight=False, markup=False)

    def mark(self, text: str) -> None:
        """Print the beginning or end of a fault above the table."""
        line = stamped(self._start, text)
        self._live.console.print(Text(line, style="bold yellow"), highlight=False)

    def show(self, story: Story, window: Window) -> None:
        """Draw the table anew."""
        parts: list[RenderableType] = [table(story, window)]
        if story.fault is not None:
            parts.append(Text(f"fault: {story.fault[0]} at rank {story.fault[1]}", style="yellow"))
        self._live.update(Group(*parts), refresh=True)


class Lines:
    """Tells the story in plain lines; the table appears once a fault has been on for a while.

    Args:
        console: A file or a pipe.
    """

    def __init__(self, console: Console) -> None:
        self._start = time.monotonic()
        self._console = console
        self._last: RenderableType | None = None

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""

    def say(self, text: str) -> None:
        """Print an event."""
        self._console.print(
            stamped(self._start, text), highlight=False, markup=False, soft_wrap=True
        )

    def mark(self, text: str) -> None:
        """Print the ranks as they were last seen, and the beginning or end of a fault."""
        if self._last is not None:
            self._console.print(self._last)
        self.say(text)

    def show(self, story: Story, window: Window) -> None:
        """Remember the table."""
        self._last = table(story, window)


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


def stamped(start: float, text: str) -> str:
    """Return an event with the seconds since the start before it."""
    return f"{time.monotonic() - start:5.1f} s  {text}"


def display_for(console: Console) -> Terminal | Lines:
    """Return what suits a console."""
    return Terminal(console) if console.is_terminal else Lines(console)


def summary(story: Story, findings: Iterable[Finding]) -> list[str]:
    """Return which rank was hit and by which signals it shows, in sentences."""
    lines = []
    for finding in findings:
        pod = story.pods[finding.rank]
        strength = f"{finding.strength:g} {finding.kind.unit}"
        lines.append(
            f"{finding.kind.name} {strength} at rank {finding.rank} "
            f"({pod.name} on {pod.placement.node}): " + verdict(finding)
        )
        for name, comparison in finding.comparisons.items():
            if comparison.outlier == finding.rank:
                lines.append("  " + evidence(name, finding))
        for name, comparison in finding.comparisons.items():
            if comparison.outlier not in (None, finding.rank):
                lines.append("  beside it, " + evidence(name, finding))
        lines.append("  " + ground_truth(finding))
    return lines


def verdict(finding: Finding) -> str:
    """Return whether the sidecars showed the rank by what the fault must show by."""
    expected = " and ".join(finding.kind.signals)
    if finding.named():
        return f"shown, as it must be, by {expected}"
    wrong = []
    for name in finding.kind.signals:
        comparison = finding.comparisons[name]
        if not comparison.during:
            wrong.append(f"no figures for {name}")
        elif comparison.outlier is None:
            wrong.append(f"{name} names no rank")
        elif comparison.outlier != finding.rank:
            wrong.append(f"{name} names {comparison.outlier}")
    return f"NOT shown: {', '.join(wrong)}"


def evidence(name: str, finding: Finding) -> str:
    """Return the numbers behind a signal's outlier."""
    comparison, unit = finding.comparisons[name], SIGNALS[name].unit
    rank = comparison.outlier
    assert rank is not None
    peers = comparison.peers_median(rank)
    text = f"{name}: rank {rank} {comparison.during[rank]:.4g} {unit}"
    if peers is not None:
        text += f", median of its peers {peers:.4g} {unit}"
    if rank in comparison.before:
        text += f", before the fault {comparison.before[rank]:.4g} {unit}"
    return text


def ground_truth(finding: Finding) -> str:
    """Return what the trainers' own logs say of the fault's cost."""
    before = "unknown" if finding.step_before is None else f"{1000 * finding.step_before:.0f} ms"
    during = "none ended" if finding.step_during is None else f"{1000 * finding.step_during:.0f} ms"
    return f"a training step took {before} before, with the fault: {during} (the trainers' logs)"
