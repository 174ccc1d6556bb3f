"""Eviction orders, one small class each: which block of a full tier leaves first.

Pure: they look at a place's numbers and at nothing else.  The smallest rank leaves first; among
equal ranks the one that came first.  Only leaves that nobody pins are asked about.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from ..models import EvictionConfig, EvictionPolicy

Rank = tuple[float, float]


class Used(Protocol):
    """What an order may look at: times in seconds of the chain's clock."""

    created: float
    last_used: float
    hits: int


class EvictionOrder(ABC):
    """One way to rank blocks.

    Attributes:
        ages_backwards: Whether using a block makes it leave earlier, not later.
    """

    ages_backwards = False

    @abstractmethod
    def rank(self, place: Used) -> Rank:
        """The place's rank now; smallest leaves first."""


class Lru(EvictionOrder):
    """Least recently used; each hit may make a block younger by a reward."""

    def __init__(self, hit_reward_s: float = 0.0) -> None:
        self._reward = hit_reward_s

    def rank(self, place: Used) -> Rank:
        return place.last_used + place.hits * self._reward, 0.0


class Lfu(EvictionOrder):
    """Least often used, then least recently."""

    def rank(self, place: Used) -> Rank:
        return float(place.hits), place.last_used


class Slru(EvictionOrder):
    """Blocks on probation leave before protected ones; least recently used within both."""

    def __init__(self, protected_threshold: int = 2) -> None:
        self._threshold = protected_threshold

    def rank(self, place: Used) -> Rank:
        return float(place.hits >= self._threshold), place.last_used


class Fifo(EvictionOrder):
    """First in, first out."""

    def rank(self, place: Used) -> Rank:
        return place.created, 0.0


class Mru(EvictionOrder):
    """Most recently used first."""

    ages_backwards = True

    def rank(self, place: Used) -> Rank:
        return -place.last_used, 0.0


class Filo(EvictionOrder):
    """First in, last out."""

    def rank(self, place: Used) -> Rank:
        return -place.created, 0.0


def eviction_order(config: EvictionConfig) -> EvictionOrder:
    """The order that a tier's configuration names."""
    if config.policy is EvictionPolicy.LRU:
        return Lru(config.hit_reward_s)
    if config.policy is EvictionPolicy.SLRU:
        return Slru(config.slru_protected_threshold)
    return _PLAIN[config.policy]()


_PLAIN: dict[EvictionPolicy, Callable[[], EvictionOrder]] = {
    EvictionPolicy.LFU: Lfu,
    EvictionPolicy.FIFO: Fifo,
    EvictionPolicy.MRU: Mru,
    EvictionPolicy.FILO: Filo,
}


def eviction_amount(
    config: EvictionConfig, *, used: int, capacity: int, needed: int, threshold: float = 1.0
) -> int:
    """How many blocks to let go so that ``needed`` more fit.

    Args:
        config: The tier's eviction settings.
        used: Blocks in the tier.
        capacity: Blocks that fit into it.
        needed: Blocks that want to come in.
        threshold: The start threshold where ``config`` has none.

    Returns:
        The largest of: what is short; what brings utilisation under the start threshold; the
        configured share of the capacity, once anything must go at all.  At most ``used``.
    """
    after = used + needed
    limit = int((config.start_threshold or threshold) * capacity)
    short = after - limit
    if short <= 0:
        return 0
    return min(used, max(short, int(config.ratio * capacity)))
