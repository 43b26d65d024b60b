"""Which families of a page docs/metrics.md does not describe as they are served."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.sidecar.sandbox import ROOT

TABLE = ROOT / "docs/metrics.md"
GPU = {"gpu_id", "uuid", "node", "vendor", "rank", "pid"}
"""Written as `GPU`."""
PARTS = {"histogram": {"le"}, "summary": {"quantile"}}
"""Labels that belong to the type."""


def rows(page: str) -> list[str]:
    """Returns a row of the table for each family: name, type, labels but `job`, meaning."""
    made = []
    for family in text_string_to_metric_families(page):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels}
        labels -= {"job"} | PARTS.get(family.type, set())
        common, labels = (["GPU"], labels - GPU) if labels >= GPU else ([], labels)
        shown = ", ".join([*common, *sorted(labels)])
        made.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return made


def undocumented(page: str) -> list[str]:
    """Returns the rows that the table lacks; empty is as it should be."""
    written = set(TABLE.read_text().splitlines())
    return [row for row in rows(page) if row not in written]
