"""A plan follows from its seed, a record is read as it was written, and a short run is scored."""

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.commands import ToolError
from lab.display import Narration
from lab.evalreport import markdown, plot
from lab.evaluation import LEVELS, Plan, Planned, Record, evaluate, make_plan, put_aside
from lab.faults import KINDS
from lab.judge import Said, find_programs
from lab.scoring import EXPECTED, Session, Trial


def test_every_fault_of_the_lab_has_an_expectation_and_levels() -> None:
    assert EXPECTED.keys() == LEVELS.keys() == KINDS.keys()
    for levels in LEVELS.values():
        assert [level.name for level in levels] == ["usual", "mild", "hard"]
    held_out = [level for levels in LEVELS.values() for level in levels if level.held_out]
    assert len(held_out) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_every_trial_once_and_no_rank_twice_in_a_row(seed: int) -> None:
    plan = make_plan(workload="ring", seed=seed, quick=False)
    assert plan == make_plan(workload="ring", seed=seed, quick=False)
    counts = Counter((trial.fault, trial.level) for trial in plan.trials)
    assert set(counts.values()) == {2}
    assert len(counts) == 3 * len(EXPECTED)
    assert len(set(plan.trials)) == len(plan.trials)
    pairs = list(zip(plan.trials, plan.trials[1:], strict=False))
    assert not [pair for pair in pairs if pair[0].rank == pair[1].rank]


def test_the_quick_plan_keeps_away_from_held_out_strengths() -> None:
    plan = make_plan(workload="ring", seed=1, quick=True)
    assert sorted(trial.fault for trial in plan.trials) == sorted(EXPECTED)
    assert {trial.level for trial in plan.trials} == {"usual"}
    assert not any(levels[0].held_out for levels in LEVELS.values())


def record() -> Record:
    plan = replace(make_plan(workload="ring", seed=1, quick=True), healthy_s=100)
    where: dict[str, Any] = {
        "date": "2026-01-01 00:00 UTC",
        "cores": 2,
        "kernel": "6.1",
        "python": "3.11",
        "prometheus": "prometheus, version 2.42",
        "kitty": "0.1.0",
        "load_median": 1.5,
        "load_highest": 3.0,
        "seconds": 300,
    }
    trials = [
        Trial(
            fault=planned.fault,
            level=planned.level,
            strength=5,
            rank=planned.rank,
            begin=100 + 60 * turn,
            end=130 + 60 * turn,
            step_before=0.2,
            step_during=0.3 if turn else None,
        )
        for turn, planned in enumerate(plan.trials[:2])
    ]
    told = [
        Said(rank=str(trials[0].rank), kind=trials[0].expected, samples=((110.0, 0.9),)),
        Said(rank="9", kind="cpu", samples=((20.0, 0.9),)),
    ]
    beats = [float(beat) for beat in range(0, 300, 5)]
    session = Session(start=0, end=300, trials=trials, said=told, heartbeats=beats)
    return Record(plan=plan, place=where, sessions=[session], failures=[(plan.trials[2], "why")])


def test_a_record_is_read_as_it_was_written_and_says_what_is_left(tmp_path: Path) -> None:
    made = record()
    made.write(tmp_path)
    read = Record.read(tmp_path)
    assert read == made
    assert read.left() == list(made.plan.trials[3:])
    assert read.healthy_left() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]


def test_another_plan_is_not_gone_on_with(tmp_path: Path) -> None:
    try:
        find_programs()
    except ToolError as error:
        pytest.skip(str(error))
    record().write(tmp_path)
    other = make_plan(workload="ring", seed=2, quick=True)
    with pytest.raises(ValueError, match="another plan"):
        evaluate(other, folder=tmp_path, display=Narration(), minutes=None, resume=True)


def test_no_record_is_written_over(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / "eval.json").write_text(name)
        put_aside(tmp_path)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"eval.json.1": "first", "eval.json.2": "second"}


@pytest.mark.parametrize(
    ("text", "told"), [(None, "no eval.json to go on with"), ("{", "eval.json:")]
)
def test_what_cannot_be_gone_on_with_is_named(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "eval.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        Record.read(tmp_path)


def test_the_report_says_what_was_missed_and_what_was_wrong() -> None:
    made = record()
    text = markdown(made, plot_name="eval.svg")
    first, second, third = made.plan.trials[:3]
    assert "2 of 7 trials" in text
    assert "load 1.5 at the median" in text
    assert f"| {first.fault} | usual: 5 {KINDS[first.fault].unit} | no step ended | 1 of 1" in text
    assert f"- {second.fault} 5 {KINDS[second.fault].unit} (usual) at rank {second.rank}, " in text
    assert f"- {third.fault} (usual) could not be made: why" in text
    assert "- 4 trials were not made." in text
    assert "- healthy: cpu at rank 9 for 5 s, before the first fault" in text


def test_the_plot_has_a_dot_for_each_trial() -> None:
    drawn = ET.fromstring(plot(record()))
    dots = [e for e in drawn.iter("{http://www.w3.org/2000/svg}circle") if len(e)]
    assert len(dots) == 2


@pytest.mark.quiet
def test_a_short_run_is_scored_from_what_the_rules_said(root: None, tmp_path: Path) -> None:
    try:
        find_programs()
    except ToolError as error:
        pytest.skip(str(error))
    plan = Plan(
        workload="ring",
        seed=5,
        quick=True,
        trials=(Planned(fault="pause", level="usual", rank=1),),
        fault_s=30,
        calm_s=1,
        healthy_s=0,
    )
    made = evaluate(plan, folder=tmp_path, display=Narration(), minutes=None, resume=False)
    result = made.score()
    (outcome,) = result.outcomes
    assert (outcome.said, outcome.right) == ("paused", True)
    assert outcome.detected_s is not None
    assert 0 < outcome.detected_s <= plan.fault_s
    assert outcome.trial.step_during is None
    assert not result.false
    assert Record.read(tmp_path).left() == []
