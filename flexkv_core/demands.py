"""What a chain's settings demand of its tiers, held against what the tiers can do.

Asked twice: when a file is checked, of what drivers declare; when a chain starts, of opened tiers.

Threads: any; pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .models import TierConfig, WritePolicy
from .tier import TierCapabilities


class Unmet(NamedTuple):
    """One setting that its tier cannot serve.

    Attributes:
        number: The tier's place, from 0.
        field: The setting.
        line: Why, and what to do.
    """

    number: int
    field: str
    line: str


def unmet_demands(
    configs: Sequence[TierConfig], capabilities: Sequence[TierCapabilities | None]
) -> list[Unmet]:
    """Why this order of tiers cannot work, in all points; empty if it can.

    Args:
        configs: The tiers' settings, fast to slow.
        capabilities: Per tier what it can do; None where that is not known, and then nothing is held
            against it.
    """
    return [
        Unmet(number, field, line)
        for number, config in enumerate(configs)
        for field, line in _unmet(number, config, capabilities)
    ]


def _unmet(
    number: int, config: TierConfig, capabilities: Sequence[TierCapabilities | None]
) -> Iterator[tuple[str, str]]:
    can, first = capabilities[number], capabilities[0]
    if config.write is WritePolicy.BACK:
        if number != 1 or (first is not None and not first.direct_slots):
            yield "write", "back needs the first tier right above it, with addressable memory (such as cpu)"
        if config.read_only:
            yield "write", "back and read_only exclude each other"
    if can is None:
        return
    if can.shared and config.ttl_s is not None:
        yield (
            "ttl_s",
            "values of a shared tier do not tell their age: have the store expire them, by an option of its "
            "driver or a rule of its own",
        )
    if can.shared and not isinstance(config.promote, str):
        yield "promote", "hits are counted in tiers that one process fills: set always or never"
    for name, is_on in (("codec", config.codec.is_on), ("limits", config.limits.is_on)):
        if is_on and can.direct_slots:
            yield (
                name,
                "its memory is what the device copies to and from, so nothing may stand between: "
                "set it on a tier below",
            )
