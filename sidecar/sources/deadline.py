"""Calls that may hang for ever, one at a time, each under a deadline."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LOG = logging.getLogger("kitty.deadline")


class _Call:
    """One call and whether it has ended."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        except Exception:
            # The caller reads results where `work` leaves them, so nobody awaits this one.
            LOG.exception("a call into a driver failed")
        finally:
            self.ended.set()


class DeadlineRunner:
    """Runs calls in a thread that is left behind when a call hangs.

    A call that hung is never started again before it has ended, so there is at most one thread
    a key, and one.

    Args:
        name: for the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_Call | None] | None = None
        self._hung: dict[str, _Call] = {}

    @property
    def hanging(self) -> bool:
        """Whether some call has not ended since its deadline."""
        return any(not call.ended.is_set() for call in self._hung.values())

    def run(self, key: str, work: Callable[[], None], *, deadline: float) -> bool:
        """Runs `work`; returns whether it ended within `deadline` seconds.

        False at once where the key's call of before still hangs.
        """
        before = self._hung.get(key)
        if before is not None:
            if not before.ended.is_set():
                return False
            del self._hung[key]
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(
                target=_serve, args=(self._queue,), name=self._name, daemon=True
            ).start()
        call = _Call(work)
        self._queue.put(call)
        if call.ended.wait(deadline):
            return True
        self._hung[key] = call
        self.close()
        return False

    def close(self) -> None:
        """Ends the thread once its call has ended."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None


def _serve(queue: SimpleQueue[_Call | None]) -> None:
    while (call := queue.get()) is not None:
        call.run()
