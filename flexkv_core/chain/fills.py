"""Fills: blocks on their way from a lower tier into host slots; several loads may wait for one.

What is brought goes on when nobody waits for it any more: it may stay in the first tier.  A slot that a
late worker may still write into is kept back until the worker has returned.

Threads: the chain's thread only; workers do the I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat, takewhile
from typing import TypeVar

from ..index.stretch import Stretch, alike, at_positions, in_a_row, whole_blocks
from ..keys import BlockChain, BlockKey
from ..models import WritePolicy
from ..tier import BufferState, Outcome, Status
from .calls import Call, Completed, Faltered, Verb
from .fill_batch import FillBatch, Run, Waiter
from .jobs import LoadJob
from .links import Link
from .parts import ChainParts
from .plan import LoadPlan
from .prefetched import Prefetched

_PREFETCH_BATCH = 8
"""Blocks of one prefetching call: what is needed now waits behind one such call at most."""

T = TypeVar("T")


class Fills:
    """All fills of a chain."""

    def __init__(self, parts: ChainParts, prefetch_share: float = 1.0) -> None:
        """None yet; set what is told of their ends before the first one begins.

        Args:
            parts: What the chain consists of.
            prefetch_share: Share of the host slots that prefetched blocks may take.
        """
        self._layout = parts.layout
        self._links = parts.links
        self._index = parts.index
        self._host = parts.host
        self._capacity = parts.capacity
        self._metrics = parts.metrics
        self._observers = parts.observers
        self._host_link = parts.host_link
        self._coming: dict[BlockKey, FillBatch] = {}
        host = parts.host_link.number if parts.host_link is not None else -1
        most = max(1, int(parts.host_capacity_blocks * prefetch_share))
        self.prefetched = Prefetched(parts.index, parts.metrics, host=host, most_blocks=most)
        parts.capacity.on_host_evicted = self.prefetched.evicted
        self.on_filled: Callable[[FillBatch, Sequence[Run], float], None] = lambda _batch, _good, _now: None
        """These blocks of a batch lie whole in their slots; who uses them on takes them in this call."""
        self.on_failed: Callable[[LoadJob, str, float], None] = lambda _job, _cause, _now: None
        """A block that a load waits for does not come, for this cause."""
        self.on_promoted: Callable[[Sequence[BlockKey], int], None] = lambda _keys, _source: None
        """Blocks came up into the first tier, from this one."""

    @property
    def num_open(self) -> int:
        """Blocks that are on their way."""
        return len(self._coming)

    def is_on_its_way(self, key: BlockKey) -> bool:
        """Whether a block is being brought into a host slot."""
        return key in self._coming

    # ---- begin ---------------------------------------------------------------------------------

    def begin(
        self,
        plan: LoadPlan,
        numbers: Sequence[int],
        chain: BlockChain,
        now: float,
        *,
        is_prefetch: bool = False,
    ) -> int:
        """Bring those blocks of ``plan`` that are not on their way already, as far as there are slots.

        Sources are pinned first, so that making room cannot take them.

        Returns:
            How many blocks of ``plan``, from its first one, may be had.
        """
        new = numbers
        if self._coming:
            new = [i for i in numbers if plan.keys[i] not in self._coming]
        wanted = self._worth_prefetching(plan, new, now) if is_prefetch else new
        pins = [
            (link, self._pin(link, at_positions(plan.keys, mine)))
            for link, mine in self._sources(plan, wanted)
        ]
        slots = self._capacity.take_host_slots(self._host_link, len(wanted)) if wanted else []
        available = new[len(slots)] if len(slots) < len(new) else len(plan.keys)
        batches = self._batches(plan, wanted[: len(slots)], slots, chain, now, is_prefetch=is_prefetch)
        if is_prefetch:
            self.prefetched.begin(len(slots))
        for batch in batches:
            self._submit(batch, now)
        for link, keys in pins:  # each call has pinned its own by now
            self._unpin(link, keys)
        return available

    def _worth_prefetching(self, plan: LoadPlan, new: Sequence[int], now: float) -> Sequence[int]:
        """As many as may be prefetched now; none behind one that would not stay in the first tier."""
        room = self.prefetched.room(now)
        if room < len(new):
            self._metrics.count("prefetch_shortened", len(new) - room, cause="host_share")
        stay = set(self._promoted(plan, new[:room]))
        return list(takewhile(stay.__contains__, new[:room]))

    def _sources(self, plan: LoadPlan, numbers: Sequence[int]) -> list[tuple[Link, Sequence[int]]]:
        """Positions of blocks of a plan by the tier that they lie in."""
        tiers = plan.tiers
        if numbers and tiers.count(tiers[numbers[0]]) == len(tiers):
            return [(self._links[tiers[numbers[0]]], numbers)]
        found: dict[int, list[int]] = {}
        for i in numbers:
            found.setdefault(tiers[i], []).append(i)
        return [(self._links[tier], found[tier]) for tier in sorted(found)]

    def _pin(self, link: Link, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return self._index.pin_ends(link.number, keys) if link.is_indexed else []

    def _unpin(self, link: Link, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._index.unpin(link.number, key)

    def _batches(
        self,
        plan: LoadPlan,
        numbers: Sequence[int],
        slots: Sequence[int],
        chain: BlockChain,
        now: float,
        *,
        is_prefetch: bool,
    ) -> list[FillBatch]:
        """Calls that bring these blocks, those of one tier and one fate together; they have places then."""
        promoted = self._promoted(plan, numbers)
        slot_of = dict(zip(numbers, slots, strict=True))
        most = _PREFETCH_BATCH if is_prefetch else None
        batches, ends = [], []
        for link, mine in self._sources(plan, numbers):
            for some, stays in _by_fate(mine, promoted, len(numbers)):
                piece, calls = link.cut(len(some), link.workers.load_threads, most)
                for call in calls:
                    part = some[call.start : call.stop]
                    batch = FillBatch(
                        link,
                        piece,
                        at_positions(plan.keys, part),
                        [slot_of[i] for i in part],
                        at_positions(plan.stored_tokens, part),
                        stays,
                        set(range(len(part))) if is_prefetch else set(),
                    )
                    batches.append(batch)
                    ends.append(part[-1] + 1)
                    self._coming.update(zip(batch.keys, repeat(batch)))
        self._add(plan, promoted, ends, chain, now)
        return batches

    def _add(
        self, plan: LoadPlan, promoted: Sequence[int], ends: Sequence[int], chain: BlockChain, now: float
    ) -> None:
        """Give blocks places in the first tier, one for each call: what comes together is one place."""
        if self._host_link is None:
            return
        for first, blocks in self._stretches(plan, promoted, chain):
            size = self._layout.value_bytes(blocks.tokens_each)
            inside = [end - first for end in ends if first < end < first + len(blocks)]
            self._index.add(self._host_link.number, blocks, num_bytes=size, now=now, ends=inside)

    def _stretches(
        self, plan: LoadPlan, numbers: Sequence[int], chain: BlockChain
    ) -> list[tuple[int, Stretch]]:
        """Blocks of a plan, each with its position, and what they hang below.

        All but the last are the prompt's own.  The last may only begin like it: it lies in a tier of the
        index, since shared tiers are asked for whole blocks of the prompt alone.
        """
        stretches = []
        for first, last in in_a_row(numbers):
            own = last - first
            number = plan.block + last - 1
            if number >= chain.num_full_blocks or chain.key(number) != plan.keys[last - 1]:
                own -= 1
            if own:
                stretches.append((first, whole_blocks(chain, plan.block + first, plan.block + first + own)))
            if own < last - first:
                other = self._index.block(plan.tiers[last - 1], plan.keys[last - 1])
                if other is None:
                    raise AssertionError("a partly matched block lies in no tier of the index")
                stretches.append((last - 1, other))
        return stretches

    def _promoted(self, plan: LoadPlan, numbers: Sequence[int]) -> Sequence[int]:
        """Those of the blocks that are to stay in the first tier."""
        host = self._host_link
        if host is None or host.config.read_only or host.config.write is WritePolicy.NEVER:
            return []
        absent = self._index.missing(host.number, at_positions(plan.keys, numbers))
        candidates = numbers if len(absent) == len(numbers) else [numbers[at] for at in absent]
        wishes = {tier: self._links[tier].config.promote for tier in set(plan.tiers)}
        if all(wish == "always" for wish in wishes.values()):
            return candidates
        return [i for i in candidates if self._is_wanted(wishes[plan.tiers[i]], plan.tiers[i], plan.keys[i])]

    def _is_wanted(self, wish: str | int, tier: int, key: BlockKey) -> bool:
        if isinstance(wish, str):
            return wish == "always"
        place = self._index.place(tier, key)
        return place is None or place.hits + 1 >= wish

    def _submit(self, batch: FillBatch, now: float) -> None:
        link = batch.link
        batch.pins = self._pin(link, batch.keys)
        batch.call = Call(
            Verb.LOAD,
            batch.keys,
            partial(self._views, batch.slots),
            piece=batch.piece,
            can_wait=len(batch.ahead) == len(batch.keys),
            deadline=now + link.config.load_deadline_s,
            owner=batch,
        )
        link.load_begins(len(batch.keys), now)
        link.workers.submit(batch.call)

    def _views(self, slots: Sequence[int], first: int, last: int) -> list[memoryview]:
        """For workers: where some of the blocks go."""
        return self._host.pool.views(slots[first:last], self._layout.slot_bytes)

    # ---- who waits -----------------------------------------------------------------------------

    def wait_for(self, job: LoadJob, numbers: Sequence[int]) -> None:
        """Have ``job`` wait for these blocks of its plan, which are on their way."""
        for start, stop in in_a_row(numbers):
            for position, batch, first, last in self._segments(job.plan.keys, start, stop):
                batch.waiting.append(Waiter(job, position, first, last))
                if batch.ahead and not job.is_prefetch:
                    self._needed(batch, range(first, last), job)

    def _segments(
        self, keys: Sequence[BlockKey], start: int, stop: int
    ) -> Iterator[tuple[int, FillBatch, int, int]]:
        """Which batches bring ``keys[start:stop]``: ``(position, batch, first, last)``, without gaps."""
        while start < stop:
            batch = self._coming[keys[start]]
            first, last = alike(batch.keys, keys, start, stop)
            yield start, batch, first, last
            start += last - first

    def _needed(self, batch: FillBatch, positions: range, job: LoadJob) -> None:
        """What was brought ahead of need is needed now."""
        needed = batch.ahead.intersection(positions)
        for i in needed:
            self.prefetched.needed(batch.tokens[i])
        batch.ahead -= needed
        if needed and batch.call is not None:
            batch.link.workers.hurry(batch.call, job.begun + batch.link.config.load_deadline_s)

    def leave(self, job: LoadJob) -> None:
        """``job`` waits for nothing any more.

        What is on its way goes on; what was only to be prefetched, and nobody has begun, does not.
        """
        if not self._coming:
            return
        for batch in dict.fromkeys(map(self._coming.get, job.plan.keys)):
            if batch is None:
                continue
            batch.waiting = [waiter for waiter in batch.waiting if waiter.job is not job]
            if len(batch.ahead) == len(batch.keys) and not batch.waiting and batch.call is not None:
                batch.is_withdrawn = batch.link.workers.withdraw(batch.call) or batch.is_withdrawn

    # ---- ends ----------------------------------------------------------------------------------

    def filled(self, end: Completed, batch: FillBatch, now: float) -> None:
        """A load call has ended."""
        link = batch.link
        if end.is_late:
            link.note_late(end)
        self._unpin(link, batch.pins)
        batch.pins, batch.call = [], None
        if batch.is_withdrawn and batch.waiting:
            batch, end = self._ask_again(batch, end, now)
        for key in batch.keys:
            del self._coming[key]
        good = [(0, len(batch.keys))] if batch.keys else []
        if end.bad:
            good = in_a_row(sorted(set(range(len(batch.keys))).difference(end.bad)))
        num_bytes, promoted = self._succeeded(batch, good, end.outcomes, now) if good else (0, [])
        if end.bad:
            self._failed(batch, end, now)
        batch.waiting = []
        link.load_ended(end, num_bytes, self._layout.slot_bytes, now)
        if promoted:
            self.on_promoted(promoted, link.number)

    def faltered(self, message: Faltered, batch: FillBatch, now: float) -> None:
        """Some blocks of a call do not come: loads that wait for them are over before the call is."""
        if batch.call is message.call:
            for number, outcome in enumerate(message.outcomes, message.first):
                if not outcome.is_ok:
                    batch.told.add(number)
                    self._tell_failed(batch, number, outcome.status, now)

    def _ask_again(self, batch: FillBatch, end: Completed, now: float) -> tuple[FillBatch, Completed]:
        """Somebody has come to wait for blocks of a withdrawn call since; returns what is left of it."""
        wanted = sorted({i for waiter in batch.waiting for i in range(waiter.first, waiter.last)})
        again = batch.part(wanted)
        self._coming.update(zip(again.keys, repeat(again)))
        self._submit(again, now)
        left = batch.part(sorted(set(range(len(batch.keys))).difference(wanted)))
        count = len(left.keys)
        return left, replace(end, outcomes=end.outcomes[:count], bad=range(count))  # they are all alike

    def returned(self, batch: FillBatch) -> None:
        """The worker of a load call that was given up has come back."""
        for slot in batch.quarantined:
            self._host.end_quarantine(slot)

    def _succeeded(
        self, batch: FillBatch, good: Sequence[Run], outcomes: Sequence[Outcome], now: float
    ) -> tuple[int, list[BlockKey]]:
        """Blocks have come; their bytes, and those that stay in the first tier."""
        keys, slots = batch.keys, batch.slots
        sizes = [outcome.num_bytes for outcome in outcomes]
        if good != [(0, len(keys))]:
            keys, slots, sizes = _picked(keys, good), _picked(slots, good), _picked(sizes, good)
        num_bytes = sum(sizes)
        if batch.is_promoted and self._host_link is not None:
            self._host.publish(keys, slots, sizes)
            self._index.publish(self._host_link.number, keys)
            self._observers.stored(self._host_link.name, keys, num_bytes)
        for i in sorted(batch.ahead):
            if outcomes[i].is_ok:
                self.prefetched.arrived(batch.keys[i], batch.tokens[i], now)
        self.on_filled(batch, good, now)
        if not batch.is_promoted:
            self._host.drop(slots)
        self._observers.loaded(batch.link.name, keys, num_bytes)
        return num_bytes, keys if batch.is_promoted else []

    def _failed(self, batch: FillBatch, end: Completed, now: float) -> None:
        if batch.is_promoted and self._host_link is not None:
            self._index.remove(self._host_link.number, [batch.keys[i] for i in end.bad])
        for i in end.bad:
            if end.is_adrift and end.outcomes[i].buffer is BufferState.UNCERTAIN:
                batch.quarantined.append(batch.slots[i])
                self._host.quarantine(batch.slots[i])
            else:
                self._host.drop([batch.slots[i]])
        for i in end.bad:
            self._fill_failed(batch, i, end.outcomes[i].status, now)

    def _fill_failed(self, batch: FillBatch, number: int, status: Status, now: float) -> None:
        link = batch.link
        if number in batch.ahead:
            self.prefetched.failed(batch.tokens[number])
        if status in (Status.MISS, Status.CORRUPT):
            self._forget(link, batch.keys[number], is_damaged=status is Status.CORRUPT, now=now)
        if number not in batch.told:
            self._tell_failed(batch, number, status, now)

    def _tell_failed(self, batch: FillBatch, number: int, status: Status, now: float) -> None:
        """Count a block that does not come, and tell who waits for it."""
        name = batch.link.name
        if not (number in batch.ahead and status is Status.CANCELLED):
            self._metrics.count("load_failures", tier=name, cause=status.value)
        for waiter in batch.waiting:
            if waiter.first <= number < waiter.last:
                self.on_failed(waiter.job, f"{name}:{status.value}", now)

    def _forget(self, link: Link, key: BlockKey, *, is_damaged: bool, now: float) -> None:
        """A tier that promised a block does not have it: do not promise it again."""
        is_useless = is_damaged
        if not link.is_indexed:
            link.known.note(key, now, is_there=False)
        elif self._index.has(link.number, key) and not self._index.is_pinned(link.number, key):
            self._index.remove(link.number, [key])
            self._observers.evicted(link.name, [key])
            is_useless = True  # it may lie there all the same: one that no codec knows is a miss, too
        if is_useless and not link.config.read_only:
            link.evict([key], now)


def _by_fate(numbers: Sequence[int], promoted: Sequence[int], total: int) -> list[tuple[Sequence[int], bool]]:
    """Positions apart by whether they are among the ``promoted``, out of ``total``."""
    if len(promoted) in (0, total):
        return [(numbers, bool(promoted))]
    stay = set(promoted)
    fates = [([i for i in numbers if i in stay], True), ([i for i in numbers if i not in stay], False)]
    return [(some, stays) for some, stays in fates if some]


def _picked(values: Sequence[T], runs: Sequence[Run]) -> list[T]:
    return [value for first, last in runs for value in values[first:last]]
