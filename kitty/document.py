"""Jobs and ranks as JSON. What is unknown is null or absent, never 0; times are Unix times."""

from collections.abc import Sequence
from typing import Any

from kitty.job import Snapshot
from kitty.jobs import JobState
from kitty.verdict import Verdict


def verdict_document(verdict: Verdict, at: float) -> dict[str, Any]:
    """Return a verdict."""
    return {
        "class": verdict.kind,
        "reason": verdict.reason or None,
        "rank": verdict.rank or None,
        "pod": verdict.pod or None,
        "peer_pod": verdict.peer_pod or None,
        "node": verdict.node or None,
        "confidence": round(verdict.confidence, 4) if verdict.names_somebody else None,
        "since_timestamp_seconds": verdict.since,
        "sentence": verdict.sentence(at),
        "cannot_tell": verdict.limit() or None,
        "evidence": [
            {
                "signal": evidence.signal.name,
                "unit": evidence.signal.unit,
                "value": evidence.value,
                "median": evidence.median,
            }
            for evidence in verdict.evidence
        ],
    }


def state_document(state: JobState, at: float) -> dict[str, Any]:
    """Return a job as in the list."""
    return {
        "namespace": state.namespace,
        "job": state.name,
        "pods": state.pods if state.present else None,
        "ranks": state.ranks if state.present else None,
        "health": state.health,
        "details": state.details() or None,
        "since_timestamp_seconds": state.since,
        "verdicts": [verdict_document(verdict, at) for verdict in state.verdicts],
        "blind": list(state.blind),
        "withheld": list(state.withheld),
    }


def jobs_document(jobs: Sequence[JobState], at: float, warnings: Sequence[str]) -> dict[str, Any]:
    """Return the list of jobs."""
    return {
        "timestamp_seconds": at,
        "jobs": [state_document(job, at) for job in jobs],
        "warnings": list(warnings),
    }


def job_document(snapshot: Snapshot, warnings: Sequence[str]) -> dict[str, Any]:
    """Return one job with its ranks, the worst first."""
    return {
        "timestamp_seconds": snapshot.at,
        **state_document(snapshot.state, snapshot.at),
        "summary": snapshot.headline(),
        "not_seen": list(snapshot.unseen),
        "sudden_changes": list(snapshot.sudden),
        "signals": {
            signal.name: {"unit": signal.unit, "median": snapshot.medians.get(signal.name)}
            for signal in snapshot.signals
        },
        "by_rank": [
            {
                "rank": rank.rank or None,
                "pod": rank.pod,
                "node": rank.node or None,
                "values": dict(rank.values),
                "z": dict(rank.z),
            }
            for rank in snapshot.ranks
        ],
        "warnings": list(warnings),
    }
