"""The cascade: blocks that lie whole in host slots go on into the tiers below.

It reads host slots, so a slow disk never holds device memory.  A block of the first tier is pinned there
while a call is under way; what a tier cannot take at once waits in the first tier unpinned.  A block is
visible in a tier only once it is whole there.

Threads: the chain's thread only; workers seal values and do the I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import envelope
from .executor import Call, Completed, Verb
from .index import Node
from .keys import BlockKey
from .links import Link
from .models import WritePolicy
from .parts import ChainParts
from .tier import Status

_BACKLOG_SHARE = 0.5
"""Share of the host slots that may wait for one lower tier; beyond it a tier is passed over."""
_MAYBE_STORED = frozenset({Status.TIMEOUT, Status.UNAVAILABLE, Status.INVALID})
"""Failures after which the value may be there all the same."""


@dataclass(frozen=True)
class Passing:
    """A block that lies whole in a host slot, on its way down.

    Attributes:
        key: The block's key.
        parent: Key that it hangs below.
        tokens: Encoded ids of its tokens.
        num_tokens: How many they are.
        slot: Where it lies.
        is_pinned: Whether it is a block of the first tier, so that a pin keeps it; otherwise its slot
            is lent, and has one more user.
    """

    key: BlockKey
    parent: bytes
    tokens: bytes
    num_tokens: int
    slot: int
    is_pinned: bool


@dataclass(eq=False)
class CascadeBatch:
    """What a store call's end is looked up by."""

    link: Link
    blocks: list[Passing]
    num_bytes: int
    is_second_try: bool = False


class Cascade:
    """Everything of a chain that is on its way down."""

    def __init__(self, parts: ChainParts) -> None:
        """Nothing on its way; blocks that leave the first tier are offered here from now on."""
        self._layout = parts.layout
        self._links = parts.links
        self._index = parts.index
        self._host = parts.host
        self._capacity = parts.capacity
        self._metrics = parts.metrics
        self._observers = parts.observers
        self._host_link = parts.host_link
        # At least one block, or what waits would wait for ever.
        self._backlog_limit = max(parts.layout.slot_bytes, int(parts.host.region.num_bytes * _BACKLOG_SHARE))
        self._now = 0.0
        parts.capacity.write_back = self._write_back

    @property
    def num_waiting(self) -> int:
        """Blocks that wait for a tier whose backlog is full."""
        return sum(len(link.waiting) for link in self._links)

    def tick(self, now: float) -> None:
        """Remember the time, by which answers of shared tiers age."""
        self._now = now

    def has(self, link: Link, key: BlockKey) -> bool:
        """Whether a tier has the block, or will: then it need not be stored there."""
        if link.is_indexed:
            self.renew(link, [key])
            return self._index.has(link.number, key)
        return key in link.storing or bool(link.known.get(key, self._now))

    def renew(self, link: Link, keys: Sequence[BlockKey]) -> None:
        """What is stored again is new again: the bytes under a key are always the same."""
        if link.config.ttl_s:
            self._index.renew(link.number, keys, self._now - link.config.ttl_s, self._now)

    def promoted(self, keys: Sequence[BlockKey], source: int) -> None:
        """Blocks came up from tier ``source`` into the first one: the tiers between get them too."""
        self.pass_down(self._passing_of(keys), self._now, last=source)

    def pass_down(self, passing: Sequence[Passing], now: float, last: int | None = None) -> None:
        """Put blocks on their way into every tier that takes them and lacks them; up to tier ``last``."""
        for link in self._links[:last]:
            takes = link.takes_stores if last is None else link.takes_promotions
            if link is self._host_link or not takes:
                continue
            wanted = [
                block
                for block in passing
                if not self.has(link, block.key)
                and (link.keeps_tails or block.num_tokens == self._layout.block_tokens)
            ]
            if wanted:
                self._store_into(link, wanted, now)

    # ---- calls begin ---------------------------------------------------------------------------

    def _store_into(
        self,
        link: Link,
        blocks: list[Passing],
        now: float,
        *,
        evicted: Sequence[BlockKey] = (),
        is_second_try: bool = False,
    ) -> None:
        """Put blocks on their way into a tier, as many as fit; ``evicted`` leave it before."""
        if link.capacity_blocks is not None and len(blocks) > link.capacity_blocks:
            lost = len(blocks) - link.capacity_blocks
            self._metrics.count("store_dropped_blocks", lost, cause="capacity", tier=link.name)
            blocks = blocks[: link.capacity_blocks]
        fits = self._fits(link)
        if len(blocks) > fits:
            self._put_off(link, blocks[fits:])
            blocks = blocks[:fits]
        evicted = [*evicted, *self._make_room(link, blocks)] if blocks else evicted
        if not blocks:
            link.evict(evicted, now)  # they are out of the index: nobody else would remove them
            return
        for block in blocks:
            self._hold(block)
            link.storing.add(block.key)
            if link.is_indexed:
                self._index.add(
                    link.number,
                    block.key,
                    block.parent,
                    block.tokens,
                    num_bytes=self._layout.value_bytes(block.num_tokens),
                    now=now,
                )
        batches = link.batches(len(blocks), link.workers.store_threads)
        for batch in batches:
            # Each batch makes its own room, so that they fit in whatever order they run.
            part = len(evicted) if batch is batches[-1] else len(batch)
            gone, evicted = evicted[:part], evicted[part:]
            self._submit(link, [blocks[i] for i in batch], gone, now, is_second_try=is_second_try)

    def _make_room(self, link: Link, blocks: list[Passing]) -> list[BlockKey]:
        """Let others go, but not the blocks that these follow; cut ``blocks`` to what fits then."""
        if link.capacity_blocks is None or not link.is_indexed:
            return []
        before = [block.parent for block in blocks if self._index.has(link.number, block.parent)]
        for key in before:
            self._index.pin(link.number, key)
        try:
            evicted = self._capacity.make_room(link, len(blocks))
        finally:
            for key in before:
                self._index.unpin(link.number, key)
        room = max(0, link.capacity_blocks - self._index.count(link.number))
        if len(blocks) > room:
            lost = len(blocks) - room
            self._metrics.count("store_dropped_blocks", lost, cause="no_room", tier=link.name)
            del blocks[room:]
        return evicted

    def _put_off(self, link: Link, blocks: Sequence[Passing]) -> None:
        """Too much is on its way into this tier: what the first tier holds can wait there, unpinned."""
        for block in blocks:
            if block.is_pinned:
                link.waiting[block.key] = None
            else:
                self._metrics.count("store_dropped_blocks", cause="backlog", tier=link.name)

    def _feed(self, link: Link, now: float) -> None:
        """The backlog has shrunk: store what waited, as far as the first tier still has it."""
        while link.waiting and self._fits(link):
            count = min(self._fits(link), len(link.waiting))
            keys = [link.waiting.popitem(last=False)[0] for _ in range(count)]
            ready = self._passing_of(keys) if link.takes_stores else []
            lost = len(keys) - len(ready)
            if lost:
                cause = "evicted_before_stored" if link.takes_stores else "tier_down"
                self._metrics.count("store_dropped_blocks", lost, cause=cause, tier=link.name)
            ready = [block for block in ready if not self.has(link, block.key)]
            if ready:
                self._store_into(link, ready, now)

    def _fits(self, link: Link) -> int:
        """Blocks that may still be put on their way into a tier."""
        return max(0, self._backlog_limit - link.backlog_bytes) // self._layout.slot_bytes

    def _passing_of(self, keys: Sequence[BlockKey]) -> list[Passing]:
        """Blocks that lie ready in the first tier."""
        host = self._host_link
        passing = []
        for key in keys:
            place = self._index.place(host.number, key) if host is not None else None
            node = self._index.node(key)
            if host is None or host.direct is None or place is None or node is None or not place.is_ready:
                continue
            slot = host.direct.borrow([key])[0]
            if slot >= 0:
                passing.append(Passing(key, node.parent, node.tokens, node.num_tokens, slot, is_pinned=True))
        return passing

    def _submit(
        self,
        link: Link,
        blocks: list[Passing],
        evicted: Sequence[BlockKey],
        now: float,
        *,
        is_second_try: bool,
    ) -> None:
        num_bytes = len(blocks) * self._layout.slot_bytes
        link.backlog_bytes += num_bytes
        layout = self._layout
        views = [self._host.pool.view(block.slot)[: layout.slot_bytes] for block in blocks]

        def seal() -> None:
            for block, view in zip(blocks, views, strict=True):
                envelope.seal_as(view, layout, block.key, block.parent, block.tokens)

        link.workers.submit(
            Call(
                Verb.STORE,
                [block.key for block in blocks],
                views,
                evict_first=evicted,
                before=seal,
                deadline=now + link.config.store_deadline_s,
                owner=CascadeBatch(link, blocks, num_bytes, is_second_try),
            )
        )

    # ---- calls end -----------------------------------------------------------------------------

    def stored(self, end: Completed, batch: CascadeBatch, now: float) -> None:
        """A store call has ended."""
        link = batch.link
        link.backlog_bytes -= batch.num_bytes
        link.storing.difference_update(block.key for block in batch.blocks)
        if end.is_late:
            link.note_late(end)
        good: list[BlockKey] = []
        again: list[Passing] = []
        for block, outcome in zip(batch.blocks, end.outcomes, strict=True):
            if outcome.is_ok:
                good.append(block.key)
                if link.is_indexed:
                    self._index.publish(link.number, [block.key])
                else:
                    link.known.note(block.key, now, is_there=True)
                self._release(block)
                continue
            if link.is_indexed:
                self._index.remove(link.number, block.key)
            if outcome.status is Status.NO_SPACE and not batch.is_second_try:
                again.append(block)
                continue
            if link.is_indexed and outcome.status in _MAYBE_STORED:
                link.strays[block.key] = None
            self._metrics.count("store_failures", tier=link.name, cause=outcome.status.value)
            if not end.is_adrift:
                self._release(block)
        if good and link.is_indexed:
            self._capacity.drop_superseded(link, good, now)
        if good:
            self._observers.stored(link.name, good, len(good) * self._layout.slot_bytes)
        if again:
            self._second_try(link, again, now)
        self._feed(link, now)

    def _second_try(self, link: Link, blocks: list[Passing], now: float) -> None:
        """The tier had less room than it said: make some, and try once more."""
        gone = self._capacity.evict(link, 2 * len(blocks)) if link.is_indexed else []
        if gone:
            self._store_into(link, list(blocks), now, evicted=gone, is_second_try=True)
        else:
            self._metrics.count("store_failures", len(blocks), tier=link.name, cause=Status.NO_SPACE.value)
        for block in blocks:
            self._release(block)

    def returned(self, batch: CascadeBatch, now: float) -> None:
        """The worker of a store call that was given up has come back: its slots are free."""
        link = batch.link
        for block in batch.blocks:
            self._release(block)
        # Whether the values appeared there in the end is not known: what the index does not know of
        # must not take room.
        if link.is_indexed:
            link.evict([b.key for b in batch.blocks if not self._index.has(link.number, b.key)], now)

    # ---- what holds a block --------------------------------------------------------------------

    def _hold(self, block: Passing) -> None:
        if block.is_pinned and self._host_link is not None:
            self._index.pin(self._host_link.number, block.key)
        else:
            self._host.use(block.slot)

    def _release(self, block: Passing) -> None:
        if block.is_pinned and self._host_link is not None:
            self._index.unpin(self._host_link.number, block.key)
        else:
            self._host.drop(block.slot)

    def _write_back(self, node: Node, slot: int) -> bool:
        """A block leaves the first tier: tiers with ``write: back`` get it now."""
        block = Passing(node.key, node.parent, node.tokens, node.num_tokens, slot, is_pinned=False)
        taken = False
        for link in self._links:
            if (
                link.config.write is WritePolicy.BACK
                and link.is_up
                and link.workers.can_store
                and not self.has(link, node.key)
                and (link.keeps_tails or node.num_tokens == self._layout.block_tokens)
            ):
                self._store_into(link, [block], self._now)
                taken = True
        if taken:
            self._host.drop(slot)
        return taken
