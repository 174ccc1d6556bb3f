"""Which blocks of a tier leave next: a queue over its places, in the order of the tier's policy.

Entries are not moved when a block is used: an entry that comes up too early is put back under its rank
of now.  A place that nothing lets go of its last block has no entry that counts; it gets one when that
ends.

Threads: the index's owner.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field, replace

from .policy import EvictionOrder, Rank
from .stretch import Stretch

_SLACK = 1024
"""Entries beyond twice the blocks before the queue is cleared of dead ones."""


@dataclass(slots=True, eq=False)
class Place(Stretch):
    """A stretch of blocks in one tier, with what is true of all of them.

    Attributes:
        num_bytes: Length of each block's value there.
        created: When they were added, on the chain's clock.
        last_used: When they were last loaded or stored again.
        is_ready: Whether their bytes may be read.
        hits: How often they were loaded.
        pins: How many jobs rely on a block, by its position; it and those before it stay.
        is_queued: Whether the eviction queue knows the place.
    """

    num_bytes: int
    created: float
    last_used: float
    is_ready: bool
    hits: int = 0
    pins: dict[int, int] = field(default_factory=dict)
    is_queued: bool = False

    @classmethod
    def of(cls, blocks: Stretch, num_bytes: int, now: float, *, is_ready: bool) -> Place:
        """A place for blocks that came ``now``."""
        return cls(
            blocks.keys,
            blocks.parent,
            blocks.ids,
            blocks.at,
            blocks.num_tokens,
            blocks.block_tokens,
            num_bytes,
            now,
            now,
            is_ready,
        )

    def split(self, at: int) -> Place:
        """Leave only the blocks from position ``at`` on; those before it are returned."""
        head = replace(self, keys=self.keys[:at], num_tokens=at * self.tokens_each, is_queued=False)
        head.pins = {i: count for i, count in self.pins.items() if i < at}
        end = self.part(at, len(self.keys))
        self.keys, self.parent, self.at, self.num_tokens = end.keys, end.parent, end.at, end.num_tokens
        self.pins = {i - at: count for i, count in self.pins.items() if i >= at}
        return head

    def cut_off(self, at: int) -> Stretch:
        """Leave only the blocks before position ``at``; the others are returned."""
        end = self.part(at, len(self.keys))
        del self.keys[at:]
        self.num_tokens -= end.num_tokens
        self.own_ids(4)
        return end

    @property
    def num_unpinned(self) -> int:
        """Blocks at the end that no pin protects."""
        return len(self.keys) - 1 - max(self.pins, default=-1)


class EvictionQueue:
    """One tier's places whose last blocks may leave.

    Attributes:
        order: How they are ranked.
    """

    def __init__(self, order: EvictionOrder, blocks: Sized, may_leave: Callable[[Place], bool]) -> None:
        """An empty queue over a tier of ``blocks``; ``may_leave`` says whether a place's last one may."""
        self.order = order
        self._blocks = blocks
        self._may_leave = may_leave
        self._entries: list[tuple[Rank, int, Place]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, place: Place) -> None:
        """The place's last block may leave now, if nothing keeps it and it is not queued yet."""
        if not place.is_queued and self._may_leave(place):
            place.is_queued = True
            heapq.heappush(self._entries, (self.order.rank(place), next(self._numbers), place))
            if len(self._entries) > 2 * len(self._blocks) + _SLACK:
                self._compact()

    def push_again(self, place: Place) -> None:
        """The place's rank may be an earlier one now: a second entry makes the first one good."""
        if place.is_queued:
            place.is_queued = False
            self.push(place)

    def leaving(self) -> Iterator[Place]:
        """Places whose last blocks may leave, in order; what stays of one must be pushed again."""
        entries = self._entries
        while entries:
            rank, number, place = heapq.heappop(entries)
            if not place.is_queued:
                continue
            now_rank = self.order.rank(place)
            if now_rank > rank:
                heapq.heappush(entries, (now_rank, number, place))
                continue
            place.is_queued = False
            if self._may_leave(place):
                yield place

    def _compact(self) -> None:
        """Drop entries of places that are gone, or that have a better one: the first is the best."""
        best: dict[int, tuple[Rank, int, Place]] = {}
        for entry in sorted(self._entries, key=lambda entry: entry[:2]):
            if entry[2].is_queued:
                best.setdefault(id(entry[2]), entry)
        self._entries[:] = best.values()  # in order, so a heap; in place, since leaving() reads it
