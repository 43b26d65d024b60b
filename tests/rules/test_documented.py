"""Who scrapes at another interval learns of every window that depends on it."""

import re

import yaml

from tests.rules.promtool import ROOT, RULES

WINDOW = re.compile(r"\[\d+[smh]\]|\boffset \d+[smh]")


def test_every_window_of_a_recorded_series_stands_in_the_table() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    recorded = [rule["expr"] for group in groups for rule in group["rules"] if "record" in rule]
    windows = {window for expr in recorded for window in WINDOW.findall(expr)}
    assert {"[20s]", "offset 20s"} <= windows
    text = (ROOT / "docs/verdict.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `")]
    assert not {window for window in windows if not any(window in row for row in table)}
