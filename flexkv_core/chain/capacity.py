"""Making room: which blocks go when a tier is full, and what becomes of them.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..drivers import Observers
from ..index import BlockIndex
from ..index.policy import eviction_amount
from ..index.stretch import Stretch, in_a_row
from ..keys import BlockKey
from ..metrics import Metrics
from ..tier import DirectTier
from .calls import Completed, Returned, Verb
from .host import HostSlots
from .links import Link

_AHEAD = 0.75
"""Share of the first tier that fills, where what leaves it is written to another tier first."""

WriteBack = Callable[[Stretch, list[int]], None]
"""Offered blocks that leave the first tier and their slots; one that it keeps gets a user more."""


class Capacity:
    """Room in every tier of a chain."""

    def __init__(self, index: BlockIndex, host: HostSlots, metrics: Metrics, observers: Observers) -> None:
        self._index = index
        self._host = host
        self._metrics = metrics
        self._observers = observers
        self.write_back: WriteBack = lambda _blocks, _slots: None
        self.on_host_evicted: Callable[[Sequence[BlockKey]], None] = lambda _keys: None
        """Blocks have left the first tier."""
        self.evicts_ahead = False
        """Whether slots of the first tier may come free only a while after their blocks have left."""
        self.num_leaving = 0
        """Slots whose blocks are being written elsewhere, by calls that have not ended."""
        self.are_written_back: Callable[[], bool] = lambda: False
        """Whether blocks that leave now are: then a slot comes free no sooner if one more block leaves."""

    def take_host_slots(self, link: Link | None, count: int) -> list[int]:
        """Up to ``count`` host slots, evicting from the direct tier ``link`` as its policy says.

        Fewer come back when the rest is pinned: the caller moves the longest prefix that fits.
        """
        if link is not None and link.capacity_blocks is not None:
            # Slots that are lent or kept back are no block's place, and taken all the same.
            pool = self._host.pool
            coming = self.num_leaving if self.num_leaving and self.are_written_back() else 0
            self.make_room(link, count, used=pool.capacity - pool.num_free - coming)
        return self._host.take(count)

    def make_room(self, link: Link, needed: int, *, used: int | None = None) -> list[BlockKey]:
        """Let blocks go so that ``needed`` more fit into ``link``, of which ``used`` blocks are taken.

        Returns:
            Keys that are out of the index already; for a tier that is not direct the caller has them
            removed by the worker that stores (``Call.evict_first``).
        """
        if link.capacity_blocks is None or not link.is_indexed:
            return []
        amount = eviction_amount(
            link.config.eviction,
            used=self._index.count(link.number) if used is None else used,
            capacity=link.capacity_blocks,
            needed=needed,
            threshold=_AHEAD if self.evicts_ahead and link.direct is not None else 1.0,
        )
        return self.evict(link, amount) if amount else []

    def evict(self, link: Link, amount: int, *, is_final: bool = False) -> list[BlockKey]:
        """Let up to ``amount`` blocks go, leaves first; for good (``is_final``), or into a tier below."""
        gone: list[BlockKey] = []
        for blocks in self._index.evict(link.number, amount):
            if link.direct is not None and link.number == 0:
                self._free_slots(link.direct, blocks, is_final=is_final)
            gone += blocks.keys
        if gone:
            if link.number == 0:
                self.on_host_evicted(gone)
            self._metrics.count("evicted_blocks", len(gone), tier=link.name)
            self._observers.evicted(link.name, gone)
        return gone

    def drop_superseded(self, link: Link, keys: Sequence[BlockKey], now: float) -> None:
        """A longer block repeats what partly filled siblings hold: they only take room."""
        gone = self._index.superseded(link.number, keys)
        if not gone:
            return
        self._index.remove(link.number, gone)
        if link.direct is not None and link.number == 0:
            link.direct.evict(gone)
        else:
            link.evict(gone, now)
        self._observers.evicted(link.name, gone)

    def retry_strays(self, link: Link, message: Completed | Returned, now: float) -> None:
        """Values that could not be removed are out of the index, and take room: tried again later.

        So are those whose turn to be removed has not come; the next call for them begins here.

        Args:
            link: The tier of the call.
            message: A call's end, or its worker's return.
            now: The chain's clock.
        """
        is_final = isinstance(message, Returned) or not message.is_adrift
        if is_final:
            link.removal_ended(message.call)
            link.strays.add(message.call.left)
            if message.call.left:
                self._metrics.count("evict_failures", len(message.call.left), tier=link.name)
        has_answered = is_final and len(message.call.left) < len(message.call.removes)
        if isinstance(message, Completed):
            link.num_removing -= message.call.verb is Verb.EVICT
            has_answered = has_answered or len(message.bad) < len(message.outcomes)
        if not has_answered:
            return
        if link.strays:
            keys = [key for key in link.strays if not self._index.has(link.number, key)]
            # What is being stored again is known only once it is: if it fails, the old value is still there.
            kept = self.being_stored(link, list(link.strays))
            link.strays.clear()
            link.strays.add(kept)
            link.evict(keys, now)
        if link.doomed and not link.num_removing:
            link.evict(self.take_doomed(link, max(1, link.capabilities.max_batch)), now)

    def take_doomed(self, link: Link, count: int) -> list[BlockKey]:
        """Up to ``count`` values that are still to be removed: what has been stored again since is not."""
        found: list[BlockKey] = []
        while link.doomed and len(found) < count:
            key, _ = link.doomed.popitem(last=False)
            place = self._index.place(link.number, key)
            if place is None:
                found.append(key)
            elif not place.is_ready:  # if its store fails, the old value is still there
                link.strays.add([key])
        return found

    def being_stored(self, link: Link, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of the keys that have a place in a tier, and cannot be read there yet."""
        places = [self._index.place(link.number, key) for key in keys]
        return [key for key, at in zip(keys, places, strict=True) if at is not None and not at.is_ready]

    def _free_slots(self, direct: DirectTier, blocks: Stretch, *, is_final: bool) -> None:
        slots = direct.withdraw(blocks.keys)
        there: Sequence[int] = range(len(slots))
        if min(slots) < 0:
            there = [i for i, slot in enumerate(slots) if slot >= 0]
        for first, last in in_a_row(there):
            part = slots[first:last]
            self._host.adopt(part)
            if not is_final:
                self.write_back(blocks.part(first, last), part)
            self._host.drop(part)
