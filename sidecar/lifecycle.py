"""When a sidecar that is an ordinary container must leave, so that its Job can end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.config import Config
    from sidecar.pod import Pod

PATIENCE = {"Never": 10.0, "OnFailure": 30.0}
"""Seconds without a watched process, by restart policy: a failed trainer that will be started
again is back within the kubelet's first back-offs."""


class Lifecycle:
    """Tells an ordinary sidecar when its peers have ended.

    It counts from the start, whether or not a watched process was ever seen: a trainer can fail
    before the sidecar runs. A native sidecar is ended by the kubelet, one under restartPolicy
    Always goes on for ever.
    """

    def __init__(
        self, pod: Pod, config: Config, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pod = pod
        self._clock = clock
        self._patience = (
            PATIENCE.get(config.restart_policy) if config.lifecycle == "ordinary" else None
        )
        self._alone_since = clock()

    def over(self) -> bool:
        """Returns whether to exit with status 0 now."""
        if self._pod.view.watched:
            self._alone_since = self._clock()
        return self._patience is not None and self._clock() - self._alone_since >= self._patience
