"""Plots as SVG: lines over a band over time, and bars over time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from kitty.history import stretches
from kitty.text import clean, figure

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 66, 20, 10, 24
ROW = 24
NAMES = 190
TICKS_S = (10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 5 * 86400)


def safe(text: str) -> str:
    """Return foreign text as it may stand in an element or an attribute."""
    return escape(clean(text), quote=True)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line.

    Attributes:
        label: Shown while the pointer is on it.
        points: Unix times and values.
        style: Class of the style sheet.
    """

    label: str
    points: Points
    style: str


@dataclass(frozen=True, kw_only=True)
class Shade:
    """A stretch of time that is marked, strongly where the plot belongs to its cause."""

    begin: float
    end: float
    strong: bool
    label: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stretch of time in a row of its own."""

    begin: float
    end: float
    label: str
    style: str


@dataclass(frozen=True)
class Axis:
    """Maps values to places."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the place of a value; what is outside is put on the edge."""
        share = (value - self.low) / (self.high - self.low)
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)


def line_plot(
    *,
    title: str,
    unit: str,
    span: tuple[float, float],
    step: int,
    lines: Sequence[Line],
    band: Mapping[float, Points],
    shades: Sequence[Shade],
) -> str:
    """Return one signal's plot.

    Args:
        title: What a screen reader says.
        unit: Of the values.
        span: Unix times of the left and right edge.
        step: Seconds between two points; more than that between two is a gap.
        lines: The later ones lie over the earlier ones.
        band: By share of the ranks (0, 0.25, 0.75, 1) their values; can be empty.
        shades: Marked stretches.
    """
    values = [value for line in lines for _, value in line.points]
    values += [value for points in band.values() for _, value in points]
    x = Axis(*span, LEFT, WIDTH - RIGHT)
    low, high, ticks = y_range(values)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(title)}">',
        *_shades(x, shades),
        *_times(x, HEIGHT - BOTTOM),
    ]
    parts += [
        f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">'
        f"{safe(figure(tick, unit) if tick else '0')}</text>"
        for tick in ticks
    ]
    parts += _band(x, y, band, step)
    for line in lines:
        path = "".join(_path(x, y, stretch) for stretch in stretches(line.points, step))
        if path:
            title = f"<title>{safe(line.label)}</title>"
            parts.append(f'<path class="line {line.style}" d="{path}">{title}</path>')
    return "".join([*parts, "</svg>"])


def bar_plot(
    *, title: str, span: tuple[float, float], rows: Sequence[tuple[str, Sequence[Bar]]]
) -> str:
    """Return rows of bars over time, each with its name at the left."""
    width, bottom = 2 * WIDTH, len(rows) * ROW + 6
    x = Axis(*span, NAMES, width - RIGHT)
    parts = [
        f'<svg viewBox="0 0 {width} {bottom + BOTTOM}" role="img" aria-label="{safe(title)}">',
        *_times(x, bottom, most=10),
    ]
    for number, (name, bars) in enumerate(rows):
        top = number * ROW + 4
        parts.append(
            f'<text class="name" x="{NAMES - 8}" y="{top + 14}" text-anchor="end">'
            f"<title>{safe(name)}</title>{safe(_cut(name, 26))}</text>"
        )
        for bar in bars:
            left, right = x(bar.begin), x(bar.end)
            right = max(right, left + 3)
            parts.append(
                f'<rect class="bar {bar.style}" x="{left:.1f}" y="{top}" '
                f'width="{right - left:.1f}" height="{ROW - 6}" rx="3">'
                f"<title>{safe(bar.label)}</title></rect>"
            )
    return "".join([*parts, "</svg>"])


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _shades(x: Axis, shades: Sequence[Shade]) -> Iterator[str]:
    for shade in shades:
        left, right = x(shade.begin), x(shade.end)
        style = "fault" if shade.strong else "faint"
        yield (
            f'<rect class="{style}" x="{left:.1f}" y="{TOP}" width="{max(2.0, right - left):.1f}" '
            f'height="{HEIGHT - BOTTOM - TOP}"><title>{safe(shade.label)}</title></rect>'
        )


def _times(x: Axis, bottom: float, most: int = 6) -> Iterator[str]:
    """Yield marks and times of the day (UTC) below, at round moments; a date where it changes."""
    span = x.high - x.low
    every = next((tick for tick in TICKS_S if span / tick <= most), 10 * 86400)
    form = "%H:%M:%S" if every < 60 else "%H:%M" if every < 86400 else "%m-%d"
    when = math.ceil(x.low / every) * every
    while when <= x.high:
        moment = datetime.fromtimestamp(when, UTC)
        midnight = form == "%H:%M" and when % 86400 == 0
        text = moment.strftime("%m-%d" if midnight else form)
        yield (
            f'<path class="grid" d="M{x(when):.1f} {TOP / 2}V{bottom}"/>'
            f'<text x="{x(when):.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>'
        )
        when += every


def y_range(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return the lowest and highest value to draw and round ones between.

    From 0 on, unless all values lie in the upper half: then the difference would not be seen.
    """
    top, bottom = max(values, default=1.0), min(values, default=0.0)
    # A tenth at least, or the ticks' three digits would be the same.
    low = 0.0 if 0 <= bottom < 0.5 * top else min(bottom, top - 0.1 * abs(top))
    if top <= low:
        top = low + 1.0
    raw = (top - low) / 3
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= 0.999 * raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(top / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    return ticks[0], ticks[-1], ticks


def _path(x: Axis, y: Axis, points: Points) -> str:
    steps = [f"{x(when):.1f} {y(value):.1f}" for when, value in points]
    # A point alone is drawn as a dot by the round ends of its line.
    return f"M{steps[0]}h.01" if len(steps) == 1 else f"M{steps[0]}L{' '.join(steps[1:])}"


def _band(x: Axis, y: Axis, band: Mapping[float, Points], step: int) -> Iterator[str]:
    """Yield the area of all ranks and that of the middle half."""
    for low, high, style, label in (
        (0, 1, "all", "all ranks"),
        (0.25, 0.75, "half", "middle half"),
    ):
        if low not in band or high not in band:
            continue
        lower = dict(band[low])
        both = [point for point in band[high] if point[0] in lower]
        for stretch in stretches(both, step):
            there = [f"{x(when):.1f} {y(value):.1f}" for when, value in stretch]
            back = [f"{x(when):.1f} {y(lower[when]):.1f}" for when, _ in reversed(stretch)]
            yield (
                f'<path class="band {style}" d="M{"L".join(there + back)}Z">'
                f"<title>{label}</title></path>"
            )
