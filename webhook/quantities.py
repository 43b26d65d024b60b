"""Kubernetes resource quantities, as far as comparing them needs."""

from __future__ import annotations

import functools
import re
from decimal import Decimal

_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,24}(?:\.\d{0,24})?|\.\d{1,24}))"
    r"(?:(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)|[eE]([+-]?\d{1,2}))?",
    re.ASCII,  # no API server reads other scripts' digits
)
_SUFFIX = {
    **{unit + "i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{unit: Decimal(1000) ** -power for power, unit in enumerate("mun", start=1)},
}


def parse_quantity(text: object) -> Decimal | None:
    """Reads a quantity such as ``500m``, ``1.5Gi``, ``2e3`` or a bare number.

    Args:
        text: The value as JSON gives it: a string or a number.

    Returns:
        The value in the base unit (cores, bytes, pieces); None where it is no quantity.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    return _parse(str(text))


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> Decimal | None:
    match = _QUANTITY.fullmatch(text)
    if not match:
        return None
    number, suffix, exponent = match.groups()
    value = Decimal(number)
    if suffix:
        value *= _SUFFIX[suffix]
    elif exponent:
        value = value.scaleb(int(exponent))
    return value
