"""Chains that cannot work by what they, and the drivers that they name, declare.

What needs opened tiers is the chain's to check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..demands import unmet_demands
from ..models import ChainConfig, EvictionPolicy, TierConfig, WritePolicy
from ..tier import TierCapabilities
from .schema import Path

Fault = tuple[Path, str]


def chain_faults(
    config: ChainConfig, declared: Sequence[TierCapabilities | None] | None = None
) -> list[Fault]:
    """All that contradicts itself or its drivers, each with its place and the reason.

    Args:
        config: The chain.
        declared: Per tier what its driver says that its tiers can do; None where it does not say.
    """
    faults: list[Fault] = []
    for index, tier in enumerate(config.tiers):
        above = config.tiers[:index]
        faults += [(("tiers", index, field), line) for field, line in _tier_faults(tier, above)]
        faults += [
            (("tiers", index, "codec", field), line) for field, line in tier.codec.missing_extras().items()
        ]
    told = {path for path, _ in faults}
    for number, field, line in unmet_demands(config.tiers, declared or [None] * len(config.tiers)):
        if ("tiers", number, field) not in told:
            faults.append((("tiers", number, field), line))
    if not any(_is_written(tier) or _is_filled_elsewhere(tier) for tier in config.tiers):
        line = "no tier is ever written, so nothing can ever be found: set write: through in one of them"
        faults.append((("tiers",), line))
    return faults


def _tier_faults(tier: TierConfig, above: tuple[TierConfig, ...]) -> Iterator[tuple[str, str]]:
    said = tier.model_fields_set
    if tier.read_only and "write" in said and tier.write is not WritePolicy.NEVER:
        yield "write", f"{tier.write.value} contradicts read_only: true; leave one of them out"
    if tier.write is WritePolicy.BACK and not tier.read_only:
        if not above:
            yield "write", "back means when the tier above evicts, and there is no tier above the first"
        elif not _takes_blocks(above[-1]):
            yield (
                "write",
                f"back means when the tier above evicts, and tier {above[-1].name} is never written",
            )
    if "promote" in said and tier.promote != "never":
        if not above and tier.promote != "always":
            yield "promote", "there is no tier above the first to promote to"
        elif above and not any(_takes_blocks(other) for other in above):
            yield "promote", "no tier above this one can be written: set promote: never"


def _is_written(tier: TierConfig) -> bool:
    return not tier.read_only and tier.write in (WritePolicy.THROUGH, WritePolicy.BACK)


def _takes_blocks(tier: TierConfig) -> bool:
    return not tier.read_only and tier.write is not WritePolicy.NEVER


def _is_filled_elsewhere(tier: TierConfig) -> bool:
    return tier.read_only or tier.write is WritePolicy.NEVER


def chain_notices(
    config: ChainConfig, declared: Sequence[TierCapabilities | None] | None = None
) -> list[Fault]:
    """Settings that are taken and change nothing or little, each with its place and the reason.

    Args:
        config: The chain.
        declared: As for ``chain_faults``.
    """
    notices: list[Fault] = [
        (
            ("tiers", index),
            "is not the first tier, so the device does not use its memory directly: move it up",
        )
        for index, can in enumerate(declared or ())
        if index and can is not None and can.direct_slots
    ]
    for index, tier in enumerate(config.tiers):
        if "level" in tier.codec.model_fields_set and tier.codec.compress == "none":
            notices.append((("tiers", index, "codec", "level"), "has no effect without compress: zstd"))
        eviction, place = tier.eviction, ("tiers", index, "eviction")
        policy = eviction.policy
        if eviction.hit_reward_s and policy is not EvictionPolicy.LRU:
            notices.append(
                ((*place, "hit_reward_s"), f"has no effect with policy {policy.value}, only with lru")
            )
        is_said = "slru_protected_threshold" in eviction.model_fields_set
        if is_said and policy is not EvictionPolicy.SLRU:
            line = f"has no effect with policy {policy.value}, only with slru"
            notices.append(((*place, "slru_protected_threshold"), line))
        if tier.read_only and eviction.model_fields_set:
            notices.append((place, "has no effect in a tier that is read_only"))
    return notices


def duplicate_names(names: list[str]) -> list[str]:
    """Names that stand more than once, in order."""
    return sorted({name for name in names if names.count(name) > 1})
