"""Scraping the sidecars, as Prometheus does, and what a few scrapes in a row say."""

import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 2.0

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Page:
    """One scrape of one sidecar.

    Attributes:
        time: Monotonic, seconds.
        series: Labels and value of each series, by sample name.
    """

    time: float
    series: Mapping[str, Sequence[tuple[Labels, float]]]

    def value(self, name: str, /, **labels: str) -> float | None:
        """Return the sum of the series that have these labels; None where there is none."""
        wanted = labels.items()
        found = [value for own, value in self.series.get(name, ()) if wanted <= own.items()]
        return sum(found) if found else None


def scrape(address: str, port: int) -> Page:
    """Fetch and parse a sidecar's page.

    Raises:
        OSError: There is no answer.
        ValueError: The answer is not in the exposition format.
    """
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    series: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Page(time.monotonic(), series)


class Scraper:
    """Scrapes the sidecars of a job side by side; use it as a context manager.

    Args:
        targets: Address and port by rank.
    """

    def __init__(self, targets: Mapping[int, tuple[str, int]]) -> None:
        self._targets = targets
        self._pool = ThreadPoolExecutor(len(targets), thread_name_prefix="scrape")

    def __enter__(self) -> Self:
        """Nothing is scraped yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is under way."""
        self._pool.shutdown()

    def round(self) -> dict[int, Page]:
        """Return the pages by rank; a rank without an answer is absent."""
        return {
            rank: page
            for rank, page in zip(
                self._targets, self._pool.map(self._try, self._targets.values()), strict=True
            )
            if page is not None
        }

    @staticmethod
    def _try(target: tuple[str, int]) -> Page | None:
        try:
            return scrape(*target)
        except (OSError, ValueError):
            return None


@dataclass(frozen=True)
class Window:
    """Scrapes of a stretch of time.

    Attributes:
        rounds: Pages by rank, in order of time.
        ranks: Rank by address of its pod.
    """

    rounds: Sequence[Mapping[int, Page]]
    ranks: Mapping[str, int]

    def pages(self, rank: int) -> list[Page]:
        """Return a rank's pages, in order."""
        return [pages[rank] for pages in self.rounds if rank in pages]

    def gauge(self, rank: int, name: str, /, **labels: str) -> list[float]:
        """Return the values that a gauge had."""
        values = [page.value(name, **labels) for page in self.pages(rank)]
        return [value for value in values if value is not None]

    def increase(self, rank: int, name: str, /, **labels: str) -> float | None:
        """Return how much a counter grew; None where it was not seen twice."""
        values = self.gauge(rank, name, **labels)
        return max(0.0, values[-1] - values[0]) if len(values) > 1 else None

    def rate(self, rank: int, name: str, /, **labels: str) -> float | None:
        """Return a counter's growth a second; None where it was not seen twice."""
        pages = [page for page in self.pages(rank) if page.value(name, **labels) is not None]
        grown = self.increase(rank, name, **labels)
        if grown is None or pages[-1].time <= pages[0].time:
            return None
        return grown / (pages[-1].time - pages[0].time)

    def peers(self, rank: int, name: str) -> dict[int, str]:
        """Return the ranks that a family has a series about, with the address of each."""
        found = {}
        for page in self.pages(rank):
            for labels, _ in page.series.get(name, ()):
                address = labels.get("peer", "")
                if address in self.ranks and self.ranks[address] != rank:
                    found[self.ranks[address]] = address
        return found
