"""The pool whose threads do not count while they wait."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest

from webhook.threads import Threads


@pytest.mark.parametrize("lends", [True, False])
def test_who_waits_keeps_no_other_from_work(lends: bool) -> None:
    threads = Threads(working=2, most=8)
    go_on = threading.Event()

    def wait() -> str:
        with threads.lent() if lends else nullcontext():
            assert go_on.wait(20)
        return "waited"

    waiting = [threads.submit(wait) for _ in range(3)]
    other = threads.submit(lambda: "worked")
    if lends:
        assert other.result(20) == "worked"
    else:  # both threads are taken
        with pytest.raises(TimeoutError):
            other.result(0.2)
    go_on.set()
    assert [each.result(20) for each in waiting] == ["waited"] * 3
    assert other.result(20) == "worked"
    threads.shutdown()


def test_threads_have_a_limit_and_go_when_they_are_too_many() -> None:
    threads = Threads(working=1, most=4)
    used: list[threading.Thread] = []
    came, go_on = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        used.append(threading.current_thread())
        with threads.lent():
            came.release()
            assert go_on.wait(20)

    waiting = [threads.submit(wait) for _ in range(10)]
    for _ in range(4):
        assert came.acquire(timeout=20)
    assert not came.acquire(timeout=0.2)  # no fifth
    go_on.set()
    for each in waiting:
        each.result(20)
    assert len(set(used)) == 4
    while sum(thread.is_alive() for thread in set(used)) > 1:
        time.sleep(0.01)
    assert threads.submit(lambda: 7).result(20) == 7
    threads.shutdown()
    for thread in set(used):
        thread.join(20)
        assert not thread.is_alive()


def test_a_failure_is_the_callers() -> None:
    threads = Threads(working=1, most=1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(20)
    assert threads.submit(lambda: 7).result(20) == 7
    threads.shutdown()
