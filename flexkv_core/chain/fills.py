"""Fills: one block each on its way from a lower tier into a host slot; several loads may wait for one.

A fill goes on when nobody waits for it any more: what it brings may stay in the first tier.  A slot that
a late worker may still write into is kept back until the worker has returned.

Threads: the chain's thread only; workers do the I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from ..index.stretch import Stretch, in_a_row, whole_blocks
from ..keys import BlockChain, BlockKey
from ..models import WritePolicy
from ..tier import Outcome, Status
from .executor import Call, Completed, Verb
from .jobs import LoadJob
from .links import Link
from .parts import ChainParts
from .plan import LoadPlan
from .prefetched import Prefetched

_PREFETCH_BATCH = 8
"""Blocks of one prefetching call: what is needed now waits behind one such call at most."""


@dataclass(eq=False, slots=True)
class Fill:
    """One block on its way from a lower tier into a host slot.

    Attributes:
        key: The block's key.
        link: Where it comes from.
        slot: Where it goes.
        is_promoted: Whether it stays in the first tier.
        num_tokens: Tokens of the block.
        is_prefetch: It is brought ahead of need, and nobody needs it so far.
        waiting: The loads that wait for it, and its position in each.
        batch: The call that brings it.
    """

    key: BlockKey
    link: Link
    slot: int
    is_promoted: bool
    num_tokens: int
    is_prefetch: bool = False
    waiting: list[tuple[LoadJob, int]] = field(default_factory=list)
    batch: FillBatch | None = None


@dataclass(eq=False)
class FillBatch:
    """What a load call's end is looked up by.

    Attributes:
        link: Where the blocks come from.
        fills: The blocks.
        pins: Blocks of that tier that are pinned for it.
        call: The call.
        is_withdrawn: It was taken back before anybody began it; its end may still have to be taken in.
    """

    link: Link
    fills: list[Fill]
    pins: list[BlockKey] = field(default_factory=list)
    call: Call | None = None
    is_withdrawn: bool = False


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
        self._fills: dict[BlockKey, Fill] = {}
        host = parts.host_link.number if parts.host_link is not None else -1
        most = max(1, int(parts.host_capacity_blocks * prefetch_share))
        self.prefetched = Prefetched(parts.index, parts.metrics, host=host, most_blocks=most)
        parts.capacity.on_host_evicted = self.prefetched.evicted
        self.on_filled: Callable[[Sequence[Fill], float], None] = lambda _fills, _now: None
        """Blocks lie whole in their slots; who uses them on takes them in this call."""
        self.on_failed: Callable[[Fill, str, float], None] = lambda _fill, _cause, _now: None
        """A block does not come, for this cause."""
        self.on_promoted: Callable[[Sequence[BlockKey], int], None] = lambda _keys, _source: None
        """Blocks came up into the first tier, from this one."""

    @property
    def num_open(self) -> int:
        """Fills that have not ended."""
        return len(self._fills)

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
        new = [i for i in numbers if plan.keys[i] not in self._fills]
        wanted = self._worth_prefetching(plan, new, now) if is_prefetch else new
        pins = [(link, self._pin(link, keys)) for link, keys in self._sources(plan, wanted)]
        slots = self._capacity.take_host_slots(self._host_link, len(wanted)) if wanted else []
        available = new[len(slots)] if len(slots) < len(new) else len(plan.keys)
        fresh = self._new_fills(plan, wanted[: len(slots)], chain, slots, now)
        if is_prefetch:
            self.prefetched.begin(len(fresh))
            for fill in fresh:
                fill.is_prefetch = True
        self._submit(fresh, now, can_wait=is_prefetch)
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

    def is_on_its_way(self, key: BlockKey) -> bool:
        """Whether a block is being brought into a host slot."""
        return key in self._fills

    def wait_for(self, job: LoadJob, numbers: Sequence[int]) -> None:
        """Have ``job`` wait for these blocks of its plan, which are on their way."""
        keys, fills = job.plan.keys, self._fills
        for i in numbers:
            fill = fills[keys[i]]
            fill.waiting.append((job, i))
            if fill.is_prefetch and not job.is_prefetch:
                self._needed(fill, job)

    def _needed(self, fill: Fill, job: LoadJob) -> None:
        """What was brought ahead of need is needed now."""
        fill.is_prefetch = False
        self.prefetched.needed(fill.num_tokens)
        if fill.batch is not None and fill.batch.call is not None:
            fill.link.workers.hurry(fill.batch.call, job.begun + fill.link.config.load_deadline_s)

    def leave(self, job: LoadJob) -> None:
        """``job`` waits for nothing any more.

        What is on its way goes on; what was only to be prefetched, and nobody has begun, does not.
        """
        left: dict[FillBatch, None] = {}
        for key in job.plan.keys:
            fill = self._fills.get(key)
            if fill is not None:
                fill.waiting = [entry for entry in fill.waiting if entry[0] is not job]
                if fill.is_prefetch and fill.batch is not None:
                    left[fill.batch] = None
        for batch in left:
            if batch.call is not None and not any(fill.waiting for fill in batch.fills):
                batch.is_withdrawn = batch.link.workers.withdraw(batch.call) or batch.is_withdrawn

    def _sources(self, plan: LoadPlan, numbers: Sequence[int]) -> list[tuple[Link, list[BlockKey]]]:
        """Blocks of a plan by the tier that they lie in."""
        found: dict[int, list[BlockKey]] = {}
        for i in numbers:
            found.setdefault(plan.tiers[i], []).append(plan.keys[i])
        return [(self._links[tier], keys) for tier, keys in found.items()]

    def _pin(self, link: Link, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return self._index.pin_ends(link.number, keys) if link.is_indexed else []

    def _unpin(self, link: Link, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._index.unpin(link.number, key)

    def _new_fills(
        self, plan: LoadPlan, numbers: Sequence[int], chain: BlockChain, slots: Sequence[int], now: float
    ) -> list[Fill]:
        promoted = self._promoted(plan, numbers)
        stay, keys, tiers, tokens = set(promoted), plan.keys, plan.tiers, plan.stored_tokens
        fresh = [
            Fill(keys[i], self._links[tiers[i]], slot, i in stay, tokens[i])
            for i, slot in zip(numbers, slots, strict=True)
        ]
        self._fills.update((fill.key, fill) for fill in fresh)
        if self._host_link is not None:
            for blocks in self._stretches(plan, promoted, chain):
                size = self._layout.value_bytes(blocks.tokens_each)
                self._index.add(self._host_link.number, blocks, num_bytes=size, now=now)
        return fresh

    def _stretches(self, plan: LoadPlan, numbers: Sequence[int], chain: BlockChain) -> list[Stretch]:
        """Blocks of a plan, with what they hang below.

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
                stretches.append(whole_blocks(chain, plan.block + first, plan.block + first + own))
            if own < last - first:
                other = self._index.block(plan.tiers[last - 1], plan.keys[last - 1])
                if other is None:
                    raise AssertionError("a partly matched block lies in no tier of the index")
                stretches.append(other)
        return stretches

    def _promoted(self, plan: LoadPlan, numbers: Sequence[int]) -> list[int]:
        """Those of the blocks that are to stay in the first tier."""
        host = self._host_link
        if host is None or host.config.read_only or host.config.write is WritePolicy.NEVER:
            return []
        absent = self._index.missing(host.number, [plan.keys[i] for i in numbers])
        candidates = [numbers[at] for at in absent]
        wishes = {tier: self._links[tier].config.promote for tier in set(plan.tiers)}
        if all(wish == "always" for wish in wishes.values()):
            return candidates
        return [i for i in candidates if self._is_wanted(wishes[plan.tiers[i]], plan.tiers[i], plan.keys[i])]

    def _is_wanted(self, wish: str | int, tier: int, key: BlockKey) -> bool:
        if isinstance(wish, str):
            return wish == "always"
        place = self._index.place(tier, key)
        return place is None or place.hits + 1 >= wish

    def _submit(self, fills: list[Fill], now: float, *, can_wait: bool) -> None:
        most = _PREFETCH_BATCH if can_wait else None
        for link in self._links:
            mine = [fill for fill in fills if fill.link is link]
            for batch in link.batches(len(mine), link.workers.load_threads, most):
                self._submit_batch(link, [mine[i] for i in batch], now, can_wait=can_wait)

    def _submit_batch(self, link: Link, fills: list[Fill], now: float, *, can_wait: bool) -> None:
        keys = [fill.key for fill in fills]
        batch = FillBatch(link, fills, self._pin(link, keys))
        batch.call = Call(
            Verb.LOAD,
            keys,
            partial(self._host.pool.views, [fill.slot for fill in fills], self._layout.slot_bytes),
            can_wait=can_wait,
            deadline=now + link.config.load_deadline_s,
            owner=batch,
        )
        for fill in fills:
            fill.batch = batch
        link.load_begins(len(fills), now)
        link.workers.submit(batch.call)

    def filled(self, end: Completed, batch: FillBatch, now: float) -> None:
        """A load call has ended."""
        if end.is_late:
            batch.link.note_late(end)
        if batch.is_withdrawn:
            end = self._without_wanted(end, batch, now)
        self._unpin(batch.link, batch.pins)
        batch.call = None
        good: list[Fill] = []
        sizes: list[int] = []
        for fill, outcome in zip(batch.fills, end.outcomes, strict=True):
            del self._fills[fill.key]
            fill.batch = None  # it is over: what points in a circle would wait for the garbage collector
            if outcome.status is Status.OK:
                good.append(fill)
                sizes.append(outcome.num_bytes)
        if good:
            self._succeeded(good, sizes, now)
            self._observers.loaded(batch.link.name, [fill.key for fill in good], sum(sizes))
        if len(good) < len(batch.fills):
            self._failed(batch, end, now)
        batch.link.load_ended(end, sum(sizes), self._layout.slot_bytes, now)
        if good:
            self.on_promoted([fill.key for fill in good if fill.is_promoted], batch.link.number)

    def _without_wanted(self, end: Completed, batch: FillBatch, now: float) -> Completed:
        """Ask again for blocks of a withdrawn call that somebody has come to wait for since."""
        wanted = [fill for fill in batch.fills if fill.waiting]
        if wanted:
            batch.fills = [fill for fill in batch.fills if not fill.waiting]
            self._submit_batch(batch.link, wanted, now, can_wait=all(fill.is_prefetch for fill in wanted))
        count = len(batch.fills)
        return replace(end, outcomes=end.outcomes[:count], bad=end.bad[:count])  # they are all alike

    def returned(self, batch: FillBatch) -> None:
        """The worker of a load call that was given up has come back."""
        for fill in batch.fills:
            self._host.end_quarantine(fill.slot)

    def _succeeded(self, fills: Sequence[Fill], sizes: Sequence[int], now: float) -> None:
        stay = [(f.key, f.slot, size) for f, size in zip(fills, sizes, strict=True) if f.is_promoted]
        if stay and self._host_link is not None:
            keys, slots, lengths = map(list, zip(*stay, strict=True))
            self._host.publish(keys, slots, lengths)
            self._index.publish(self._host_link.number, keys)
            self._observers.stored(self._host_link.name, keys, sum(lengths))
        for fill in fills:
            if fill.is_prefetch:
                self.prefetched.arrived(fill.key, fill.num_tokens, now)
        self.on_filled(fills, now)
        self._host.drop([fill.slot for fill in fills if not fill.is_promoted])

    def _failed(self, batch: FillBatch, end: Completed, now: float) -> None:
        pairs = zip(batch.fills, end.outcomes, strict=True)
        bad = [(fill, outcome) for fill, outcome in pairs if not outcome.is_ok]
        if self._host_link is not None:
            self._index.remove(self._host_link.number, [fill.key for fill, _ in bad if fill.is_promoted])
        if end.is_adrift:
            for fill, _ in bad:
                self._host.quarantine(fill.slot)
        else:
            self._host.drop([fill.slot for fill, _ in bad])
        for fill, outcome in bad:
            self._fill_failed(fill, outcome, now)

    def _fill_failed(self, fill: Fill, outcome: Outcome, now: float) -> None:
        link = fill.link
        if fill.is_prefetch:
            self.prefetched.failed(fill.num_tokens)
        if not (fill.is_prefetch and outcome.status is Status.CANCELLED):
            self._metrics.count("load_failures", tier=link.name, cause=outcome.status.value)
        if outcome.status in (Status.MISS, Status.CORRUPT):
            self._forget(link, fill.key, is_damaged=outcome.status is Status.CORRUPT, now=now)
        self.on_failed(fill, f"{link.name}:{outcome.status.value}", now)

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
