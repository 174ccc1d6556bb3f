"""The cascade: blocks that lie whole in host slots go on into the tiers below.

It reads host slots, so a slow disk never holds device memory.  A block of the first tier is pinned there
while a call is under way; what a tier cannot take at once waits in the first tier unpinned.  A block is
visible in a tier only once it is whole there.

Threads: the chain's thread only; workers seal values and do the I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..index.stretch import Stretch, in_a_row
from ..keys import BlockKey
from ..tier import BufferState, Status
from ..wrappers.breaker import IS_DOWN
from .calls import Call, Completed, Verb
from .links import Arrival, Link
from .parts import ChainParts
from .passing import Passing, all_keys, cut_into, num_blocks, split_at

_BACKLOG_SHARE = 0.5
"""Share of the host slots that may wait for one lower tier; beyond it a tier is passed over."""
_MAYBE_STORED = frozenset({Status.TIMEOUT, Status.UNAVAILABLE, Status.INVALID})
"""Failures after which the value may be there all the same."""


def _may_be_there(end: Completed, number: int) -> bool:
    """Whether a value may have been stored although its store has failed."""
    outcome = end.outcomes[number]
    was_begun = number < end.call.begun and not outcome.reason.startswith(IS_DOWN)
    return was_begun and outcome.status in _MAYBE_STORED


@dataclass(slots=True, eq=False)
class Pins:
    """Pins in the first tier that several calls share: one on the last block of a run protects them all.

    Attributes:
        keys: The pinned blocks.
        num_calls: Calls that are not over.
    """

    keys: list[BlockKey]
    num_calls: int


@dataclass(slots=True, eq=False)
class CascadeBatch:
    """What a store call's end is looked up by.

    Attributes:
        link: Where the blocks go.
        parts: The blocks.
        keys: All of them, in order.
        num_bytes: What they add to the tier's backlog.
        pins: What keeps those of the first tier there.
        is_second_try: Whether the tier has refused them once, for want of room.
    """

    link: Link
    parts: list[Passing]
    keys: list[BlockKey]
    num_bytes: int
    pins: Pins
    is_second_try: bool


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
        parts.capacity.are_written_back = self._are_written_back
        parts.capacity.evicts_ahead = any(link.keeps(Arrival.LEAVING) for link in parts.links)

    @property
    def num_waiting(self) -> int:
        """Blocks that wait for a tier whose backlog is full."""
        return sum(len(link.waiting) for link in self._links)

    def tick(self, now: float) -> None:
        """Remember the time, by which answers of shared tiers age."""
        self._now = now

    def has(self, link: Link, key: BlockKey) -> bool:
        """Whether a tier has the block, or will: then it need not be stored there."""
        return not self.missing(link, [key])

    def missing(self, link: Link, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Positions of the keys that a tier neither has nor will have."""
        if link.is_indexed:
            self.renew(link, keys)
            return self._index.missing(link.number, keys)
        storing, known, now = link.storing, link.known, self._now
        return [i for i, key in enumerate(keys) if key not in storing and not known.get(key, now)]

    def renew(self, link: Link, keys: Sequence[BlockKey]) -> None:
        """What is stored again is new again: the bytes under a key are always the same."""
        if link.config.ttl_s:
            self._index.renew(link.number, keys, self._now - link.config.ttl_s, self._now)

    def promoted(self, keys: Sequence[BlockKey], source: int) -> None:
        """Blocks came up from tier ``source`` into the first one: the tiers between get them too."""
        if any(link is not self._host_link and link.keeps(Arrival.PROMOTED) for link in self._links[:source]):
            self.pass_down(self._passing_of(keys), self._now, last=source)

    def pass_down(self, parts: Sequence[Passing], now: float, last: int | None = None) -> None:
        """Put blocks on their way into every tier that takes them and lacks them; up to tier ``last``."""
        arrival = Arrival.STORED if last is None else Arrival.PROMOTED
        for link in self._links[:last]:
            if link is not self._host_link and link.keeps(arrival):
                self._offer(link, parts, now)

    def pass_over(self, keys: Sequence[BlockKey]) -> None:
        """A sequence is not stored, since no tier can be reached that would keep it: count its blocks."""
        for link in self._links:
            if link.keeps(Arrival.STORED) and not link.is_reachable:
                self._lose(link, [keys[i] for i in self.missing(link, keys)], "tier_down")

    def mend(self, keys: Sequence[BlockKey], now: float) -> None:
        """A sequence is stored again: offer its blocks to tiers that should have had them before."""
        for link in self._links:
            if link.owed and link is not self._host_link and link.takes(Arrival.STORED):
                self._offer(link, self._passing_of(link.owed.take(keys)), now)

    def _offer(self, link: Link, parts: Sequence[Passing], now: float) -> None:
        lacking = self._lacking(link, parts)
        if link.is_reachable:
            self._store_into(link, lacking, now)
        else:
            self._lose(link, all_keys(lacking), "tier_down")

    def _lacking(self, link: Link, parts: Sequence[Passing]) -> list[Passing]:
        """Those of the blocks that a tier keeps, and neither has nor will have."""
        return [
            part.part(first, last)
            for part in parts
            if link.keeps_tails or not part.blocks.is_tail
            for first, last in in_a_row(self._storable(link, part.blocks.keys))
        ]

    def _storable(self, link: Link, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Positions of the keys that a tier lacks, but for those that are just being removed there."""
        lacking = self.missing(link, keys)
        if not link.leaving:
            return lacking
        self._lose(link, [keys[i] for i in lacking if keys[i] in link.leaving], "being_removed")
        return [i for i in lacking if keys[i] not in link.leaving]

    # ---- calls begin ---------------------------------------------------------------------------

    def _store_into(
        self,
        link: Link,
        parts: Sequence[Passing],
        now: float,
        *,
        evicted: Sequence[BlockKey] = (),
        is_second_try: bool = False,
    ) -> None:
        """Put blocks on their way into a tier, as many as fit; ``evicted`` leave it before."""
        if link.capacity_blocks is not None:
            parts, lost = split_at(parts, link.capacity_blocks)
            self._lose(link, all_keys(lost), "capacity", is_owed=False)
        parts, later = split_at(parts, self._fits(link))
        if parts:
            gone, parts = self._make_room(link, parts)
            evicted = [*evicted, *gone]
        if parts or link.backlog_bytes:
            self._put_off(link, later)
        else:  # nothing is under way whose end would call for them
            self._lose(link, all_keys(later), "no_room")
        if not parts:
            link.evict(evicted, now)  # they are out of the index: nobody else would remove them
            return
        piece, calls = link.cut(num_blocks(parts), link.workers.store_threads)
        if link.is_indexed:
            self._add(link, parts, calls, now)
            if link.doomed:  # they take the room of these blocks, which have their places by now
                evicted = [*evicted, *self._capacity.take_doomed(link, num_blocks(parts))]
        pins = self._pin(parts, len(calls))
        for call, mine in zip(calls, cut_into(parts, calls), strict=True):
            # Each call makes its own room, so that they fit in whatever order they run.
            room = len(evicted) if call is calls[-1] else len(call)
            gone, evicted = list(evicted[:room]), evicted[room:]
            self._submit(link, mine, pins, piece, gone, now, is_second_try=is_second_try)

    def _add(self, link: Link, parts: Sequence[Passing], calls: Sequence[range], now: float) -> None:
        """Give blocks places, one for each call: what comes together need not be split when it has come."""
        first = 0
        for part in parts:
            ends = [call.stop - first for call in calls if first < call.stop < first + len(part)]
            size = self._layout.value_bytes(part.blocks.tokens_each)
            self._index.add(link.number, part.blocks, num_bytes=size, now=now, ends=ends)
            first += len(part)

    def _lose(self, link: Link, keys: Sequence[BlockKey], cause: str, *, is_owed: bool = True) -> None:
        if not keys:
            return
        self._metrics.count("store_dropped_blocks", len(keys), cause=cause, tier=link.name)
        if is_owed and link.keeps(Arrival.STORED):
            link.owed.add(keys)

    def _make_room(self, link: Link, parts: list[Passing]) -> tuple[list[BlockKey], list[Passing]]:
        """Let others go, but not what these blocks follow; returns those gone, and what fits then."""
        if link.capacity_blocks is None or not link.is_indexed:
            return [], parts
        before = [part.blocks.parent for part in parts if self._index.has(link.number, part.blocks.parent)]
        for key in before:
            self._index.pin(link.number, key)
        try:
            gone = self._capacity.make_room(link, num_blocks(parts))
        finally:
            for key in before:
                self._index.unpin(link.number, key)
        parts, lost = split_at(parts, max(0, link.capacity_blocks - self._index.count(link.number)))
        self._lose(link, all_keys(lost), "no_room")
        return gone, parts

    def _put_off(self, link: Link, parts: Sequence[Passing]) -> None:
        """Too much is on its way into this tier: what the first tier holds can wait there, unpinned."""
        for part in parts:
            if part.is_pinned:
                link.waiting.update(dict.fromkeys(part.blocks.keys))
            else:
                self._lose(link, part.blocks.keys, "backlog")

    def _feed(self, link: Link, now: float) -> None:
        """The backlog has shrunk: store what waited, as far as the first tier still has it."""
        while link.waiting and self._fits(link):
            count = min(self._fits(link), len(link.waiting))
            keys = [link.waiting.popitem(last=False)[0] for _ in range(count)]
            ready = self._passing_of(keys)
            there = set(all_keys(ready))
            gone = [key for key in keys if key not in there]
            self._lose(link, gone, "evicted_before_stored", is_owed=False)
            self._offer(link, ready, now)

    def _fits(self, link: Link) -> int:
        """Blocks that may still be put on their way into a tier."""
        return max(0, self._backlog_limit - link.backlog_bytes) // self._layout.slot_bytes

    def _passing_of(self, keys: Sequence[BlockKey]) -> list[Passing]:
        """Blocks that lie ready in the first tier."""
        host = self._host_link
        if host is None or host.direct is None:
            return []
        found = []
        for blocks in self._index.ready(host.number, keys):
            slots = host.direct.borrow(blocks.keys)
            there = [i for i, slot in enumerate(slots) if slot >= 0]
            found += [
                Passing(blocks.part(first, last), slots[first:last], is_pinned=True)
                for first, last in in_a_row(there)
            ]
        return found

    def _submit(
        self,
        link: Link,
        parts: list[Passing],
        pins: Pins,
        piece: int,
        evicted: Sequence[BlockKey],
        now: float,
        *,
        is_second_try: bool,
    ) -> None:
        keys = parts[0].blocks.keys if len(parts) == 1 else all_keys(parts)
        batch = CascadeBatch(link, parts, keys, len(keys) * self._layout.slot_bytes, pins, is_second_try)
        for part in parts:
            if not part.is_pinned:
                self._host.use(part.slots)
        link.backlog_bytes += batch.num_bytes
        if link.keeps(Arrival.LEAVING):
            self._capacity.num_leaving += len(keys)
        if not link.is_indexed:
            link.storing.update(keys)
        link.submit_removal(
            Call(
                Verb.STORE,
                keys,
                partial(self._sealed, parts),
                evict_first=evicted,
                piece=piece,
                deadline=now + link.config.store_deadline_s,
                owner=batch,
            )
        )

    def _sealed(self, parts: Sequence[Passing], first: int, last: int) -> list[memoryview]:
        """For workers: values of some of the blocks."""
        layout, host = self._layout, self._host
        parts = split_at(split_at(parts, last)[0], first)[1]
        slots = [slot for part in parts for slot in part.slots]
        views = host.pool.views(slots, layout.slot_bytes)
        rows = (row for part in parts for row in part.blocks.rows())
        for (key, parent, tokens), slot, value in zip(rows, slots, views, strict=True):
            host.seal(slot, value, layout, key, parent, tokens)
        return views

    # ---- calls end -----------------------------------------------------------------------------

    def stored(self, end: Completed, batch: CascadeBatch, now: float) -> None:
        """A store call has ended."""
        link, keys = batch.link, batch.keys
        link.backlog_bytes -= batch.num_bytes
        if link.keeps(Arrival.LEAVING):  # slots of a call that is adrift are not coming free
            self._capacity.num_leaving -= len(keys)
        if end.is_late:
            link.note_late(end)
        good = keys
        if end.bad:
            bad = {keys[i] for i in end.bad}
            good = [key for key in keys if key not in bad]
        if not link.is_indexed:
            link.storing.difference_update(keys)
        if end.bad:
            self._not_stored(end, batch, now)
        if good and link.is_indexed:
            self._index.publish(link.number, good)
            self._capacity.drop_superseded(link, good, now)
        elif good:
            for key in good:
                link.known.note(key, now, is_there=True)
        if end.is_adrift:
            self._keep_uncertain(batch, end)
        else:
            self._release(batch)
        if good:
            self._observers.stored(link.name, good, len(good) * self._layout.slot_bytes)
        self._feed(link, now)

    def _not_stored(self, end: Completed, batch: CascadeBatch, now: float) -> None:
        """Some blocks of a call were not stored: count them, and try those again for which room was short."""
        link, keys = batch.link, batch.keys
        if link.is_indexed:
            self._index.remove(link.number, [keys[i] for i in end.bad])
        link.owed.add([keys[i] for i in end.bad])
        again = set()
        for i in end.bad:
            status = end.outcomes[i].status
            if status is Status.NO_SPACE and not batch.is_second_try:
                again.add(keys[i])
                continue
            if link.is_indexed and _may_be_there(end, i):
                link.strays.add([keys[i]])
            self._metrics.count("store_failures", tier=link.name, cause=status.value)
        if again:
            parts = [
                part.part(first, last)
                for part in batch.parts
                for first, last in in_a_row([i for i, key in enumerate(part.blocks.keys) if key in again])
            ]
            link.owed.take(again)
            self._second_try(link, parts, now)

    def _second_try(self, link: Link, parts: list[Passing], now: float) -> None:
        """The tier had less room than it said: make some, and try once more."""
        count = num_blocks(parts)
        gone = self._capacity.evict(link, 2 * count) if link.is_indexed else []
        if gone:
            self._store_into(link, parts, now, evicted=gone, is_second_try=True)
        else:
            self._metrics.count("store_failures", count, tier=link.name, cause=Status.NO_SPACE.value)
            link.owed.add(all_keys(parts))

    def returned(self, batch: CascadeBatch, now: float) -> None:
        """The worker of a store call that was given up has come back: its slots are free."""
        link = batch.link
        self._release(batch)
        # Whether the values appeared there in the end is not known: what the index does not know of
        # must not take room.
        if link.is_indexed:
            link.evict([key for key in batch.keys if not self._index.has(link.number, key)], now)
            link.strays.add(self._capacity.being_stored(link, batch.keys))

    # ---- what holds a block --------------------------------------------------------------------

    def _pin(self, parts: Sequence[Passing], num_calls: int) -> Pins:
        keys: list[BlockKey] = []
        for part in parts:
            if part.is_pinned and self._host_link is not None:
                keys += self._index.pin_ends(self._host_link.number, part.blocks.keys)
        return Pins(keys, num_calls)

    def _keep_uncertain(self, batch: CascadeBatch, end: Completed) -> None:
        """A call is adrift: only slots that workers are at are lent on."""
        held = {batch.keys[i] for i in end.bad if end.outcomes[i].buffer is BufferState.UNCERTAIN}
        kept: list[Passing] = []
        for part in batch.parts:
            if part.is_pinned:
                continue
            there = [i for i, key in enumerate(part.blocks.keys) if key in held]
            kept += [part.part(first, last) for first, last in in_a_row(there)]
            self._host.drop([slot for i, slot in enumerate(part.slots) if part.blocks.keys[i] not in held])
        batch.parts = kept

    def _release(self, batch: CascadeBatch) -> None:
        pins = batch.pins
        pins.num_calls -= 1
        if not pins.num_calls and self._host_link is not None:
            for key in pins.keys:
                self._index.unpin(self._host_link.number, key)
        for part in batch.parts:
            if not part.is_pinned:
                self._host.drop(part.slots)

    def _are_written_back(self) -> bool:
        return any(link.takes(Arrival.LEAVING) and self._fits(link) for link in self._links)

    def _write_back(self, blocks: Stretch, slots: list[int]) -> None:
        """Blocks leave the first tier: tiers with ``write: back`` get them now."""
        for link in self._links:
            if link.keeps(Arrival.LEAVING):
                self._offer(link, [Passing(blocks, slots, is_pinned=False)], self._now)
