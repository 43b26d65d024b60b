"""Writes families as text: Prometheus's format 0.0.4 and OpenMetrics 1.0.

prometheus_client's own writers check and escape every name of every sample anew, which was three
quarters of a scrape's cost and most of what an idle agent used. Names are the agent's own here,
and most labels are those of the sample before. Negotiation and numbers are the library's.

Sources: prometheus.io, Exposition formats; the OpenMetrics specification 1.0.
"""

from __future__ import annotations

import gzip
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import Metric

_SUFFIXES = {"counter": "_total", "info": "_info"}
"""What the older format has at the end of a family's own name."""
_OLDER_TYPES = {"info": "gauge", "unknown": "untyped"}
_OPENMETRICS = "application/openmetrics-text"
_VERSION = re.compile("version=[^;]*")


def text(families: Iterable[Metric], *, openmetrics: bool = False) -> str:
    """Returns the page."""
    lines: list[str] = []
    for family in families:
        name, kind = family.name, family.type
        documentation = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        if openmetrics:
            documentation = documentation.replace('"', r"\"")
        else:
            name += _SUFFIXES.get(kind, "")
            kind = _OLDER_TYPES.get(kind, kind)
        lines.append(f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n")
        lines.extend(
            f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n"
            for sample in family.samples
        )
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines)


def answer(
    families: Iterable[Metric], *, accept: str, accept_encoding: str
) -> tuple[bytes, list[tuple[str, str]]]:
    """Returns body and headers for what a client says it takes."""
    kind = _kind(accept)
    page = text(families, openmetrics=kind.startswith(_OPENMETRICS))
    # Half a surrogate, as in a name that is no UTF-8, must not cost the page.
    body = page.encode("utf-8", "replace")
    headers = [("Content-Type", kind)]
    if gzip_accepted(accept_encoding):
        # The quickest level gives a tenth of the size; the best takes twelve times as long.
        body = gzip.compress(body, compresslevel=1)
        headers.append(("Content-Encoding", "gzip"))
    return body, [*headers, ("Content-Length", str(len(body)))]


def _kind(accept: str) -> str:
    """Returns the content type; a version that is none asks for the oldest format."""
    try:
        _, kind = choose_encoder(accept)
    except (TypeError, ValueError):
        _, kind = choose_encoder("")
    # The library promises whatever later version it was asked for.
    return _VERSION.sub("version=1.0.0", kind) if kind.startswith(_OPENMETRICS) else kind


def _number(value: float) -> str:
    number: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return number


def _labels(labels: Mapping[str, str]) -> str:
    return f"{{{','.join([_label(*label) for label in sorted(labels.items())])}}}" if labels else ""


@lru_cache(4096)
def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{name}="{escaped}"'
