"""The Prometheus that judges a job by the shipped rules, and what its verdicts say."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.commands import ToolError
from lab.prometheus import Prometheus, Target
from lab.story import Story

ROOT = Path(__file__).parent.parent
RULES = ROOT / "manifests" / "rules"
UNPACK = ROOT / "tools" / "prometheus"
UNPACK_TIMEOUT_S = 120
JOB_ANNOTATION = "kitty.k10s.dev/job"
INTERVAL_S = 5  # of scrapes and evaluations, as shipped
VERDICT = "kitty:verdict"
HEARTBEAT = "kitty:job:pods"  # recorded at every evaluation that saw the job


@dataclass(frozen=True, kw_only=True)
class Said:
    """One verdict series: who, what, and at which evaluations.

    Attributes:
        rank: Of the accused; empty where the class names none, ``all`` for the whole job.
        kind: The class.
        pod: Of the accused.
        node: Of the accused.
        samples: Times (seconds since the epoch) and confidences, in order.
    """

    rank: str
    kind: str
    pod: str = ""
    node: str = ""
    samples: tuple[tuple[float, float], ...]


def find_programs(*, unpack: Path = UNPACK, path: str | None = None) -> Path:
    """Return the folder of the programs of Prometheus: installed ones, else unpacked privately.

    Args:
        unpack: Unpacks them and prints the folder.
        path: Where installed ones may be; None is the search path.

    Raises:
        ToolError: They are not there and cannot be had.
    """
    if found := shutil.which("prometheus", path=path):
        return Path(found).parent
    try:
        done = subprocess.run(
            [unpack], capture_output=True, text=True, check=False, timeout=UNPACK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"no Prometheus: {error}") from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()
        raise ToolError(f"no Prometheus: {reason[-1] if reason else unpack}")
    return Path(done.stdout.strip())


def targets_of(story: Story) -> list[Target]:
    """Return the sidecars with the labels that discovery gives them."""
    return [
        Target(
            address="{}:{}".format(*story.endpoint(pod)),
            namespace=pod.manifest["metadata"]["namespace"],
            pod=pod.name,
            node=pod.placement.node,
            job=pod.manifest["metadata"]["annotations"][JOB_ANNOTATION],
        )
        for pod in story.pods.values()
    ]


@contextmanager
def judging(story: Story, programs: Path) -> Iterator[Prometheus]:
    """Run a Prometheus with the shipped rules beside a job.

    Raises:
        ToolError: It does not start.
    """
    with Prometheus(
        programs=programs,
        directory=story.cluster.directory / "prometheus",
        targets=targets_of(story),
        rules=sorted(RULES.glob("*.rules.yaml")),
        interval_s=INTERVAL_S,
    ) as server:
        yield server


def verdicts(server: Prometheus, seconds: float) -> list[Said]:
    """Return what the verdict series said in the last seconds."""
    return [
        _said(labels, samples) for labels, samples in server.samples(VERDICT, max(1, int(seconds)))
    ]


def _said(labels: Mapping[str, str], samples: list[tuple[float, float]]) -> Said:
    return Said(
        rank=labels.get("rank", ""),
        kind=labels["class"],
        pod=labels.get("pod", ""),
        node=labels.get("node", ""),
        samples=tuple(samples),
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A straggler as the alert names it.

    Attributes:
        rank: The accused.
        kind: The class.
        confidence: 0 to 1.
        summary: Who, in a sentence.
        description: Why, with the figures of the rank and of its peers.
    """

    rank: int
    kind: str
    confidence: float
    summary: str
    description: str

    def sentence(self) -> str:
        """Return both in one."""
        return (
            f"{self.summary.rstrip('.')}: {self.description}" if self.description else self.summary
        )


def stragglers(server: Prometheus) -> list[Verdict]:
    """Return the stragglers that the alerts name now.

    Raises:
        OSError: Prometheus does not answer.
    """
    return [
        Verdict(
            rank=int(alert["labels"]["rank"]),
            kind=alert["labels"]["class"],
            confidence=float(alert["value"]),
            summary=" ".join(alert["annotations"].get("summary", "").split()),
            description=" ".join(alert["annotations"].get("description", "").split()),
        )
        for alert in server.ask("alerts")["alerts"]
        if alert["labels"]["alertname"] == "KittyStraggler" and alert["state"] == "firing"
    ]


def heartbeats(server: Prometheus, seconds: float) -> list[float]:
    """Return the times of the evaluations that saw the job in the last seconds."""
    times = {
        when
        for _, samples in server.samples(HEARTBEAT, max(1, int(seconds)))
        for when, _ in samples
    }
    return sorted(times)
