"""One job over time: what a report shows."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kitty.job import Snapshot, read_job
from kitty.prometheus import Curve, Prometheus, quoted
from kitty.signals import EVIDENCE, SIGNALS, Signal, in_order
from kitty.text import clean, duration, natural, several, shortened
from kitty.verdict import Verdict, telling, verdict_of

POINTS = 240
"""In a plot at most; a plot is not wider."""

STEPS = (5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800)
WINDOW_S = 20
"""What the rules average over: a sample says enough of a step this long."""

MOST_LINES = 16
"""Ranks that are drawn one by one; of more, only those that stand out, before a band of all."""

MOST_NAMED = 8

Place = tuple[str, str]
"""A pod and its rank; the rank is empty for what is measured by pod."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """Something that was so from a begin to an end.

    Attributes:
        begin: Unix time; can lie before the report's.
        end: The last moment at which it was seen, exact to a step.
        lasting: It is still so.
    """

    begin: float
    end: float
    lasting: bool


@dataclass(frozen=True, kw_only=True)
class Finding(Episode):
    """A verdict from its begin to its end, at its surest."""

    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Alarm(Episode):
    """An alert beside the verdict's, or a sudden change that a sidecar saw between scrapes."""

    name: str
    about: str


@dataclass(frozen=True, kw_only=True)
class History:
    """A job from a start to an end.

    Attributes:
        now: The job at the end.
        start: Unix time.
        end: Unix time, the server's now.
        step: Seconds between two points.
        nodes: Where each place ran.
        lines: By signal and place.
        bands: By signal, then by share of the ranks (0, 0.25, 0.75, 1); empty where each rank has
            its line.
        medians: By signal.
        named: Places that stand out, the worst first; all others are the background.
        findings: Verdicts, the earliest first.
        alarms: Alerts, the earliest first.
        last_seen: Unix time of the job's last data; None if there was none.
        missing: What is not in the report, in words.
    """

    now: Snapshot
    start: float
    end: float
    step: int
    nodes: Mapping[Place, str]
    lines: Mapping[str, Mapping[Place, Sequence[tuple[float, float]]]]
    bands: Mapping[str, Mapping[float, Sequence[tuple[float, float]]]]
    medians: Mapping[str, Sequence[tuple[float, float]]]
    named: Sequence[Place]
    findings: Sequence[Finding]
    alarms: Sequence[Alarm]
    last_seen: float | None
    missing: Sequence[str]

    @property
    def signals(self) -> list[Signal]:
        """The signals that have any figure."""
        return in_order(set(self.lines) | set(self.bands))


def step_for(span_s: float) -> int:
    """Return the least usual step that gives no more points than a plot has."""
    return next((step for step in STEPS if span_s / step <= POINTS), STEPS[-1])


class _Reader:
    """Asks about one job over one stretch of time."""

    def __init__(
        self, server: Prometheus, at: float, *, namespace: str, name: str, since_s: int
    ) -> None:
        self.server = server
        self.step = step_for(since_s)
        self.end = at
        self.start = at - since_s
        self.since = f"{since_s}s"
        self.job = f"namespace={quoted(namespace)},job={quoted(name)}"

    def curves(self, expression: str) -> list[Curve]:
        return self.server.curves(expression, start=self.start, end=self.end, step=self.step)

    def signal(self, *matchers: str) -> str:
        """Return the expression of the signals; where a step is long, of its worst moment."""
        job = ",".join((self.job, *matchers))
        if self.step <= WINDOW_S:
            return f"kitty:signal{{{job}}}"
        low = "|".join(signal.name for signal in SIGNALS.values() if signal.low)
        return (
            f'(max_over_time(kitty:signal{{{job},signal!~"{low}"}}[{self.step}s])'
            f' or min_over_time(kitty:signal{{{job},signal=~"{low}"}}[{self.step}s]))'
        )

    def places(self) -> dict[Place, str]:
        """Return every rank's place that was seen, and its node."""
        rows = self.server.rows(
            f"group by (pod, rank, node) (last_over_time(kitty:rank{{{self.job}}}[{self.since}]))",
            self.end,
        )
        return {
            (row.labels.get("pod", ""), row.labels.get("rank", "")): row.labels.get("node", "")
            for row in rows
        }

    def outlying(self) -> list[Place]:
        """Return the places that stood out most by a signal, whether or not they got a verdict."""
        rows = self.server.rows(
            f"topk({MOST_NAMED}, max by (pod, rank) "
            f"(max_over_time(kitty:signal:z{{{self.job}}}[{self.since}])) >= 3.5)",
            self.end,
        )
        ordered = sorted(rows, key=lambda row: -row.value)
        return [(row.labels.get("pod", ""), row.labels.get("rank", "")) for row in ordered]

    def _lasts(self, end: float) -> bool:
        return end > self.end - 1.5 * self.step

    def findings(self) -> list[Finding]:
        """Return each verdict with its begin and end; its moment of greatest confidence."""
        metric = f"kitty:verdict:since_timestamp_seconds{{{self.job}}}"
        sure = f"kitty:verdict{{{self.job}}}"
        if self.step > WINDOW_S:
            metric = f"max_over_time({metric}[{self.step}s])"
            sure = f"max_over_time({sure}[{self.step}s])"
        confidence = {_key(curve): curve.points for curve in self.curves(sure)}
        found = []
        for curve in self.curves(metric):
            for begin in sorted({value for _, value in curve.points}):
                times = [when for when, value in curve.points if value == begin]
                inside = [
                    point
                    for point in confidence.get(_key(curve), ())
                    if times[0] <= point[0] <= times[-1]
                ]
                surest = max((value for _, value in inside), default=0.0)
                found.append(
                    Finding(
                        begin=begin,
                        end=max(times[-1], begin),
                        lasting=self._lasts(times[-1]),
                        verdict=verdict_of(curve.labels, confidence=surest, since=begin),
                    )
                )
        return sorted(found, key=lambda finding: (finding.begin, finding.verdict.rank))

    def alarms(self) -> list[Alarm]:
        """Return the alerts that fired, but for those that repeat a verdict; sudden changes."""
        beside = "KittyOutOfMemory.*|KittyIdleGpus|KittyBlind|KittySidecarSilent|KittyJobLabelLost"
        selected = f'ALERTS{{{self.job},alertstate="firing",alertname=~"{beside}"}}'
        if self.step > WINDOW_S:
            selected = f"max_over_time({selected}[{self.step}s])"
        latched = f"kitty_anomaly{{{self.job}}}"
        if self.step > WINDOW_S:
            latched = f"max_over_time({latched}[{self.step}s])"
        sudden = f"max by (pod, rank, signal) ({latched}) == 1"
        found = [
            Alarm(
                begin=stretch[0][0],
                end=stretch[-1][0],
                lasting=self._lasts(stretch[-1][0]),
                name=clean(curve.labels.get("alertname", "sudden change")),
                about=_about(curve.labels),
            )
            for curve in (*self.curves(selected), *self.curves(sudden))
            for stretch in stretches(curve.points, self.step)
        ]
        return sorted(found, key=lambda alarm: (alarm.begin, alarm.name))


def _about(labels: Mapping[str, str]) -> str:
    """Return what an alert is about, beside the job."""
    of = ("signal", "rank", "pod", "node", "container", "collector", "reason")
    return ", ".join(clean(labels[label]) for label in of if labels.get(label))


def _key(curve: Curve) -> frozenset[tuple[str, str]]:
    return frozenset(curve.labels.items())


def stretches(points: Sequence[tuple[float, float]], step: int) -> list[list[tuple[float, float]]]:
    """Return points cut where some are missing between them."""
    cut: list[list[tuple[float, float]]] = []
    for point in points:
        if not cut or point[0] - cut[-1][-1][0] > 1.5 * step:
            cut.append([])
        cut[-1].append(point)
    return cut


def read_history(
    server: Prometheus, at: float, *, namespace: str, name: str, since_s: int
) -> History:
    """Return a job's last hours.

    Args:
        server: Where the rules' series are.
        at: Its time now, the end.
        namespace: Of the job.
        name: The job.
        since_s: Length in seconds.
    """
    reader = _Reader(server, at, namespace=namespace, name=name, since_s=since_s)
    nodes = reader.places()
    findings = reader.findings()
    each = len(nodes) <= MOST_LINES
    named = _named(findings, reader.outlying(), nodes)
    medians = {
        curve.labels.get("signal", ""): curve.points
        for curve in reader.curves(f"max by (signal) (kitty:signal:median{{{reader.job}}})")
    }
    lines = _lines(reader, None if each else named)
    bands = {} if each else _bands(reader)
    seen = reader.curves(f"kitty:job:pods{{{reader.job}}}")
    points = seen[0].points if seen else ()
    now = read_job(server, at, namespace=namespace, name=name)
    return History(
        now=now,
        start=reader.start,
        end=reader.end,
        step=reader.step,
        nodes=nodes,
        lines=lines,
        bands=bands,
        medians=medians,
        named=named,
        findings=[_with_evidence(finding, lines, medians) for finding in findings],
        alarms=reader.alarms(),
        last_seen=points[-1][0] if points else None,
        missing=_missing(reader, now, points, lines, bands),
    )


def _named(
    findings: Sequence[Finding], outlying: Sequence[Place], nodes: Mapping[Place, str]
) -> list[Place]:
    """Return who is drawn in colour: who had a verdict, then who stood out without."""
    found: list[Place] = []
    surest = sorted(findings, key=lambda finding: -finding.verdict.confidence)
    wanted = [(finding.verdict.pod, finding.verdict.rank) for finding in surest]
    wanted += [(finding.verdict.peer_pod, "") for finding in surest]
    for pod, rank in [*wanted, *outlying]:
        # A pod that is named without a rank is shown by its first.
        ranks = sorted((place for place in nodes if place[0] == pod), key=_by_rank)
        place = (pod, rank) if (pod, rank) in nodes else ranks[0] if ranks else None
        if place is not None and place not in found:
            found.append(place)
    return found[:MOST_NAMED]


def _by_rank(place: Place) -> tuple[tuple[int, float, str], str]:
    return natural(place[1]), place[0]


def _lines(
    reader: _Reader, only: Sequence[Place] | None
) -> dict[str, dict[Place, Sequence[tuple[float, float]]]]:
    if only is not None and not only:
        return {}
    matchers = []
    if only is not None:
        pods = "|".join(re.escape(pod) for pod in sorted({pod for pod, _ in only}))
        matchers.append(f"pod=~{quoted(pods)}")
    found: dict[str, dict[Place, Sequence[tuple[float, float]]]] = {}
    for curve in reader.curves(reader.signal(*matchers)):
        place = (curve.labels.get("pod", ""), curve.labels.get("rank", ""))
        if only is None or not place[1] or place in only:
            found.setdefault(curve.labels.get("signal", ""), {})[place] = curve.points
    return found


def _bands(reader: _Reader) -> dict[str, dict[float, Sequence[tuple[float, float]]]]:
    found: dict[str, dict[float, Sequence[tuple[float, float]]]] = {}
    for share in (0, 0.25, 0.75, 1):
        for curve in reader.curves(f"quantile by (signal) ({share}, {reader.signal()})"):
            found.setdefault(curve.labels.get("signal", ""), {})[share] = curve.points
    return found


def _with_evidence(
    finding: Finding,
    lines: Mapping[str, Mapping[Place, Sequence[tuple[float, float]]]],
    medians: Mapping[str, Sequence[tuple[float, float]]],
) -> Finding:
    """Return a finding with the figures of its worst moment, where they were read."""
    verdict = finding.verdict
    values, usual = {}, {}
    for name in EVIDENCE.get(verdict.kind, ()):
        places = lines.get(name, {})
        line = places.get((verdict.pod, verdict.rank)) or places.get((verdict.pod, "")) or ()
        inside = [point for point in line if finding.begin <= point[0] <= finding.end]
        if not inside or verdict.kind == "path":
            continue
        sign = -1 if SIGNALS[name].low else 1
        when, values[name] = max(inside, key=lambda point: sign * point[1])
        near = dict(medians.get(name, ())).get(when)
        if near is not None:
            usual[name] = near
    # Beside the class's first figure, those that are far from the median.
    z = {
        name: 2.0
        for name, value in values.items()
        if name in usual and abs(value - usual[name]) > abs(usual[name])
    }
    evidence = telling(verdict.kind, values, usual, z)
    return dataclasses.replace(finding, verdict=dataclasses.replace(verdict, evidence=evidence))


def _missing(
    reader: _Reader,
    now: Snapshot,
    points: Sequence[tuple[float, float]],
    lines: Mapping[str, Mapping[Place, Sequence[tuple[float, float]]]],
    bands: Mapping[str, Mapping[float, Sequence[tuple[float, float]]]],
) -> list[str]:
    missing = []
    if points:
        begin, end = points[0][0] - reader.start, reader.end - points[-1][0]
        if begin > 2 * reader.step:
            missing.append(f"no data in the first {duration(begin)}")
        if end > 2 * reader.step:
            missing.append(f"no data in the last {duration(end)}")
        gaps = len(stretches(points, reader.step)) - 1
        if gaps:
            missing.append(f"{several(gaps, 'gap')} without data between")
        counts = [value for _, value in points]
        if min(counts) < max(counts):
            missing.append(f"pods: {int(min(counts))} at times, {int(max(counts))} at most")
    partly = [
        signal.name
        for signal in in_order(set(lines) | set(bands))
        if len(_times(lines.get(signal.name), bands.get(signal.name))) < 0.9 * len(points)
    ]
    if partly:
        missing.append(f"figures part of the time only: {', '.join(partly)}")
    absent = [name for name in SIGNALS if name not in lines and name not in bands]
    if absent:
        missing.append(f"no series of {', '.join(absent)}")
    missing += [text for text in now.unseen if not text.startswith("no series of")]
    if now.state.withheld:
        missing.append(f"a verdict at the end: {shortened(now.state.withheld)}")
    return missing


def _times(*groups: Mapping[Any, Sequence[tuple[float, float]]] | None) -> set[float]:
    """Return the times at which any has a point."""
    return {when for group in groups if group for points in group.values() for when, _ in points}
