"""The main job: the rank that is hit is the outlier of the signal that fits, and no other is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import cli
from lab.commands import ToolError
from lab.demo import Judged, judge_of, programs_or_why, said
from lab.faults import KINDS
from lab.job import CONTAINER, WORKLOADS
from lab.judge import Verdict, find_programs
from lab.scrape import Window
from lab.signals import SIGNALS
from lab.story import Finding, Pace, Story, StoryError


class Quiet:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    mark = say

    def show(self, story: Story, window: Window) -> None:
        self.shown += 1


def test_three_faults_name_their_ranks(root: None) -> None:
    display = Quiet()
    with Story(display=display, pace=Pace(before=3, fault=5, settle=1)) as story:
        for rank, answer in story.answers.items():
            watched = next(c for c in answer.pod["spec"]["containers"] if c["name"] == CONTAINER)
            assert {"name": "KITTY_WATCH", "value": "1"} in watched["env"]
            assert story.pods[rank].containers.keys() >= {CONTAINER, "kitty"}
        for name, rank in (("loss", 0), ("throttle", 1), ("latency", 3)):
            finding = story.inject(KINDS[name], rank)
            assert finding.named(), (name, finding.comparisons)
            assert finding.step_before is not None
            assert finding.comparisons["stopped"].outlier is None
    assert display.shown > 20
    assert sum(text.startswith("fault on") for text in display.said) == 3


def test_run_gives_a_summary_for_machines(root: None) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lab.cli",
            "run",
            "pause",
            "--rank",
            "1",
            "--seconds",
            "4",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["passed"]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
    (fault,) = report["faults"]
    assert (fault["fault"], fault["rank"], fault["named"]) == ("pause", 1, True)
    assert fault["expected_signals"] == ["stopped"]
    assert fault["signals"].keys() == SIGNALS.keys()
    assert fault["signals"]["stopped"]["outlier"] == 1
    assert fault["step_seconds"]["during"] is None
    assert "fault on: pause 100 % at rank 1" in done.stderr


def test_pytorch_trains_in_the_lab_and_its_ranks_are_seen(root: None) -> None:
    if missing := WORKLOADS["torch"].missing():
        pytest.skip(missing)
    command = ["run", "pause", "--workload", "torch", "--rank", "1", "--seconds", "4", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "lab.cli", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["job"] == "torch"
    (fault,) = report["faults"]
    assert fault["signals"]["stopped"]["outlier"] == 1  # the rank's process, not its launcher
    assert fault["signals"]["stopped"]["during"].keys() == {"0", "1", "2", "3"}
    assert fault["step_seconds"]["before"] > 0.06
    assert fault["step_seconds"]["during"] is None


def finding(kind: str, rank: int) -> Finding:
    return Finding(
        kind=KINDS[kind],
        rank=rank,
        strength=1,
        started=0,
        stopped=1,
        comparisons={},
        step_before=None,
        step_during=None,
    )


def test_the_verdict_is_one_sentence_with_numbers() -> None:
    verdict = Verdict(
        rank=2,
        kind="paused",
        confidence=0.9,
        summary="Rank 2 is slow: paused, confidence 93.24%.",
        description="Its process was found stopped (state T) 54.15% of the time.",
    )
    sentence = (
        "Rank 2 is slow: paused, confidence 93.24%: "
        "Its process was found stopped (state T) 54.15% of the time."
    )
    right = Judged(finding=finding("pause", 2), verdict=verdict, after_s=13.4)
    assert said(right) == f"after 13 s, {sentence}"
    other = Judged(finding=finding("cpu", 2), verdict=verdict, after_s=None)
    assert said(other) == f"another class than cpu: {sentence}"
    none = Judged(finding=finding("cpu", 2), verdict=None, after_s=None)
    assert said(none) == "nothing of rank 2"


def test_without_prometheus_the_demo_says_so_and_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "unpack"
    script.write_text("#!/bin/sh\necho no network >&2\nexit 100\n")
    script.chmod(0o755)
    display = Quiet()
    story = Story(display=display)
    why = programs_or_why(lambda: find_programs(unpack=script, path="/none"))
    with judge_of(story, why) as judge:
        assert judge.server is None
    assert judge.why_not == "no Prometheus: no network"
    assert display.said == [
        "note: no verdicts, the sidecars' own figures only: no Prometheus: no network"
    ]


def test_prometheus_is_fetched_while_the_machines_network_is_there(
    root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab's own reaches no mirror: what is asked for in there is never found."""
    order = []

    def fetch() -> ToolError:
        order.append("fetch")
        return ToolError("not now")

    def start(**_: object) -> Story:
        order.append("start")
        raise StoryError("no further")

    monkeypatch.setattr(cli, "programs_or_why", fetch)
    monkeypatch.setattr(cli, "Story", start)
    assert cli.main(["demo"]) == cli.FAILED
    assert order == ["fetch", "start"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["demo", "--fault", "flood"], ["--fault", "flood", "latency", "pause", "all"]),
        (["demo", "--rank", "9"], ["--rank", "'9'", "0 to 3"]),
        (["run", "flood"], ["flood", "latency", "loss"]),
        (["run", "loss", "--seconds", "0"], ["--seconds", "'0'", "1 to 3600"]),
        (["run", "loss", "--strength", "-1"], ["--strength", "'-1'", "above 0"]),
        (["run", "pause", "--strength", "500"], ["--strength", "more than 100 %"]),
        (["run", "cpu", "--strength", "1e6"], ["--strength", "more than 64 processes"]),
        (["demo", "--color"], ["--color"]),
        (["eval", "--workload", "jax"], ["--workload", "ring", "torch"]),
        (["eval", "--minutes", "0"], ["--minutes", "above 0"]),
        ([], ["COMMAND"]),
    ],
)
def test_wrong_usage_names_the_flag_and_what_is_allowed(words: list[str], names: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    for name in names:
        assert name in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["demo", "--help"], ["run", "--help"]])
def test_help_says_everything(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.cli", *words], capture_output=True, text=True, check=True
    )
    for kind in KINDS.values():
        assert kind.summary in done.stdout
    assert "exit status" in done.stdout


def test_without_root_one_line_says_so() -> None:
    code = (
        "import os, sys\n"
        "from lab.cli import main\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "sys.exit(main(['demo']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "root" in done.stderr
