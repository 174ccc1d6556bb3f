"""Sizes, durations and element types as people write them: ``8GiB``, ``500ms``, ``fp8_e4m3``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*((?:[kmgtp]i?)?b?)\s*$", re.IGNORECASE)
_TIME = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|m|min|h|d)?\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_MOST_BYTES = 1 << 60
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(value: object) -> object:
    """``8GiB`` -> 8589934592, ``8GB`` -> 8000000000, ``4096`` -> 4096; other types pass unchanged.

    Raises:
        ValueError: text that is no size, or a size that no machine has.
    """
    if isinstance(value, bool):
        # noqa below: pydantic reports a ValueError, and lets a TypeError through.
        raise ValueError("must be a size such as 8GiB, not true or false")  # noqa: TRY004
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError("must be a size such as 8GiB, 500MB or a number of bytes")
    number, unit = match.groups()
    unit = unit.lower().removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    size = float(number) * base ** _POWER[unit.removesuffix("i")]
    if size > _MOST_BYTES:
        raise ValueError("must be a size of at most 1024 PiB")
    return round(size)


def parse_seconds(value: object) -> object:
    """``250ms`` -> 0.25, ``2m`` -> 120.0; numbers are seconds; other types pass unchanged.

    Raises:
        ValueError: text that is no duration.
    """
    if isinstance(value, bool):
        # noqa below: pydantic reports a ValueError, and lets a TypeError through.
        raise ValueError("must be a duration such as 250ms, not true or false")  # noqa: TRY004
    if not isinstance(value, str):
        return value
    match = _TIME.match(value)
    if match is None:
        raise ValueError("must be a duration such as 250ms, 30s, 2m or a number of seconds")
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


_KV_DTYPES = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("fp16", "float16"),
    "float32": ("fp32", "float32"),
    "float8_e4m3fn": ("fp8", "float8", "e4m3", "fp8_e4m3", "float8_e4m3fn", "mxfp8"),
    "float8_e4m3fnuz": ("float8_e4m3fnuz",),
    "float8_e5m2": ("e5m2", "fp8_e5m2", "float8_e5m2"),
    "uint8": ("nvfp4", "fp4", "e2m1", "fp4_e2m1", "fp4_mx_block16", "uint8"),
}
"""The element type that a pool stores -> its names.

Source: sglang 0.5.23, arg_groups/fields/model.py (choices of --kv-cache-dtype) and 0.5.20,
server_args.py (``fp4_e2m1``); two FP4 numbers are stored in one ``uint8``.
"""
KV_DTYPE_NAMES = {name: dtype for dtype, names in _KV_DTYPES.items() for name in names}


def parse_kv_dtype(value: object) -> object:
    """``fp8_e5m2`` -> ``float8_e5m2``; ``auto`` -> None; what is not text passes unchanged.

    Raises:
        ValueError: a name that means no element type; it is never taken for another one.
    """
    if not isinstance(value, str):
        return value
    name = value.strip().lower()
    if name == "auto":
        return None
    if name not in KV_DTYPE_NAMES:
        raise ValueError(f"must be auto or one of {', '.join(sorted(KV_DTYPE_NAMES))}")
    return KV_DTYPE_NAMES[name]


def format_bytes(value: int) -> str:
    """A size for people, in binary units."""
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def exact_bytes(value: int) -> str:
    """A size as ``parse_bytes`` reads it, in the largest binary unit that loses nothing: ``8GiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value and value % (1 << power) == 0:
            return f"{value >> power}{unit}"
    return str(value)


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""A size in bytes; accepts ``8GiB``, ``8GB`` or a number."""

Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]
"""A duration in seconds; accepts ``250ms``, ``2m`` or a number."""

KvDtype = Annotated[str | None, BeforeValidator(parse_kv_dtype)]
"""A KV element type as torch names it, or None for the engine's; accepts every name of SGLang's."""
