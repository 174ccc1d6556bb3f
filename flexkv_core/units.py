"""Sizes and durations as people write them: ``8GiB``, ``500ms``; one place that reads them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?i?b?)\s*$", re.IGNORECASE)
_TIME = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|m|min|h|d)?\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(value: object) -> object:
    """``8GiB`` -> 8589934592, ``8GB`` -> 8000000000, ``4096`` -> 4096; other types pass unchanged.

    Raises:
        ValueError: text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError("must be a size such as 8GiB, 500MB or a number of bytes")
    number, unit = match.groups()
    unit = unit.lower().removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    return round(float(number) * base ** _POWER[unit.removesuffix("i")])


def parse_seconds(value: object) -> object:
    """``250ms`` -> 0.25, ``2m`` -> 120.0; numbers are seconds; other types pass unchanged.

    Raises:
        ValueError: text that is no duration.
    """
    if not isinstance(value, str):
        return value
    match = _TIME.match(value)
    if match is None:
        raise ValueError("must be a duration such as 250ms, 30s, 2m or a number of seconds")
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


def format_bytes(value: int) -> str:
    """A size for people, in binary units."""
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""A size in bytes; accepts ``8GiB``, ``8GB`` or a number."""

Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]
"""A duration in seconds; accepts ``250ms``, ``2m`` or a number."""
