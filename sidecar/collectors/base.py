"""What a collector is, and what it may say when it cannot work."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric


class Reason(StrEnum):
    """Why a collector is down: the values of `kitty_collector_up{reason}`."""

    PERMISSION = "permission"
    MISSING = "missing"
    UNSUPPORTED = "unsupported"
    NO_BCC = "no_bcc"
    NO_BTF = "no_btf"
    LOCKDOWN = "lockdown"
    MEMORY = "memory"
    TIMEOUT = "timeout"
    MISMATCH = "mismatch"
    ERROR = "error"
    STALLED = "stalled"
    STARTING = "starting"


class UnavailableError(Exception):
    """The collector cannot work here or now; its series are absent until it can.

    Args:
        reason: for the label.
        text: for the log: what is missing and what would help.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Collector(Protocol):
    """One table of the metrics reference.

    `sample` runs in the sampler's thread, every `interval` seconds at the soonest; what it reads
    it keeps as one immutable value. `collect` runs in the thread of a scrape, several at a time,
    and turns the latest value into metric families: it opens no file and waits for nothing.

    One that bounds its own series says in an attribute `left_out` how many samples the latest
    page lacks for it; they are counted as dropped.
    """

    name: str
    interval: float

    def sample(self) -> None:
        """Reads the sources once.

        Raises:
            UnavailableError: nothing can be read, and why.
        """

    def collect(self) -> Iterable[Metric]:
        """Returns the families of the latest sample, empty before the first one."""
