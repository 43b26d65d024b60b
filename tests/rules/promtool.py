"""Runs `promtool test rules` with series and expectations that a test builds."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "manifests/rules/kitty.rules.yaml"
RECORDINGS = Path(__file__).parent / "recordings"
INTERVAL = "5s"

Series = Mapping[str, str]


@dataclass
class Expectations:
    """What must hold, at seconds after the first sample."""

    promql: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)

    def none(self, expression: str, seconds: int) -> None:
        """The expression has no series."""
        self.promql.append({"expr": expression, "eval_time": f"{seconds}s"})

    def value(self, expression: str, seconds: int, value: float, labels: str = "{}") -> None:
        """The expression has one series with this value."""
        sample = {"labels": labels, "value": value}
        self.promql.append(
            {"expr": expression, "eval_time": f"{seconds}s", "exp_samples": [sample]}
        )

    def only(self, seconds: int, *verdicts: str) -> None:
        """The verdicts are these, as ``class rank pod``, and no others."""
        self.promql.append(
            {
                "expr": "kitty:verdict * 0",
                "eval_time": f"{seconds}s",
                "exp_samples": [{"labels": labels, "value": 0} for labels in verdicts],
            }
        )

    def alert(self, name: str, seconds: int, *alerts: tuple[Mapping[str, str], str, str]) -> None:
        """The alert fires with these labels, this summary and this description, and no others."""
        self.alerts.append(
            {
                "alertname": name,
                "eval_time": f"{seconds}s",
                "exp_alerts": [
                    {
                        "exp_labels": dict(labels),
                        "exp_annotations": {
                            key: text
                            for key, text in (("summary", summary), ("description", description))
                            if text
                        },
                    }
                    for labels, summary, description in alerts
                ],
            }
        )


def check(programs: Path, folder: Path, series: Series, expected: Expectations) -> None:
    """Fail with promtool's words when an expectation does not hold."""
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": INTERVAL,
        # Any other order would do as well, but the same each time.
        "group_eval_order": ["kitty-verdict", "kitty-evidence", "kitty-watch"],
        "tests": [
            {
                "interval": INTERVAL,
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "promql_expr_test": expected.promql,
                "alert_rule_test": expected.alerts,
            }
        ],
    }
    path = folder / "test.yaml"  # JSON is YAML
    path.write_text(json.dumps(document))
    done = run(programs, "test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def run(programs: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run promtool."""
    return subprocess.run(
        [programs / "promtool", *arguments], capture_output=True, text=True, check=False
    )


@dataclass(frozen=True)
class Fault:
    """A fault of a recording: its name, its rank, when it began and ended."""

    fault: str
    rank: int
    begin: float
    end: float


@dataclass(frozen=True)
class Recording:
    """What a Prometheus scraped from the lab; see `lab.record`."""

    length: int
    faults: Sequence[Fault]
    series: Series


def recording(name: str) -> Recording:
    """Read a recording by its name."""
    read = json.loads((RECORDINGS / f"{name}.json").read_text())
    faults = [Fault(row["fault"], row["rank"], row["begin"], row["end"]) for row in read["faults"]]
    return Recording(read["length"], faults, read["series"])
