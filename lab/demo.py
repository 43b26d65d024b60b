"""The demo: faults one after the other, what the sidecars show, and what the shipped rules say."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.commands import ToolError
from lab.faults import Kind
from lab.judge import Verdict, find_programs, judging, stragglers
from lab.prometheus import Prometheus
from lab.scoring import EXPECTED
from lab.story import Finding, Story


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the rules said of one fault.

    Attributes:
        finding: The fault.
        verdict: The last that named its rank while it was on; None where none did.
        after_s: From the fault's begin to the first verdict of its rank and class.
        others: Other ranks that were named meanwhile.
    """

    finding: Finding
    verdict: Verdict | None
    after_s: float | None
    others: tuple[Verdict, ...] = ()

    def right(self) -> bool:
        """Whether rank and class were said."""
        return self.after_s is not None


@dataclass(kw_only=True)
class Judge:
    """Asks a Prometheus while a fault is on.

    Attributes:
        server: With the shipped rules; None where there is none.
        why_not: Why there is none.
        judged: One for each fault so far.
    """

    server: Prometheus | None = None
    why_not: str = ""
    judged: list[Judged] = field(default_factory=list)

    def inject(self, story: Story, kind: Kind, rank: int) -> None:
        """Put a fault on a rank until the rules name it, or for as long as patience lasts."""
        if self.server is None:
            story.inject(kind, rank)
            return
        # What is left of the fault before counts once it has gone.
        before = {(verdict.rank, verdict.kind) for verdict in self._ask()}
        own: list[tuple[float, Verdict]] = []
        others: dict[tuple[int, str], Verdict] = {}

        def named() -> bool:
            now = self._ask()
            before.intersection_update({(verdict.rank, verdict.kind) for verdict in now})
            for verdict in now:
                if verdict.rank == rank and (rank, verdict.kind) not in before:
                    own.append((time.time(), verdict))
                elif (verdict.rank, verdict.kind) not in before:
                    others[verdict.rank, verdict.kind] = verdict
            return any(verdict.kind == EXPECTED[kind.name] for _, verdict in own)

        finding = story.inject(kind, rank, until=named)
        right = [(when, v) for when, v in own if v.kind == EXPECTED[kind.name]]
        last = (right or own)[-1:]
        judged = Judged(
            finding=finding,
            verdict=last[0][1] if last else None,
            after_s=round(right[0][0] - finding.started, 1) if right else None,
            others=tuple(others.values()),
        )
        self.judged.append(judged)
        story.display.say(f"the rules say: {said(judged)}")

    def _ask(self) -> Sequence[Verdict]:
        if self.server is not None:
            with suppress(OSError):
                return stragglers(self.server)
        return ()


def said(judged: Judged) -> str:
    """Return the verdict in one sentence with numbers."""
    if judged.verdict is None:
        return f"nothing of rank {judged.finding.rank}"
    sentence = judged.verdict.sentence()
    if judged.after_s is None:
        return f"another class than {EXPECTED[judged.finding.kind.name]}: {sentence}"
    return f"after {judged.after_s:.0f} s, {sentence}"


def programs_or_why(find: Callable[[], Path] = find_programs) -> Path | ToolError:
    """Return the folder of Prometheus' programs, or why there is none.

    To be called before the lab starts: its own network reaches no mirror to fetch them from.
    """
    try:
        return find()
    except ToolError as error:
        return error


@contextmanager
def judge_of(story: Story, programs: Path | ToolError) -> Iterator[Judge]:
    """Run a Prometheus with the shipped rules beside a story; without its programs say so."""
    if isinstance(programs, ToolError):
        story.display.say(f"note: no verdicts, the sidecars' own figures only: {programs}")
        yield Judge(why_not=str(programs))
        return
    with judging(story, programs) as server:
        story.display.say(
            "Prometheus scrapes the sidecars every 5 s and evaluates the shipped rules, which say "
            "nothing of a job in its first 20 s"
        )
        yield Judge(server=server)
