"""One job now: its ranks, their signals, the verdict with its evidence, and what is missing."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kitty.jobs import NO_RANK, ONE_RANK, SEEN, JobState, read_blind, read_withheld
from kitty.prometheus import Prometheus, Row, quoted, selector
from kitty.signals import EVIDENCE, SIGNALS, Signal, in_order, signal_of
from kitty.text import clean, clock, natural, several, shortened
from kitty.verdict import ALL, Evidence, Verdict, read_verdicts, telling


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank, or a pod whose ranks are unknown.

    Attributes:
        rank: Empty where it is unknown.
        pod: Its pod.
        node: Where that runs.
        values: By signal; a network signal is its pod's. Unknown ones are absent.
        z: How far each stands out of the job's, by signal; absent below 1.
    """

    rank: str
    pod: str
    node: str
    values: Mapping[str, float] = field(default_factory=dict)
    z: Mapping[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The greatest z of a signal that names a cause; others weigh less than any of these."""
        causes = {name for names in EVIDENCE.values() for name in names} - {"tcp_busy", "tx_queue"}
        strong = max((z for name, z in self.z.items() if name in causes), default=0.0)
        return strong or max(self.z.values(), default=0.0) / 1e6


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A job at a moment.

    Attributes:
        state: As in the list of jobs; its verdicts have their evidence.
        at: The server's time.
        ranks: The worst first.
        medians: Of the job, by signal.
        unseen: What cannot be seen of it, in words.
        sudden: Sudden changes that sidecars saw between scrapes, in words.
    """

    state: JobState
    at: float
    ranks: Sequence[Rank]
    medians: Mapping[str, float]
    unseen: Sequence[str]
    sudden: Sequence[str]

    @property
    def signals(self) -> list[Signal]:
        """The signals that any rank has."""
        return in_order({name for rank in self.ranks for name in rank.values})

    def headline(self) -> list[str]:
        """Return the verdicts in sentences, or that there is none."""
        return headline(self.state, self.at)


def headline(state: JobState, at: float) -> list[str]:
    """Return the verdicts in sentences, or that there is none and why."""
    job = f"{clean(state.namespace)}/{clean(state.name)}"
    if not state.present:
        return [f"Job {job} has no data now: it ended, or is not scraped."]
    if state.verdicts:
        return [verdict.sentence(at) for verdict in state.verdicts]
    seen = f"{several(state.ranks, 'rank')} of job {job} ({several(state.pods, 'pod')})"
    if state.withheld:
        return [f"No verdict is given on the {seen}: {shortened(state.withheld)}."]
    if state.blind:
        part = f"but it is seen in part only, without {shortened(state.blind)}"
        return [f"Nothing stands out among the {seen}, {part}."]
    return [f"Nothing stands out among the {seen}."]


def read_job(server: Prometheus, at: float, *, namespace: str, name: str) -> Snapshot:
    """Return one job at a moment."""
    ranks = read_ranks(server, at, namespace=namespace, name=name)
    job = {"namespace": namespace, "job": name}
    medians = _by_signal(server.rows(selector("kitty:signal:median", **job), at))
    pods = server.rows(f"last_over_time({selector('kitty:job:pods', **job)}[{SEEN}])", at)
    verdicts = [
        dataclasses.replace(verdict, evidence=read_evidence(server, at, verdict, ranks, medians))
        for verdict in read_verdicts(server, at, **job)
    ]
    blind = read_blind(server, at).get((namespace, name), [])
    withheld = read_withheld(server, at).get((namespace, name), [])
    numbered = {rank.rank for rank in ranks if rank.rank}
    if len(numbered) <= 1:
        withheld = [*withheld, ONE_RANK if numbered else NO_RANK]
    state = JobState(
        namespace=namespace,
        name=name,
        pods=int(pods[0].value) if pods else 0,
        ranks=len(numbered),
        verdicts=verdicts,
        blind=blind,
        withheld=withheld,
        seen=at,
        present=bool(pods),
    )
    unseen = read_unseen(server, at, namespace=namespace, name=name)
    have = {signal for rank in ranks for signal in rank.values}
    if ranks and (absent := [SIGNALS[key].name for key in SIGNALS if key not in have]):
        unseen = [*unseen, f"no series of {', '.join(absent)}"]
    named = {
        name
        for verdict in verdicts
        for name in (verdict.rank or verdict.pod, verdict.peer_pod)
        if name
    }
    ordered = sorted(
        ranks,
        key=lambda rank: (
            rank.rank not in named and rank.pod not in named,
            -rank.worst,
            natural(rank.rank),
            rank.pod,
        ),
    )
    return Snapshot(
        state=state,
        at=at,
        ranks=ordered,
        medians=medians,
        unseen=unseen,
        sudden=read_sudden(server, at, namespace=namespace, name=name),
    )


def read_ranks(server: Prometheus, at: float, *, namespace: str, name: str) -> list[Rank]:
    """Return the ranks with their signals, and pods whose ranks are unknown."""

    def ask(metric: str) -> list[Row]:
        return server.rows(selector(metric, namespace=namespace, job=name), at)

    places = [
        (row.labels.get("rank", ""), row.labels.get("pod", ""), row.labels.get("node", ""))
        for row in ask("kitty:rank")
    ]
    with_rank = {pod for _, pod, _ in places}
    places += [
        ("", row.labels.get("pod", ""), "")
        for row in ask("kitty:pod")
        if row.labels.get("pod", "") not in with_rank
    ]
    values, z = _by_place(ask("kitty:signal")), _by_place(ask("kitty:signal:z"))
    return [
        Rank(
            rank=rank,
            pod=pod,
            node=node,
            values={**values.get((pod, ""), {}), **values.get((pod, rank), {})},
            z={**z.get((pod, ""), {}), **z.get((pod, rank), {})},
        )
        for rank, pod, node in places
    ]


def _by_place(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, float]]:
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        place = (row.labels.get("pod", ""), row.labels.get("rank", ""))
        found.setdefault(place, {})[row.labels.get("signal", "")] = row.value
    return found


def _by_signal(rows: Sequence[Row]) -> dict[str, float]:
    return {row.labels.get("signal", ""): row.value for row in rows}


def read_evidence(
    server: Prometheus,
    at: float,
    verdict: Verdict,
    ranks: Sequence[Rank],
    medians: Mapping[str, float],
) -> tuple[Evidence, ...]:
    """Return the figures that speak for a verdict."""
    job = {"namespace": verdict.namespace, "job": verdict.job}
    if verdict.kind == "path":
        ends = {"pod": verdict.pod, "peer_pod": verdict.peer_pod}
        told = telling(
            "path",
            _by_signal(server.rows(selector("kitty:cell", **job, **ends), at)),
            _by_signal(server.rows(selector("kitty:cell:median", **job), at)),
            _by_signal(server.rows(selector("kitty:cell:hot", **job, **ends), at)),
        )
        return tuple(
            dataclasses.replace(evidence, signal=_of_a_way(evidence.signal)) for evidence in told
        )
    if verdict.rank == ALL:
        before = _by_signal(
            server.rows(
                f"{selector('kitty:signal:baseline', **job)} and on (signal) "
                f"{selector('kitty:signal:shift', **job)}",
                at,
            )
        )
        return tuple(
            Evidence(
                signal=dataclasses.replace(
                    signal_of(name), sentence=f"the ranks' median of {name} is {{}}"
                ),
                value=medians[name],
                median=value,
            )
            for name, value in before.items()
            if name in medians
        )
    for rank in ranks:
        if (rank.rank, rank.pod) == (verdict.rank, verdict.pod):
            return telling(verdict.kind, rank.values, medians, rank.z)
    return ()


def _of_a_way(signal: Signal) -> Signal:
    sentence = {
        "rtt": "round trips between them take {}",
        "retransmits": "{} of the segments between them are sent again",
    }
    return dataclasses.replace(signal, sentence=sentence.get(signal.name, signal.sentence))


def read_unseen(server: Prometheus, at: float, *, namespace: str, name: str) -> list[str]:
    """Return which collectors are down, why and in how many pods, and which sidecars are silent."""
    job = f"namespace={quoted(namespace)},job={quoted(name)}"
    down = server.rows(
        "count by (collector, reason) (group by (pod, collector, reason) ("
        f'kitty_collector_up{{{job},reason!~"starting|"}} == 0))',
        at,
    )
    unseen = [
        f"{clean(row.labels.get('collector', ''))} ({clean(row.labels.get('reason', ''))})"
        f" in {several(int(row.value), 'pod')}"
        for row in sorted(down, key=lambda row: (-row.value, row.labels.get("collector", "")))
    ]
    silent = sorted(
        clean(row.labels.get("pod", ""))
        for row in server.rows(f"group by (pod) (up{{{job}}} == 0)", at)
    )
    if silent:
        unseen.append(f"{several(len(silent), 'silent sidecar')}: {shortened(silent)}")
    lost = server.rows(
        f"count(kitty_pod_info{{namespace={quoted(namespace)},exported_job={quoted(name)}}})", at
    )
    if lost:
        unseen.append("pods whose series carry exported_job (scraped without honor_labels)")
    return unseen


def read_sudden(server: Prometheus, at: float, *, namespace: str, name: str) -> list[str]:
    """Return what changed suddenly against a rank's own past, seen by sidecars between scrapes."""
    since = selector("kitty_anomaly_since_timestamp_seconds", namespace=namespace, job=name)
    now = selector("kitty_anomaly", namespace=namespace, job=name)
    rows = server.rows(f"max by (rank, signal) ({since} and on (pod, rank, signal) {now} == 1)", at)
    ordered = sorted(rows, key=lambda row: (-row.value, natural(row.labels.get("rank", ""))))
    return [
        f"{clean(row.labels.get('signal', ''))} of rank {clean(row.labels.get('rank', ''))}"
        f" ({clock(row.value)})"
        for row in ordered
    ]
