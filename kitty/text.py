"""How figures, times and foreign names are written."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
PREFIXED = {"s", "bytes", "Hz", "W"}
SYMBOLS = {"bytes": "B", "cores": "cores", "processes": ""}


def clean(text: str) -> str:
    r"""Return foreign text without what could steer a terminal or turn a line's direction.

    Names of jobs and ranks come from environments of foreign processes.

    Example:
        An escape character comes back as the four characters ``\\x1b``.
    """
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def figure(value: float, unit: str) -> str:
    """Return a figure with three digits and its unit.

    Args:
        value: In the unit.
        unit: ``s``, ``bytes``, ``Hz`` and ``W`` take a prefix, ``ratio`` is written in percent,
            ``s/s`` as a time a second, others follow the figure; empty is none.
    """
    if not math.isfinite(value):
        return "-"
    if unit == "ratio":
        return f"{_three(100 * value)}%"
    if unit == "s/s":
        return f"{figure(value, 's')}/s"
    symbol = SYMBOLS.get(unit, unit)
    if unit not in PREFIXED:
        return f"{_three(value)} {symbol}".rstrip()
    size = abs(value)
    if size == 0:
        return f"0 {symbol}"
    # Minutes are not written as kiloseconds, and there is no part of a byte.
    steps = [
        step
        for step in SI
        if not (unit == "s" and step[0] > 1) and not (unit != "s" and step[0] < 1)
    ]
    factor, prefix = next((step for step in steps if size >= 0.9995 * step[0]), steps[-1])
    return f"{_three(value / factor)} {prefix}{symbol}"


def _three(value: float) -> str:
    """Return three significant digits, without zeros at the end, seldom with an exponent."""
    if value == 0:
        return "0"
    value = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(value)))
    if digits > 6:
        return f"{value:.1e}"
    text = f"{value:.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """Return a length of time in its two greatest units."""
    left = max(0, round(seconds))
    parts = []
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if left >= size:
            parts.append(f"{left // size} {name}")
            left %= size
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts) or "0 s"


def moment(timestamp: float) -> str:
    """Return a Unix time as date and time in UTC."""
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(timestamp: float) -> str:
    """Return a Unix time as time of the day in UTC."""
    return datetime.fromtimestamp(timestamp, UTC).strftime("%H:%M:%S UTC")


def several(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def shortened(names: Sequence[str], most: int = 6) -> str:
    """Return names in a row, and how many are left out."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def natural(text: str) -> tuple[int, float, str]:
    """Return a key that sorts 2 before 10, and numbers before other text."""
    return (
        (0, int(text), text)
        if text.isascii() and text.isdigit() and len(text) < 19
        else (1, 0, text)
    )
