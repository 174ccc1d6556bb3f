"""Which block of a tier leaves next: a queue over its places, in the order of the tier's policy.

Entries are not moved when a block is used: an entry that comes up too early is put back under its rank
of now.  A block that is pinned, unready or has children in the tier has no entry that counts; it gets
one when that ends.

Threads: the index's owner.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .keys import BlockKey
from .policy import EvictionOrder, Rank

_SLACK = 1024
"""Entries beyond twice the places before the queue is cleared of dead ones."""


@dataclass(slots=True)
class Place:
    """One block in one tier.

    Attributes:
        num_bytes: Length of the value there.
        created: When it was added, on the chain's clock.
        last_used: When it was last loaded or stored again.
        hits: How often it was loaded.
        is_ready: Whether its bytes may be read.
        pins: How many jobs rely on it.
        num_children: Children of the block that are in this tier too.
        is_queued: Whether the eviction queue knows it.
    """

    num_bytes: int
    created: float
    last_used: float
    is_ready: bool
    hits: int = 0
    pins: int = 0
    num_children: int = 0
    is_queued: bool = False

    @property
    def may_leave(self) -> bool:
        """Whether nothing keeps it in its tier."""
        return self.is_ready and not self.pins and not self.num_children


class EvictionQueue:
    """One tier's blocks that may leave.

    Attributes:
        order: How they are ranked.
    """

    def __init__(self, order: EvictionOrder, places: Mapping[BlockKey, Place]) -> None:
        """An empty queue over ``places``, which the index keeps."""
        self.order = order
        self._places = places
        self._entries: list[tuple[Rank, int, BlockKey]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, key: BlockKey, place: Place) -> None:
        """The block may leave now, if nothing keeps it and it is not queued yet."""
        if not place.num_children and place.is_ready and not place.pins and not place.is_queued:
            place.is_queued = True
            heapq.heappush(self._entries, (self.order.rank(place), next(self._numbers), key))
            if len(self._entries) > 2 * len(self._places) + _SLACK:
                self._compact()

    def push_again(self, key: BlockKey, place: Place) -> None:
        """The block's rank may be an earlier one now: a second entry makes the first one good."""
        if place.is_queued:
            place.is_queued = False
            self.push(key, place)

    def leaving(self) -> Iterator[BlockKey]:
        """Blocks that may leave, in order; each must have left before the next is taken."""
        entries = self._entries
        while entries:
            rank, number, key = heapq.heappop(entries)
            place = self._places.get(key)
            if place is None or not place.is_queued:
                continue
            now_rank = self.order.rank(place)
            if now_rank > rank:
                heapq.heappush(entries, (now_rank, number, key))
                continue
            place.is_queued = False
            if place.may_leave:
                yield key

    def _compact(self) -> None:
        """Drop entries of blocks that are gone, or that have a better one: the first is the best."""
        best: dict[BlockKey, tuple[Rank, int, BlockKey]] = {}
        for entry in sorted(self._entries):
            place = self._places.get(entry[2])
            if place is not None and place.is_queued:
                best.setdefault(entry[2], entry)
        self._entries[:] = best.values()  # in order, so a heap; in place, since leaving() reads it
