"""Verdicts are scored as they were said: each case by hand, on a clock that starts at 0."""

from collections.abc import Sequence

import pytest

from lab.judge import Said
from lab.scoring import NO_DATA, NOTHING, WRONG_RANK, Score, Session, Trial, episodes, score, up_to

INTERVAL, ALLOWANCE, END = 5.0, 30.0, 300.0


def said(rank: str, kind: str, *spans: tuple[float, float]) -> Said:
    """A verdict at each evaluation from the first to the last of every span."""
    times = [
        first + INTERVAL * turn
        for first, last in spans
        for turn in range(int((last - first) / INTERVAL) + 1)
    ]
    return Said(rank=rank, kind=kind, samples=tuple((when, 0.9) for when in times))


def trial(fault: str = "latency", rank: int = 1, begin: float = 100, end: float = 140) -> Trial:
    return Trial(fault=fault, level="usual", strength=1, rank=rank, begin=begin, end=end)


def scored(
    *told: Said,
    trials: Sequence[Trial] = (trial(),),
    heartbeats: Sequence[float] = tuple(range(0, 300, 5)),
) -> Score:
    session = Session(start=0, end=END, trials=trials, said=told, heartbeats=heartbeats)
    return score([session], interval=INTERVAL, allowance=ALLOWANCE)


def test_a_right_verdict() -> None:
    result = scored(said("1", "network-latency", (110, 155)))
    (outcome,) = result.outcomes
    assert (outcome.said, outcome.right, outcome.rank_right) == ("network-latency", True, True)
    assert (outcome.detected_s, outcome.cleared_s, outcome.flaps) == (10, 20, 0)
    assert (result.precision(), result.recall(), result.f1()) == (1, 1, 1)
    assert (result.false_healthy(), result.false_an_hour()) == (0, 0)
    assert result.healthy_s == 100 + (300 - 170)


def test_nothing_said() -> None:
    result = scored()
    assert [outcome.said for outcome in result.outcomes] == [NOTHING]
    assert result.outcomes[0].cleared_s is None
    assert (result.precision(), result.recall(), result.f1()) == (None, 0, None)


def test_a_late_verdict_is_none_and_yet_not_false() -> None:
    result = scored(said("1", "network-latency", (145, 160)))
    assert not result.outcomes[0].right
    assert result.false == []
    assert result.recall() == 0


def test_a_wrong_rank() -> None:
    result = scored(said("3", "network-latency", (110, 130)))
    assert result.outcomes[0].said == WRONG_RANK
    assert [wrong.why for wrong in result.false] == ["wrong rank"]
    assert (result.precision(), result.recall(), result.rank_precision()) == (0, 0, 0)
    assert result.false_healthy() == 0  # it is no healthy time


def test_a_wrong_class_has_the_right_rank() -> None:
    result = scored(said("1", "cpu", (110, 130)))
    (outcome,) = result.outcomes
    assert (outcome.said, outcome.right, outcome.rank_right) == ("cpu", False, True)
    assert [wrong.why for wrong in result.false] == ["wrong class"]
    assert (result.rank_precision(), result.rank_recall(), result.rank_f1()) == (1, 1, 1)
    assert result.confusion()["latency"] == {"cpu": 1}


def test_a_wrong_class_first_is_told_right_and_costs_precision() -> None:
    result = scored(
        said("1", "network-throttle", (110, 115)), said("1", "network-latency", (120, 150))
    )
    (outcome,) = result.outcomes
    assert (outcome.said, outcome.right, outcome.detected_s) == ("network-latency", True, 20)
    assert result.precision() == 0.5


def test_flapping() -> None:
    result = scored(said("1", "network-latency", (105, 110), (125, 130)))
    assert result.outcomes[0].flaps == 1
    assert result.outcomes[0].detected_s == 5
    assert result.outcomes[0].cleared_s == 0
    assert result.precision() == 1


def test_one_evaluation_without_it_is_no_end() -> None:
    found = episodes([said("1", "cpu", (100, 110), (120, 125), (140, 140))], INTERVAL)
    assert [(episode.first, episode.last) for episode in found] == [(100, 125), (140, 140)]


def test_what_does_not_clear_is_false() -> None:
    result = scored(said("1", "network-latency", (110, 175)))
    assert result.outcomes[0].right
    assert result.outcomes[0].cleared_s == 40
    assert [wrong.why for wrong in result.false] == ["not cleared"]
    assert result.false_healthy() == 1


def test_a_verdict_in_healthy_time() -> None:
    result = scored(said("2", "cpu", (20, 40)), said("1", "network-latency", (110, 150)))
    assert [wrong.why for wrong in result.false] == ["healthy"]
    assert result.precision() == 0.5
    assert result.false_an_hour() == pytest.approx(3600 / 230)


def test_a_verdict_from_before_the_fault_does_not_detect_it() -> None:
    result = scored(said("1", "network-latency", (80, 130)))
    assert not result.outcomes[0].right
    assert [wrong.why for wrong in result.false] == ["healthy"]


def test_no_data_is_not_counted() -> None:
    result = scored(heartbeats=[100, 105])
    assert [outcome.said for outcome in result.outcomes] == [NO_DATA]
    assert result.counted() == []
    assert (result.recall(), result.f1()) == (None, None)


def test_verdicts_that_accuse_nobody_are_told_apart() -> None:
    told = said("", "inconclusive", (110, 120))
    during = scored(told)
    assert (len(during.unnamed), during.false, during.outcomes[0].said) == (1, [], NOTHING)
    healthy = scored(said("", "path", (20, 30)))
    assert [wrong.why for wrong in healthy.false] == ["healthy"]


def test_the_whole_job_accused_is_a_wrong_rank() -> None:
    result = scored(said("all", "network-latency", (110, 130)))
    assert result.outcomes[0].said == WRONG_RANK
    assert [wrong.why for wrong in result.false] == ["wrong rank"]


def test_the_rest_of_one_fault_is_not_the_next_ones() -> None:
    both = (trial("cpu", 1, 100, 140), trial("latency", 2, 160, 200))
    result = scored(
        said("1", "cpu", (110, 165)), said("2", "network-latency", (170, 215)), trials=both
    )
    assert [outcome.said for outcome in result.outcomes] == ["cpu", "network-latency"]
    assert [outcome.cleared_s for outcome in result.outcomes] == [30, 20]
    assert result.false == []
    assert result.healthy_s == 100 + (300 - 230)


def test_sessions_add_up() -> None:
    one = Session(start=0, end=100, trials=[], said=[], heartbeats=[])
    two = Session(
        start=0, end=END, trials=[trial()], said=[said("1", "cpu", (5, 5))], heartbeats=[]
    )
    result = score([one, two], interval=INTERVAL, allowance=ALLOWANCE)
    assert result.healthy_s == 100 + 230
    assert result.false_healthy() == 1


def test_what_was_said_after_a_time_is_left_out() -> None:
    told = [said("1", "cpu", (20, 40)), said("2", "cpu", (50, 60))]
    assert up_to(30, told) == [said("1", "cpu", (20, 30))]


def test_what_is_no_fault_lasts_in_healthy_time() -> None:
    control = trial("gpu-power-cap")
    quiet = scored(trials=[control])
    assert [(o.said, o.right) for o in quiet.outcomes] == [(NOTHING, True)]
    assert quiet.counted() == []
    assert (quiet.recall(), quiet.healthy_s) == (None, END)
    named = scored(said("1", "gpu", (110, 130)), trials=[control])
    assert [(o.said, o.right) for o in named.outcomes] == [("gpu", False)]
    assert [wrong.why for wrong in named.false] == ["healthy"]
