"""When each collector samples, and what it may cost.

One thread runs all rounds: the collectors share what the earlier ones of the same round read,
and a single thread keeps the agent small. A collector that waits for a device (the GPU driver)
has a thread of its own and hands over finished values.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from sidecar.collectors.base import Reason, UnavailableError
from sidecar.sources.errors import ExhaustedError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sidecar.collectors.base import Collector

LOG = logging.getLogger("kitty.sampler")

TOTAL = 0.005
"""Share of one core that all collectors may use together. What they really use is a little more:
a round that is dear now and then is reckoned as less than it is. Serving scrapes comes on top."""
LONGEST_INTERVAL = 5.0
"""Seconds: no collector samples less often, whatever it costs."""
TOGETHER = 0.05
"""Seconds by which a round may begin early, to run with others: waking up is dear."""
STALLED_AFTER = 15.0
"""Seconds without a finished round after which a collector's values are no longer served."""


class Rounds:
    """One collector's rounds: runs them behind a guard and knows how they went.

    Attributes:
        interval: seconds between rounds now in force.
        duration: seconds that the latest round took; None before the first.
        errors: rounds that ended in an unexpected exception.
        due: when the next round is.
        budget: share of one core that it may use.
        reason: why the collector is down; None while it is up.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.collector = collector
        self.interval = collector.interval
        self.duration: float | None = None
        self.errors = 0
        self.due = 0.0
        self.budget = TOTAL
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._outcome: Reason | None = Reason.STARTING
        self._finished = clock()
        self._cost = 0.0

    @property
    def reason(self) -> Reason | None:
        """Why the collector is down now; None while it is up."""
        if self._outcome is None and self._clock() - self._finished > STALLED_AFTER:
            return Reason.STALLED
        return self._outcome

    def run(self) -> None:
        """Runs one round; never raises."""
        began, cpu = self._clock(), self._cpu_clock()
        try:
            self.collector.sample()
        except UnavailableError as e:
            self._end(e.reason, str(e))
        except (SourceError, ExhaustedError, OSError) as e:
            self._end(_reason(e), str(e))
        except Exception as e:  # noqa: BLE001 # the guard: one collector's fault is its own
            self.errors += 1
            self._end(Reason.ERROR, f"{type(e).__name__}: {e}", traceback=True)
        else:
            self._end(None, "")
        self._finished = self._clock()
        self.duration = self._finished - began
        self._spread(self._cpu_clock() - cpu)
        self.due = began + self.interval

    def _end(self, reason: Reason | None, text: str, *, traceback: bool = False) -> None:
        if reason is not self._outcome:
            if reason is not None:
                LOG.warning("%s: %s: %s", self.collector.name, reason, text, exc_info=traceback)
            elif self._outcome is not Reason.STARTING:
                LOG.info("%s: works again", self.collector.name)
        self._outcome = reason

    def _spread(self, cost: float) -> None:
        # A single dear round (the first, a fork storm) must not slow the next minute.
        weight = 1.0 if self._cost == 0.0 else 0.3 if cost > self._cost else 0.6
        self._cost += weight * (cost - self._cost)
        base = self._base()
        self.interval = min(max(base, self._cost / self.budget), max(LONGEST_INTERVAL, base))

    def _base(self) -> float:
        down = self._outcome not in {None, Reason.STARTING}
        return LONGEST_INTERVAL if down else self.collector.interval

    @property
    def share(self) -> float:
        """Share of one core that the rounds would use without being spread out."""
        return self._cost / self._base()


def fair_budget(shares: Iterable[float]) -> float:
    """Returns what each collector may use, so that the dear ones leave room for the others.

    Args:
        shares: of one core, what each would use.
    """
    left, waiting = TOTAL, sorted(shares)
    for index, share in enumerate(waiting):
        fair = left / (len(waiting) - index)
        if share > fair:
            return fair
        left -= share
    return TOTAL


def _reason(error: BaseException) -> Reason:
    """Names what the kernel said; a source's own error has the kernel's as its cause."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, PermissionError):
        return Reason.PERMISSION
    if isinstance(cause, FileNotFoundError | ProcessLookupError):
        return Reason.MISSING
    return Reason.ERROR


class Sampler:
    """Runs the rounds of all collectors in one thread, in the order of their table."""

    def __init__(
        self, rounds: Sequence[Rounds], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rounds = tuple(rounds)
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the round in progress."""
        self._stop.set()
        self._thread.join()

    def once(self) -> None:
        """Runs every round now, in the caller's thread: for tests and measurements."""
        for rounds in self.rounds:
            rounds.run()

    def _run(self) -> None:
        while not self._stop.is_set():
            now = self._clock()
            for rounds in self.rounds:
                if rounds.due <= now + TOGETHER and not self._stop.is_set():
                    rounds.run()
            budget = fair_budget(rounds.share for rounds in self.rounds)
            for rounds in self.rounds:
                rounds.budget = budget
            pause = min(r.due for r in self.rounds) - self._clock()
            self._stop.wait(max(pause, 0.01))
