"""Making room: which blocks go when a tier is full, and what becomes of them.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .drivers import Observers
from .executor import Completed, Returned
from .host import HostSlots
from .index import BlockIndex, Node
from .keys import BlockKey
from .links import Link
from .metrics import Metrics
from .policy import eviction_amount

WriteBack = Callable[[Node, int], bool]
"""Offered a block that leaves the first tier and its slot; True if it keeps the slot (one user)."""


class Capacity:
    """Room in every tier of a chain."""

    def __init__(self, index: BlockIndex, host: HostSlots, metrics: Metrics, observers: Observers) -> None:
        self._index = index
        self._host = host
        self._metrics = metrics
        self._observers = observers
        self.write_back: WriteBack = lambda _node, _slot: False

    def take_host_slots(self, link: Link | None, count: int) -> list[int]:
        """Up to ``count`` host slots, evicting from the direct tier ``link`` as its policy says.

        Fewer come back when the rest is pinned: the caller moves the longest prefix that fits.
        """
        if link is not None and link.capacity_blocks is not None:
            # Slots that are lent or kept back are no block's place, and taken all the same.
            self.make_room(link, count, used=self._host.pool.capacity - self._host.pool.num_free)
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
        )
        return self.evict(link, amount) if amount else []

    def evict(self, link: Link, amount: int, *, is_final: bool = False) -> list[BlockKey]:
        """Let up to ``amount`` blocks go, leaves first; for good (``is_final``), or into a tier below."""
        gone: list[BlockKey] = []
        if amount <= 0:
            return gone
        for node in self._index.victims(link.number):
            self._index.remove(link.number, node.key)
            if link.direct is not None and link.number == 0:
                self._free_slot(link, node, is_final=is_final)
            gone.append(node.key)
            if len(gone) >= amount:
                break
        if gone:
            self._metrics.count("evicted_blocks", len(gone), tier=link.name)
            self._observers.evicted(link.name, gone)
        return gone

    def drop_superseded(self, link: Link, keys: Sequence[BlockKey], now: float) -> None:
        """A longer block repeats what partly filled siblings hold: they only take room."""
        gone = list(
            dict.fromkeys(other for key in keys for other in self._index.superseded(link.number, key))
        )
        for key in gone:
            self._index.remove(link.number, key)
        if not gone:
            return
        if link.direct is not None and link.number == 0:
            link.direct.evict(gone)
        else:
            link.evict(gone, now)

    def retry_strays(self, link: Link, message: Completed | Returned, now: float) -> None:
        """Values that could not be removed are out of the index, and take room: tried again later.

        Args:
            link: The tier of the call.
            message: A call's end, or its worker's return.
            now: The chain's clock.
        """
        is_final = isinstance(message, Returned) or not message.is_adrift
        if is_final:
            link.strays.update(dict.fromkeys(message.call.left))
            if message.call.left:
                self._metrics.count("evict_failures", len(message.call.left), tier=link.name)
        is_answering = isinstance(message, Completed) and any(o.is_ok for o in message.outcomes)
        if link.strays and is_answering:
            keys = [key for key in link.strays if not self._index.has(link.number, key)]
            link.strays.clear()
            link.evict(keys, now)

    def _free_slot(self, link: Link, node: Node, *, is_final: bool) -> None:
        direct = link.direct
        slot = direct.withdraw([node.key])[0] if direct is not None else -1
        if slot < 0:
            return
        self._host.adopt(slot)
        if is_final or not self.write_back(node, slot):
            self._host.drop(slot)
