"""Load or recompute: is a prefix sooner here from its tiers, or from the engine?  Pure.

A prefix can only be cut at its end: what stands behind the cut is computed, wherever it lies.  Of all
cuts the one is taken after which everything is in place soonest.  Tiers are read at the same time; the
engine computes what is left behind that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """What was weighed, and what came out.

    Attributes:
        action: ``load`` all, ``part`` of it, ``recompute`` all, or ``try`` a little, to find out.
        tier: The tier that it turns on.
        num_tokens: Tokens that were weighed: from the first one of a tier with ``auto`` on.
        num_loaded: Of these, tokens that are loaded.
        load_s: Expected time to load all of them; infinity where nothing is known of a tier.
        recompute_s: Expected time to compute all of them; 0 where the engine's speed is not known.
        why: ``sooner``, ``slower``, ``no_estimate``, ``probe``, ``deadline`` or ``no_prefill_rate``.
    """

    action: str
    tier: str
    num_tokens: int
    num_loaded: int
    load_s: float
    recompute_s: float
    why: str

    def __str__(self) -> str:
        """In one word without spaces, as receipts have it."""
        return (
            f"{self.action}:{self.tier}(tokens={self.num_tokens},loaded={self.num_loaded},"
            f"load={_ms(self.load_s)},recompute={_ms(self.recompute_s)},why={self.why})"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}ms" if 0 < seconds < float("inf") else "unknown"


@dataclass(frozen=True, slots=True)
class Offer:
    """Consecutive blocks of a prefix that one tier has.

    Attributes:
        tier: Its number in the chain.
        num_blocks: Blocks.
        num_tokens: Tokens that they bring.
        is_free: They are in host slots, or on their way there: nothing is to be weighed.
        is_forced: The tier's configuration says ``load``.
    """

    tier: int
    num_blocks: int
    num_tokens: int
    is_free: bool = False
    is_forced: bool = False

    @property
    def is_weighed(self) -> bool:
        """Whether the choice is about it."""
        return not (self.is_free or self.is_forced)


@dataclass(frozen=True, slots=True)
class Speed:
    """What is known of one tier now.

    Attributes:
        fixed_s: Time of the first round of calls, whatever they bring, and of what is queued before.
        block_s: Time of each block, where as many are read at once as may be.
        num_at_once: Blocks that are read at once; fewer take no less time.
        is_known: Whether anything was measured.
        may_try: Whether a few blocks may be loaded to measure it (again).
        most_s: A load that takes longer is given up.
    """

    fixed_s: float
    block_s: float
    num_at_once: int
    is_known: bool
    may_try: bool
    most_s: float

    def seconds(self, num_blocks: int) -> float:
        """Expected time to load so many blocks; infinity while nothing is known."""
        if not self.is_known:
            return float("inf")
        return self.fixed_s + max(num_blocks, self.num_at_once) * self.block_s


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a prefix ends: so many whole offers, and so many blocks of the next one."""

    num_offers: int
    num_blocks: int = 0


def choose(
    offers: Sequence[Offer],
    speeds: Sequence[Speed],
    names: Sequence[str],
    prefill_tokens_per_s: float,
    *,
    try_blocks: int,
) -> tuple[Cut, Choice | None]:
    """Decide how much of a prefix is loaded.

    Args:
        offers: What the prefix consists of, in order.
        speeds: Per tier of the chain what is known of it.
        names: Per tier its name.
        prefill_tokens_per_s: The engine's speed; 0 where it is not known, and then all is loaded.
        try_blocks: Most blocks of a load that only measures.

    Returns:
        Where to cut, and what was weighed; None where there was nothing to weigh.
    """
    first = next((i for i, offer in enumerate(offers) if offer.is_weighed), None)
    if first is None:
        return Cut(len(offers)), None
    weighed = sum(offer.num_tokens for offer in offers[first:])
    if prefill_tokens_per_s <= 0:
        load_s = _load_seconds(offers, speeds)
        name = names[offers[first].tier]
        return Cut(len(offers)), Choice("load", name, weighed, weighed, load_s, 0.0, "no_prefill_rate")
    number = _best(offers, speeds, prefill_tokens_per_s)
    cut, action = Cut(number), _action(number, first, len(offers))
    deciding = offers[min(number, len(offers) - 1)]
    if number == len(offers):
        deciding = next(offer for offer in reversed(offers) if offer.is_weighed)
    speed, loaded = speeds[deciding.tier], sum(offer.num_tokens for offer in offers[first:number])
    why = "sooner"
    if number < len(offers):
        why = _why_not(deciding, speed)
        if deciding.is_weighed and speed.may_try:
            num_blocks = min(try_blocks, deciding.num_blocks)
            cut, action = Cut(number, num_blocks), "try"
            loaded += deciding.num_tokens * num_blocks // deciding.num_blocks
            why = "probe" if speed.is_known else "no_estimate"
    return cut, Choice(
        action,
        names[deciding.tier],
        weighed,
        loaded,
        _load_seconds(offers, speeds),
        weighed / prefill_tokens_per_s,
        why,
    )


def _action(number: int, first: int, count: int) -> str:
    if number == count:
        return "load"
    return "part" if number > first else "recompute"


def _why_not(offer: Offer, speed: Speed) -> str:
    if not speed.is_known:
        return "no_estimate"
    return "deadline" if speed.seconds(offer.num_blocks) > speed.most_s else "slower"


def _best(offers: Sequence[Offer], speeds: Sequence[Speed], tokens_per_s: float) -> int:
    """How many offers to take whole: all up to the last forced one, and then as many as pay."""
    rest = sum(offer.num_tokens for offer in offers)
    least = max((i + 1 for i, offer in enumerate(offers) if offer.is_forced), default=0)
    best, best_s = 0, float("inf")
    blocks: dict[int, int] = {}
    load_s = 0.0
    for number in range(len(offers) + 1):
        if number:
            offer = offers[number - 1]
            rest -= offer.num_tokens
            if number > least and not offer.is_free:
                blocks[offer.tier] = blocks.get(offer.tier, 0) + offer.num_blocks
                seconds = speeds[offer.tier].seconds(blocks[offer.tier])
                load_s = max(load_s, seconds if seconds <= speeds[offer.tier].most_s else float("inf"))
        total_s = load_s + rest / tokens_per_s
        if number >= least and (total_s <= best_s or number == least):
            best, best_s = number, total_s
    return best


def _load_seconds(offers: Sequence[Offer], speeds: Sequence[Speed]) -> float:
    blocks: dict[int, int] = {}
    for offer in offers:
        if not offer.is_free:
            blocks[offer.tier] = blocks.get(offer.tier, 0) + offer.num_blocks
    return max((speeds[tier].seconds(count) for tier, count in blocks.items()), default=0.0)
