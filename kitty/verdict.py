"""What the rules say of a job, put in sentences with the figures that speak for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kitty.prometheus import Prometheus, selector
from kitty.signals import EVIDENCE, LIMITS, REASONS, Signal, signal_of
from kitty.text import clean, clock, duration, figure

ALL = "all"
"""The rank of a verdict on the whole job."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One figure that speaks for a verdict.

    Attributes:
        signal: What was measured.
        value: Of the rank, its pod or the way; in the signal's unit.
        median: Of the job's; for the whole job what it was minutes ago.
    """

    signal: Signal
    value: float
    median: float | None

    def sentence(self, of: str) -> str:
        """Return it in words; ``of`` says what the median is."""
        told = self.signal.sentence.format(rate(self.value, self.signal.unit))
        if self.median is None:
            return told
        return f"{told} ({of} {rate(self.median, self.signal.unit)})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One series of `kitty:verdict`.

    Attributes:
        namespace: Of the job.
        job: Its name.
        kind: The class.
        rank: Empty where no rank is named, ``all`` for the whole job.
        pod: Empty where no pod is named.
        node: Where the pod runs.
        peer_pod: The other end, of class ``path``.
        reason: Why no rank is named, of class ``inconclusive``.
        confidence: 0 to 1.
        since: Unix time of the server, where it is recorded.
        evidence: Figures, the most telling first.
    """

    namespace: str
    job: str
    kind: str
    rank: str = ""
    pod: str = ""
    node: str = ""
    peer_pod: str = ""
    reason: str = ""
    confidence: float
    since: float | None = None
    evidence: Sequence[Evidence] = field(default=())

    @property
    def names_somebody(self) -> bool:
        """Whether something is found slow, rather than that it could not be told."""
        return self.kind != "inconclusive"

    def subject(self) -> str:
        """Return who is named, in a few words."""
        if self.kind == "inconclusive":
            return f"inconclusive: {clean(self.reason) or 'no reason given'}"
        if self.kind == "path":
            return f"{clean(self.pod)} - {clean(self.peer_pod)}"
        return "all ranks" if self.rank == ALL else f"rank {clean(self.rank)}"

    def sentence(self, now: float | None) -> str:
        """Return the verdict in one sentence with its figures.

        Args:
            now: The server's time; None leaves out for how long it has been so.
        """
        job = f"{clean(self.namespace)}/{clean(self.job)}"
        since = ""
        if self.since is not None:
            ago = "" if now is None else f" ({duration(now - self.since)})"
            since = f", since {clock(self.since)}{ago}"
        if self.kind == "inconclusive":
            why = REASONS.get(self.reason, clean(self.reason) or REASONS["two-ranks"])
            return f"No rank of job {job} is named: {why}{since}."
        told = f"{clean(self.kind)}, confidence {100 * self.confidence:.0f}%{since}"
        if self.kind == "path":
            begin = (
                f"The way between pods {clean(self.pod)} and {clean(self.peer_pod)} of job {job} "
                f"is slow or loses data; which end is at fault cannot be told: {told}"
            )
        elif self.rank == ALL:
            begin = f"All ranks of job {job} are slower than minutes ago, none stands out: {told}"
        else:
            place = f"pod {clean(self.pod)}" + (f" on {clean(self.node)}" if self.node else "")
            begin = f"Rank {clean(self.rank)} of job {job}, {place}, is slow: {told}"
        of = "ten minutes before:" if self.rank == ALL else "median of the job"
        figures = ", and ".join(evidence.sentence(of) for evidence in self.evidence)
        return f"{begin}; {figures}." if figures else f"{begin}."

    def limit(self) -> str:
        """Return what a verdict of this class cannot tell; empty if nothing is known of it."""
        return LIMITS.get(self.kind, "")


def rate(value: float, unit: str) -> str:
    """Return a figure in a sentence: seconds in each second are written so."""
    return f"{figure(value, 's')} a second" if unit == "s/s" else figure(value, unit)


def read_verdicts(server: Prometheus, at: float, **labels: str) -> list[Verdict]:
    """Return the verdicts at a moment, without evidence; the surest first."""
    since = {
        _key(row.labels): row.value
        for row in server.rows(selector("kitty:verdict:since_timestamp_seconds", **labels), at)
    }
    verdicts = [
        verdict_of(row.labels, confidence=row.value, since=since.get(_key(row.labels)))
        for row in server.rows(selector("kitty:verdict", **labels), at)
    ]
    return sorted(verdicts, key=lambda verdict: (not verdict.names_somebody, -verdict.confidence))


def verdict_of(
    labels: Mapping[str, str], *, confidence: float, since: float | None = None
) -> Verdict:
    """Return the verdict that a series' labels tell."""
    return Verdict(
        namespace=labels.get("namespace", ""),
        job=labels.get("job", ""),
        kind=labels.get("class", "unknown"),
        rank=labels.get("rank", ""),
        pod=labels.get("pod", ""),
        node=labels.get("node", ""),
        peer_pod=labels.get("peer_pod", ""),
        reason=labels.get("reason", ""),
        confidence=confidence,
        since=since,
    )


def telling(
    kind: str, values: Mapping[str, float], medians: Mapping[str, float], z: Mapping[str, float]
) -> tuple[Evidence, ...]:
    """Return the figures that speak for a class.

    Args:
        kind: The class.
        values: Of the one who is named, by signal.
        medians: Of the job, by signal.
        z: How far each stands out, by signal; those that do not are left out, except the class's
            first if none does.
    """
    names = [name for name in EVIDENCE.get(kind, ()) if name in values]
    out = sorted((name for name in names if z.get(name, 0) >= 2), key=lambda name: -z[name])
    # The class's own signal leads, whatever follows from it.
    out.sort(key=lambda name: EVIDENCE[kind].index(name) if kind.startswith("network") else 0)
    return tuple(
        Evidence(signal=signal_of(name), value=values[name], median=medians.get(name))
        for name in (out or names[:1])
    )


def _key(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def by_job(verdicts: Iterable[Verdict]) -> dict[tuple[str, str], list[Verdict]]:
    """Return verdicts by namespace and job."""
    found: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault((verdict.namespace, verdict.job), []).append(verdict)
    return found
