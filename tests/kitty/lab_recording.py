"""What the lab's real job looked like to a Prometheus, continued from a moment of the recording."""

import json
import re

from tests.kitty.dataset import Series
from tests.kitty.servers import ROOT

RECORDING = ROOT / "tests/kitty/recordings/lab.json"  # by record_lab.py
NAMESPACE, JOB = "lab", "recorded"
STEP_S = 5
BEGIN_S = 20
"""The history is the recording's first seconds, and the page goes on from there."""


def expanded(notation: str) -> list[float | None]:
    """Return the samples of a series in promtool's notation."""
    samples: list[float | None] = []
    for word in notation.split():
        absent = re.fullmatch(r"_(?:x(\d+))?", word)
        growing = re.fullmatch(r"(-?[\d.]+(?:e[+-]?\d+)?)(?:([+-][\d.e]+))?x(\d+)", word)
        if absent:
            samples += [None] * int(absent[1] or 1)
        elif growing:
            begin, by = float(growing[1]), float(growing[2] or 0)
            samples += [begin + by * number for number in range(int(growing[3]) + 1)]
        else:
            samples.append(float(word))
    return samples


def recorded_series() -> list[Series]:
    """Return the recording's series as another job's."""
    made = []
    for text, notation in json.loads(RECORDING.read_text())["series"].items():
        name, _, inner = text.partition("{")
        labels = {
            key: json.loads(f'"{value}"')
            for key, value in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', inner)
        }
        labels |= {"namespace": NAMESPACE, "job": JOB}
        samples = expanded(notation)

        def value(t: float, samples: list[float | None] = samples) -> float | None:
            place = round((BEGIN_S + t) / STEP_S)
            return samples[place] if 0 <= place < len(samples) else None

        made.append(Series(name, labels, value, since_s=BEGIN_S))
    return made
