"""One review from its bytes to the bytes of its answer, whatever happens in between."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from webhook.decision import (
    Decision,
    Origin,
    Plan,
    Skip,
    Version,
    decide,
    skip,
)
from webhook.mutate import operations
from webhook.pod import Pod, UnreadablePodError
from webhook.review import Request, answer, encode, read

if TYPE_CHECKING:
    from webhook.config import Config
    from webhook.metrics import Metrics
    from webhook.patch import Operation
    from webhook.profiles import Level

log = logging.getLogger("kitty.webhook")

_EXPECTED = (Skip.ALREADY_INJECTED,)

Decide = Callable[..., Decision]


class Reviewer:
    """Answers admission reviews.

    Args:
        config: The webhook's configuration.
        metrics: Where outcomes are counted.
        oldest: Gives the oldest version among server and kubelets as last learned, at no cost.
        decide: The decision; tests give one that fails.
        clock: Seconds, for the histogram.
    """

    def __init__(
        self,
        *,
        config: Config,
        metrics: Metrics,
        oldest: Callable[[], Version | None] = lambda: None,
        decide: Decide = decide,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._oldest = oldest
        self._decide = decide
        self._clock = clock

    def review(self, body: bytes, level: Level | None) -> bytes:
        """Answers one review: a failure of our own lets the pod through unchanged.

        Args:
            body: The request's body.
            level: The Pod Security level that the path names; None for namespaces without one.

        Raises:
            BadReviewError: The body is nothing that could be answered.
        """
        start = self._clock()
        request = read(body)
        try:
            decision, patch = self._outcome(request, level or self._config.default_level)
        except Exception:
            log.exception("review failed uid=%s, the pod goes through unchanged", request.uid)
            self._metrics.errors.inc()
            decision, patch = skip(Skip.INTERNAL), []
        review = answer(request.uid, patch, decision.warnings)
        self._metrics.count(decision)
        self._metrics.duration.observe(self._clock() - start)
        _log(request, decision)
        return encode(review)

    def _outcome(self, request: Request, level: Level) -> tuple[Decision, list[Operation]]:
        if request.operation != "CREATE" or request.subresource:
            return skip(Skip.NOT_A_CREATE), []
        if request.kind != "Pod":
            return skip(Skip.NOT_A_POD), []
        origin = Origin(uid=request.uid, namespace=request.namespace, name=request.name)
        try:
            pod = Pod.read(request.object)
            decision = self._decide(pod, level, self._config, origin=origin, oldest=self._oldest())
            return decision, operations(pod, decision, self._config)
        except UnreadablePodError as error:
            return skip(Skip.UNREADABLE, str(error)), []


def _log(request: Request, decision: Decision) -> None:
    """One line for a review that did not simply inject: a line for each costs a third of it."""
    outcome = decision.outcome
    plain = isinstance(outcome, Plan) and not decision.warnings
    level = logging.DEBUG if plain or outcome in _EXPECTED else logging.INFO
    if not log.isEnabledFor(level):
        return
    what = outcome.value if isinstance(outcome, Skip) else type(outcome).__name__.lower()
    log.log(
        level,
        "%s pod=%s/%s uid=%s%s",
        what,
        _clean(request.namespace),
        _clean(request.name or "(generated)"),
        _clean(request.uid),
        "".join(f" | {w}" for w in decision.warnings),
    )


def _clean(value: str) -> str:
    return value[:80] if value.isprintable() else ascii(value[:80])
