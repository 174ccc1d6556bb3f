"""The blocks of one tier: a tree whose edges are places, stretches of blocks that are alike.

Blocks that come together are one place for as long as nothing tells them apart; a place is split where
only some of its blocks are loaded, removed, or followed by another branch.  So the blocks inside a place
have one follower each, and all that may branch hangs below a place's last block.

Rules kept here and nowhere else:

* a pinned or unready block never leaves; a block leaves its tier only after what hangs below it there,
  so that a pin on a block protects all before it in the same tier;
* counts never clamp: a pin given back too often is an error.

Threads: the index's owner.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import repeat

from ..keys import BlockKey
from .eviction import EvictionQueue, Place
from .policy import EvictionOrder
from .stretch import Stretch, alike

_LONGEST = 256
"""Blocks in one place at most, so that finding one of them inside stays cheap."""
_SUPERSEDED_WALK = 32
_NEIGHBOURS = 256
"""So many siblings on each side are looked at for one that can be read: thousands may have expired."""
_FIRST_LOOK = 64
"""Keys looked for at once at first: mostly all are there or none is, and many need not be looked at."""

Heads = list[tuple[bytes, BlockKey]]
"""First blocks of places: their encoded tokens, by which they are sorted, and their keys."""


class TierPlaces:
    """One tier's tree, and the queue of what may leave it."""

    def __init__(self, order: EvictionOrder) -> None:
        """No blocks yet; they are to leave in ``order``."""
        self._by_key: dict[BlockKey, Place] = {}
        self._heads: dict[bytes, Heads] = {}
        self.queue = EvictionQueue(order, self._by_key, self._may_leave)
        self.num_bytes = 0
        self.num_pins = 0

    # ---- questions -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._by_key)

    def get(self, key: BlockKey) -> Place | None:
        """The place that the block is in."""
        return self._by_key.get(key)

    def block(self, key: BlockKey) -> Stretch | None:
        """The block alone."""
        place = self._by_key.get(key)
        if place is None:
            return None
        at = place.keys.index(key)
        return place.part(at, at + 1)

    def num_pins_of(self, key: BlockKey) -> int:
        """Pins of this very block."""
        place, at = self._find(key)
        return place.pins.get(at, 0)

    def segments(
        self, keys: Sequence[BlockKey], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Place, int, int]]:
        """Where ``keys[start:stop]`` lie, as few answers as possible: ``(position, place, first, last)``.

        ``keys[position:]`` begins with ``place.keys[first:last]``.  Keys that are not there are left out.
        A place may be split once it was yielded.
        """
        get, at, count = self._by_key.get, start, len(keys) if stop is None else stop
        while at < count:
            place = get(keys[at])
            if place is None:
                at += 1
                continue
            first, last = alike(place.keys, keys, at, count)
            yield at, place, first, last
            at += last - first

    def missing(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Positions of the keys that are not here."""
        by_key = self._by_key
        if by_key.keys().isdisjoint(keys):
            return range(len(keys))
        return [i for i, key in enumerate(keys) if key not in by_key]

    def unready(self, keys: Sequence[BlockKey]) -> list[int]:
        """Positions of the keys that cannot be read here."""
        found: list[int] = []
        at = 0
        for position, place, first, last in self.segments(keys):
            found += range(at, position)
            at = position + last - first
            if not place.is_ready:
                found += range(position, at)
        found += range(at, len(keys))
        return found

    def ready_until(self, keys: Sequence[BlockKey], start: int, stop: int, oldest: float) -> int:
        """One behind the last of ``keys[start:stop]`` that can be read, without a gap from ``start``."""
        at = start
        if self._is_readable(keys[start], oldest):  # not more than this one look where there is nothing
            for position, place, first, last in self.segments(keys, start, stop):
                if position != at or not place.is_ready or place.created < oldest:
                    break
                at += last - first
        return at

    def run_before(self, keys: Sequence[BlockKey], stop: int) -> int:
        """How many of a prompt's ``keys`` are here right before position ``stop``, without a gap."""
        at = stop
        while at and keys[at - 1] in self._by_key:
            at -= self._find(keys[at - 1])[1] + 1
        return stop - at

    def first_of(self, keys: Sequence[BlockKey], start: int, stop: int) -> int:
        """Position of the first of ``keys[start:stop]`` that is here; ``stop`` if none is."""
        by_key, count = self._by_key, _FIRST_LOOK
        while by_key and start < stop:
            part = keys[start : min(stop, start + count)]
            if not by_key.keys().isdisjoint(part):
                return start + next(i for i, key in enumerate(part) if key in by_key)
            start += len(part)
            count *= 4
        return stop

    def followers(self, parent: bytes) -> Sequence[tuple[bytes, BlockKey]]:
        """What hangs below ``parent`` here: encoded tokens, in their order, and keys."""
        heads = self._heads.get(parent)
        if heads is not None:
            return heads
        place = self._by_key.get(parent)
        if place is None or place.keys[-1] == parent:
            return ()
        at = place.keys.index(parent) + 1
        return [(place.tokens(at), place.keys[at])]

    def nearest(
        self, parent: bytes, wanted: bytes, oldest: float
    ) -> Iterator[Iterator[tuple[bytes, BlockKey]]]:
        """What hangs below ``parent`` and can be read, from its nearest neighbour to ``wanted`` on.

        Twice: those behind it and those before it.  The longest common prefix is with a neighbour.
        """
        siblings = self.followers(parent)
        at = bisect_left(siblings, (wanted, b""))
        for order in (range(at, len(siblings)), range(at - 1, -1, -1)):
            near = (siblings[i] for i in order[:_NEIGHBOURS])
            yield (sibling for sibling in near if self._is_readable(sibling[1], oldest))

    def superseded(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Partly filled siblings whose tokens these blocks repeat, free to go."""
        found: dict[BlockKey, None] = {}
        for _, place, first, _ in self.segments(keys):
            siblings = self._heads[place.parent] if not first else ()
            if len(siblings) < 2:
                continue
            tokens = place.tokens(0)
            at = bisect_left(siblings, (tokens, place.keys[0]))
            # Prefixes of a block sort before it, and mostly right before it; a block with very many
            # siblings is not worth a longer walk, since what stays behind only ages and leaves.
            for shorter, other in reversed(siblings[max(0, at - _SUPERSEDED_WALK) : at]):
                if tokens.startswith(shorter) and self._may_leave(self._by_key[other]):
                    found[other] = None
        return list(found)

    def _is_readable(self, key: BlockKey, oldest: float) -> bool:
        place = self._by_key.get(key)
        return place is not None and place.is_ready and place.created >= oldest

    def _may_leave(self, place: Place) -> bool:
        keys = place.keys
        return place.is_ready and keys[-1] not in self._heads and len(keys) - 1 not in place.pins

    def _find(self, key: BlockKey) -> tuple[Place, int]:
        place = self._by_key.get(key)
        if place is None:
            raise ValueError("the block has no place in this tier")
        keys = place.keys
        return place, (len(keys) - 1 if keys[-1] == key else keys.index(key))

    # ---- changes -------------------------------------------------------------------------------

    def add(
        self, blocks: Stretch, *, num_bytes: int, now: float, is_ready: bool, ends: Sequence[int] = ()
    ) -> None:
        """Give blocks places, a new one behind each of ``ends``.

        Raises:
            ValueError: a block has a place already.
        """
        keys = blocks.keys
        if not self._by_key.keys().isdisjoint(keys):
            raise ValueError("a block has a place in this tier already")
        above = self._by_key.get(blocks.parent)
        if above is not None and above.keys[-1] != blocks.parent:
            self._split(above, above.keys.index(blocks.parent) + 1)
        ends = sorted({*ends, *range(_LONGEST, len(keys), _LONGEST), len(keys)})
        if not self._heads.keys().isdisjoint(keys):
            ends = sorted({*ends, *(i for i, key in enumerate(keys, 1) if key in self._heads)})
        blocks = blocks.part(0, len(keys))
        blocks.own_ids(2)
        first = 0
        for last in ends:
            place = Place.of(blocks.part(first, last), num_bytes, now, is_ready=is_ready)
            self._by_key.update(zip(place.keys, repeat(place)))
            insort(self._heads.setdefault(place.parent, []), self._head(place))
            first = last
        self.num_bytes += num_bytes * len(keys)
        if is_ready:
            self.queue.push(place)

    def publish(self, keys: Sequence[BlockKey]) -> None:
        """The blocks' bytes may be read from now on."""
        for place in self._exactly(keys, must=True):
            place.is_ready = True
            self.queue.push(place)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks.  Raises ValueError, and changes nothing, if one has no place or is pinned."""
        found = 0
        for _, place, first, last in self.segments(keys):
            found += last - first
            pins = sum(count for at, count in place.pins.items() if first <= at < last)
            if pins:
                raise ValueError(f"a pinned block cannot leave ({pins} pins)")
        if found < len(keys):
            raise ValueError("the block has no place in this tier")
        for place in self._exactly(keys, must=True):
            self._unlink(place)

    def evict(self, amount: int) -> list[Stretch]:
        """Let up to ``amount`` blocks go: in the queue's order, each after all that hangs below it."""
        gone: list[Stretch] = []
        for place in self.queue.leaving() if amount > 0 else ():
            count = min(amount, place.num_unpinned)
            if count == len(place.keys):
                self._unlink(place)
                gone.append(place)
            else:
                gone.append(self._cut_off(place, len(place.keys) - count))
                self.queue.push(place)
            amount -= count
            if not amount:
                break
        return gone

    def pin(self, key: BlockKey) -> None:
        """Protect a block, and all before it, from leaving."""
        place, at = self._find(key)
        place.pins[at] = place.pins.get(at, 0) + 1
        self.num_pins += 1

    def pin_ends(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Pin the last block of each run of ``keys``, which protects the others; returns those pinned."""
        ends = [keys[position + last - first - 1] for position, _, first, last in self.segments(keys)]
        for key in ends:
            self.pin(key)
        return ends

    def unpin(self, key: BlockKey) -> None:
        """Give one pin back.  Raises ValueError if there is none."""
        place, at = self._find(key)
        pins = place.pins.get(at, 0)
        if pins < 1:
            raise ValueError("a pin was given back twice")
        if pins > 1:
            place.pins[at] = pins - 1
        else:
            del place.pins[at]
        self.num_pins -= 1
        self.queue.push(place)

    def touch(self, keys: Sequence[BlockKey], now: float) -> None:
        """Note that blocks were loaded."""
        for place in self._exactly(keys):
            place.last_used = now
            place.hits += 1
            if self.queue.order.ages_backwards:
                self.queue.push_again(place)

    def renew(self, keys: Sequence[BlockKey], oldest: float, now: float) -> None:
        """Blocks created before ``oldest`` were stored again: they count as created now."""
        for position, place, first, last in self.segments(keys):
            if place.is_ready and place.created < oldest:
                for old in self._exactly(keys[position : position + last - first]):
                    old.created = old.last_used = now
                    self.queue.push_again(old)

    def _exactly(self, keys: Sequence[BlockKey], *, must: bool = False) -> list[Place]:
        """Places that hold these blocks and no others, split where needed."""
        found, places = 0, []
        for _, place, first, last in self.segments(keys):
            found += last - first
            wanted = self._split(place, last) if last < len(place.keys) else place
            if first:
                self._split(wanted, first)
            places.append(wanted)
        if must and found < len(keys):
            raise ValueError("the block has no place in this tier")
        return places

    def _split(self, place: Place, at: int) -> Place:
        """Make the blocks before position ``at`` a place of their own, which is returned."""
        head = place.split(at)
        self._by_key.update(zip(head.keys, repeat(head)))
        self._heads[place.parent] = [self._head(place)]
        return head

    def _cut_off(self, place: Place, at: int) -> Stretch:
        """Forget the blocks from position ``at`` on."""
        end = place.cut_off(at)
        self._forget(end.keys, place.num_bytes)
        return end

    def _unlink(self, place: Place) -> None:
        """Forget all blocks of a place."""
        self._forget(place.keys, place.num_bytes)
        place.is_queued = False
        heads = self._heads[place.parent]
        del heads[bisect_left(heads, self._head(place))]
        if not heads:
            del self._heads[place.parent]
            above = self._by_key.get(place.parent)
            if above is not None:
                self.queue.push(above)

    def _forget(self, keys: Sequence[BlockKey], num_bytes: int) -> None:
        for key in keys:
            del self._by_key[key]
        self.num_bytes -= num_bytes * len(keys)

    @staticmethod
    def _head(place: Place) -> tuple[bytes, BlockKey]:
        return place.tokens(0), place.keys[0]
