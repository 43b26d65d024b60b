"""Every query of the Grafana dashboard, asked of a real Prometheus as Grafana would.

The job is the one that was recorded in the lab, GPUs of NVML's stub included. Made by hand is what
happens there too rarely: see MADE_BY_HAND.
"""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kitty import dataset, lab_recording
from tests.kitty.servers import ROOT, RealPrometheus

DASHBOARD = json.loads((ROOT / "manifests/dashboards/kitty.json").read_text())
VARIABLES = {
    "$namespace": lab_recording.NAMESPACE,
    "$job": lab_recording.JOB,
    "$pod": ".*",
    "$__rate_interval": "20s",
    "${datasource}": "prometheus",
}


MADE_BY_HAND = re.compile(r"kitty_anomaly\{")
"""Its panel shows a change of a moment, and the recording has none of round trips or stops."""
BY_HAND = {"namespace": "training", "job": "ring"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, bool]]:
    """Yield a name, the query, and whether it is asked of a moment."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"], target["instant"]
    for note in DASHBOARD["annotations"]["list"]:
        yield f"annotation {note['name']}", note["expr"], False


def replaced(query: str, **others: str) -> str:
    for name, value in {**VARIABLES, **{f"${key}": value for key, value in others.items()}}.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


@pytest.mark.parametrize(("query", "instant"), [pytest.param(q, i, id=n) for n, q, i in queries()])
def test_query_has_an_answer(prometheus: RealPrometheus, query: str, instant: bool) -> None:
    now = time.time()
    asked = replaced(query, **(BY_HAND if MADE_BY_HAND.search(query) else {}))
    if instant:
        data = prometheus.ask("query", query=asked)
    else:
        data = prometheus.ask(
            "query_range", query=asked, start=str(now - 300), end=str(now), step="10"
        )
    assert data["result"], asked


@pytest.mark.parametrize("name", ["namespace", "job", "pod"])
def test_variable_has_values(prometheus: RealPrometheus, name: str) -> None:
    (variable,) = (one for one in DASHBOARD["templating"]["list"] if one["name"] == name)
    asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
    assert asked is not None
    selector, label = replaced(asked[1]), asked[2]
    values = prometheus.ask(f"label/{label}/values", **{"match[]": selector})
    assert VARIABLES[f"${name}"] in values or len(values) == 4


OTHERS = {"up", "ALERTS", "scrape_duration_seconds", "scrape_samples_scraped"}


def test_families_of_these_tests_are_the_sidecars() -> None:
    """Series made by hand could have names that no sidecar serves."""
    sources = "".join(path.read_text() for path in (ROOT / "sidecar").rglob("*.py"))
    names = {series.name for series in dataset.all_series() if series.live}
    names |= {
        name
        for _, query, _ in queries()
        for name in re.findall(r"(?<![\w:])[a-z]\w*_\w+(?=\{)", query)
        if not name.startswith("prometheus_") and name not in OTHERS
    }
    assert len(names) > 40
    unknown = {
        name
        for name in names
        if f'"{name}"' not in sources
        and f'"{re.sub("_(total|sum|count|info)$", "", name)}"' not in sources
    }
    assert unknown == set()


def test_the_dashboard_holds_together() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    # Any data source can be chosen, and none is wired in.
    sources = [panel["datasource"] for panel in panels()]
    sources += [target["datasource"] for panel in panels() for target in panel["targets"]]
    sources += [one["datasource"] for one in DASHBOARD["templating"]["list"][1:]]
    assert {source["uid"] for source in sources} == {"${datasource}"}
    # Panels lie side by side, none over another and none beyond the edge.
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert all(panel["description"] for panel in panels())
