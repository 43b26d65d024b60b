"""A pool whose threads count only while they work, not while a client keeps them waiting."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Job = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...]]


class Threads:
    """Runs jobs in the order in which they came.

    Args:
        working: How many of them work at a time. A thread that has waited may be one more until
            the next job ends.
        most: How many there are at most, with those that wait.
    """

    def __init__(self, *, working: int, most: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._working = working
        self._most = most
        self._all = 0
        self._waiting = 0
        self._over = False

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queues a job."""
        future: Future[Any] = Future()
        self._jobs.put((future, work, arguments))
        self._grow()
        return future

    def shutdown(self, *, wait: bool = True) -> None:
        """Ends the threads after the jobs that were queued; nothing waits for them."""
        del wait
        with self._lock:
            self._over = True
            for _ in range(self._all):
                self._jobs.put(None)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """The caller's thread waits: another one takes its place meanwhile."""
        with self._lock:
            self._waiting += 1
        try:
            self._grow()
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def _grow(self) -> None:
        with self._lock:
            if self._over or self._all >= min(self._working + self._waiting, self._most):
                return
            self._all += 1
        threading.Thread(target=self._run, name="client", daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work, arguments = job
            try:
                future.set_result(work(*arguments))
            except BaseException as error:  # noqa: BLE001 -- it is the one who asks who gets it
                future.set_exception(error)
            with self._lock:
                if self._all > self._working + self._waiting:
                    self._all -= 1
                    return
        with self._lock:
            self._all -= 1
