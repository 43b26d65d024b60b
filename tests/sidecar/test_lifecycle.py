import pytest

from sidecar.attribution import PodView
from sidecar.config import Config
from sidecar.lifecycle import Lifecycle


class Pod:
    def __init__(self) -> None:
        self.view = PodView()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


WATCHED = PodView(watched=frozenset({7}))


@pytest.mark.parametrize(("policy", "patience"), [("Never", 10), ("OnFailure", 30)])
@pytest.mark.parametrize("seen", [True, False])
def test_an_ordinary_sidecar_leaves_after_its_peers(policy: str, patience: int, seen: bool) -> None:
    """Also where the trainer failed before the sidecar ran and was never seen."""
    pod, clock = Pod(), Clock()
    lifecycle = Lifecycle(
        pod,  # type: ignore[arg-type] # only its view is looked at
        Config(lifecycle="ordinary", restart_policy=policy),
        clock=clock,
    )
    if seen:
        pod.view = WATCHED
        clock.now = 1000
        assert not lifecycle.over()
        pod.view = PodView()
    clock.now += patience - 0.1
    assert not lifecycle.over()
    clock.now += 0.1
    assert lifecycle.over()


def test_a_trainer_that_comes_back_in_time_is_watched_on() -> None:
    pod, clock = Pod(), Clock()
    lifecycle = Lifecycle(
        pod,  # type: ignore[arg-type] # only its view is looked at
        Config(lifecycle="ordinary", restart_policy="OnFailure"),
        clock=clock,
    )
    for _ in range(10):
        pod.view = PodView()
        clock.now += 25
        assert not lifecycle.over()
        pod.view = WATCHED
        clock.now += 1
        assert not lifecycle.over()


@pytest.mark.parametrize(
    "config",
    [
        Config(lifecycle="native", restart_policy="Never"),
        Config(lifecycle="ordinary", restart_policy="Always"),
    ],
)
def test_a_native_one_and_one_that_would_be_started_again_stay(config: Config) -> None:
    clock = Clock()
    lifecycle = Lifecycle(Pod(), config, clock=clock)  # type: ignore[arg-type] # only its view
    clock.now = 1e6
    assert not lifecycle.over()
