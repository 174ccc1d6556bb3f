"""Stores: blocks from the device into host slots, and on into the tiers below.

A store holds its device slots from ``begin`` until its copy has ended (the engine keeps them locked
for as long); the *cascade* into lower tiers goes on from the host slots, so a slow disk never holds
device memory.  A block is visible in a tier only once it is whole there.

Threads: the chain's thread only; workers seal values and do the I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from . import envelope
from .capacity import Capacity
from .drivers import Observers
from .errors import TransferError
from .executor import Call, Completed, Verb
from .host import HostSlots
from .index import BlockIndex, Node
from .keys import BlockChain, BlockKey
from .layout import BlockLayout
from .links import Link
from .metrics import Metrics
from .models import WritePolicy
from .plan import StorePlan, plan_store
from .receipts import Receipt
from .tier import Status
from .transfer import CopyJob, Fence, HostSpans, Ticket, Transfer


class StoreState(str, Enum):
    """Where a store stands; the last three are terminal."""

    PLANNED = "planned"
    COPYING = "copying"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_OVER = frozenset({StoreState.DONE, StoreState.FAILED, StoreState.CANCELLED})
_numbers = itertools.count(1)
_BACKLOG_SHARE = 0.5
"""Share of the host slots that may wait for one lower tier; beyond it a tier is passed over."""
_MAYBE_STORED = frozenset({Status.TIMEOUT, Status.UNAVAILABLE, Status.INVALID})
"""Failures after which the value may be there all the same."""


@dataclass(eq=False)
class StoreJob:
    """One store.

    Attributes:
        label: The request, for people.
        plan: What is copied, in order.
        slots: Host slot of each block.
        state: Where it stands.
        cause: Why it failed; empty otherwise.
        ticket: The copy from the device, once there is one.
        number: Unique in the process.
    """

    label: str
    plan: StorePlan
    slots: list[int]
    begun: float
    state: StoreState = StoreState.PLANNED
    cause: str = ""
    ticket: Ticket | None = None
    is_cancelled: bool = False
    number: int = field(default_factory=_numbers.__next__)

    @property
    def num_tokens(self) -> int:
        """Tokens that are copied."""
        return self.plan.num_tokens

    @property
    def is_over(self) -> bool:
        """Whether the device slots are free of it."""
        return self.state in _OVER


@dataclass(frozen=True)
class _Passing:
    """A block that lies whole in a host slot, on its way down."""

    key: BlockKey
    parent: bytes
    tokens: bytes
    num_tokens: int
    slot: int
    is_pinned: bool


@dataclass(eq=False)
class _Cascade:
    """What a store call's end is looked up by."""

    link: Link
    blocks: list[_Passing]
    num_bytes: int
    is_second_try: bool = False


class Stores:
    """All stores of a chain."""

    def __init__(
        self,
        *,
        layout: BlockLayout,
        links: Sequence[Link],
        index: BlockIndex,
        host: HostSlots,
        capacity: Capacity,
        transfer: Transfer,
        metrics: Metrics,
        observers: Observers,
        max_tokens: int,
        on_end: Callable[[Receipt], None],
    ) -> None:
        self._layout = layout
        self._links = links
        self._index = index
        self._host = host
        self._capacity = capacity
        self._transfer = transfer
        self._metrics = metrics
        self._observers = observers
        self._max_tokens = max_tokens
        self._on_end = on_end
        self._host_link = links[0] if host.direct is not None else None
        """The tier that lends the slots."""
        self._kept_in = self._host_link if self._host_link and self._host_link.keeps_stores else None
        """The same, if blocks that are stored stay in it; otherwise its slots are only lent."""
        self._active: dict[int, StoreJob] = {}
        self._tokens_under_way = 0
        self._copying: set[BlockKey] = set()
        # At least one block, or what waits would wait for ever.
        self._backlog_limit = max(layout.slot_bytes, int(host.region.num_bytes * _BACKLOG_SHARE))
        capacity.write_back = self._write_back

    @property
    def num_active(self) -> int:
        """Stores whose copy is not over, and blocks that wait for a lower tier."""
        return len(self._active) + sum(len(link.waiting) for link in self._links)

    @property
    def tokens_under_way(self) -> int:
        """Tokens in stores that hold device slots."""
        return self._tokens_under_way

    @property
    def keeps_tails(self) -> bool:
        """Whether any tier keeps partly filled blocks."""
        return any(link.keeps_tails and link.config.write is not WritePolicy.NEVER for link in self._links)

    def begin(
        self,
        chain: BlockChain,
        num_tokens: int,
        *,
        page_tokens: int,
        with_tail: bool,
        label: str,
        now: float,
    ) -> StoreJob | None:
        """Plan a store of the first ``num_tokens`` tokens and take host slots for what is missing.

        Args:
            chain: The sequence, under its namespace.
            num_tokens: Tokens whose KV is final.
            page_tokens: The engine's page.
            with_tail: Whether a partly filled last block is worth keeping: the sequence ends here.
            label: The request, for people.
            now: The chain's clock.

        Returns:
            The store, of the longest part that fits; None where there is nothing to do or no room.
        """
        if not any(link.takes_stores for link in self._links):
            return None
        plan = plan_store(
            chain,
            num_tokens,
            self._missing,
            page_tokens=page_tokens,
            with_tail=with_tail and self.keeps_tails,
        )
        self._drop_known_tail(plan)
        self._limit(plan)
        if not plan.keys:
            return None
        slots = self._reserve(plan)
        if len(slots) < len(plan.keys):
            self._metrics.count("store_dropped_blocks", len(plan.keys) - len(slots), cause="no_host_slots")
            plan.cut(len(slots))
        if not plan.keys:
            return None
        self._copying.update(plan.keys)
        host = self._kept_in
        if host is not None:
            for key, parent, tokens, count in zip(
                plan.keys, plan.parents, plan.tokens, plan.counts, strict=True
            ):
                size = self._layout.value_bytes(count)
                self._index.add(host.number, key, parent, tokens, num_bytes=size, now=now)
        job = StoreJob(label, plan, slots, begun=now)
        self._active[job.number] = job
        self._tokens_under_way += job.num_tokens
        return job

    def launch(self, job: StoreJob, device_slots: Any, fence: Fence, now: float) -> None:
        """Copy: ``device_slots`` holds one slot for each token of ``job.plan``, in order.

        A store that was given up meanwhile copies nothing.
        """
        if job.state is not StoreState.PLANNED:
            return
        counts = job.plan.counts
        spans = HostSpans(self._host.pool, job.slots, counts, [0] * len(counts), counts)
        try:
            job.ticket = self._transfer.store(CopyJob(job.number, spans, device_slots, fence))
        except TransferError as exc:
            job.cause = f"transfer: {exc}"
            self._drop(job, StoreState.FAILED, now)
            return
        job.state = StoreState.COPYING

    def cancel(self, job: StoreJob, now: float) -> None:
        """Give a store up; a copy that runs is waited for (``is_over``), then thrown away."""
        if job.state is StoreState.PLANNED:
            job.cause = "cancelled"
            self._drop(job, StoreState.CANCELLED, now)
        elif job.state is StoreState.COPYING:
            job.is_cancelled = True

    def cancel_all(self, now: float) -> None:
        """Give every store up; those that copy end with their copy."""
        for job in list(self._active.values()):
            self.cancel(job, now)

    def advance(self, now: float) -> None:
        """End the stores whose copy has ended."""
        for job in list(self._active.values()):
            ticket = job.ticket
            if job.state is not StoreState.COPYING or ticket is None or not ticket.is_over:
                continue
            if ticket.error is not None:
                job.cause = f"transfer: {ticket.error}"
                self._drop(job, StoreState.FAILED, now)
            elif job.is_cancelled:
                job.cause = "cancelled"
                self._drop(job, StoreState.CANCELLED, now)
            else:
                self._arrived(job, now)

    # ---- into the first tier -------------------------------------------------------------------

    def _missing(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Positions of the keys that a store has to copy from the device."""
        if self._kept_in is not None:
            self._renew(self._kept_in, keys)
            return self._index.missing(self._kept_in.number, keys)
        takers = [link for link in self._links if link.takes_stores and link is not self._host_link]
        return [
            i
            for i, key in enumerate(keys)
            if key not in self._copying and not all(self._has(link, key) for link in takers)
        ]

    def _drop_known_tail(self, plan: StorePlan) -> None:
        """Tiers that keep no tails never have one, and are no reason to copy it again."""
        if self._kept_in is not None or not plan.keys or plan.counts[-1] == self._layout.block_tokens:
            return
        takers = [link for link in self._links if link.takes_stores and link is not self._host_link]
        if all(self._has(link, plan.keys[-1]) for link in takers if link.keeps_tails):
            plan.cut(len(plan.keys) - 1)

    def _has(self, link: Link, key: BlockKey) -> bool:
        if link.is_indexed:
            self._renew(link, [key])
            return self._index.has(link.number, key)
        return key in link.storing or bool(link.known.get(key, self._now))

    def _renew(self, link: Link, keys: Sequence[BlockKey]) -> None:
        """What is stored again is new again: the bytes under a key are always the same."""
        if link.config.ttl_s:
            self._index.renew(link.number, keys, self._now - link.config.ttl_s, self._now)

    _now = 0.0

    def tick(self, now: float) -> None:
        """Remember the time, by which answers of shared tiers age."""
        self._now = now

    def _limit(self, plan: StorePlan) -> None:
        """Cut a plan so that no more than ``max_store_tokens`` are under way."""
        room = self._max_tokens - self._tokens_under_way
        if plan.num_tokens <= room:
            return
        fits = 0
        while room >= plan.counts[fits]:
            room -= plan.counts[fits]
            fits += 1
        self._metrics.count("store_dropped_blocks", len(plan.keys) - fits, cause="too_many_under_way")
        plan.cut(fits)

    def _reserve(self, plan: StorePlan) -> list[int]:
        """Host slots; the sequence's own beginning is pinned while others make room."""
        host, before = self._host_link, plan.parents[0]
        if host is None or not self._index.has(host.number, before):
            return self._capacity.take_host_slots(host, len(plan.keys))
        self._index.pin(host.number, before)
        try:
            return self._capacity.take_host_slots(host, len(plan.keys))
        finally:
            self._index.unpin(host.number, before)

    def _arrived(self, job: StoreJob, now: float) -> None:
        host, plan, slots = self._kept_in, job.plan, job.slots
        if len(self._links) > 1 or host is None:  # a header is written only for what leaves host memory
            for slot in slots:
                envelope.blank(self._host.pool.view(slot))
        if host is not None:
            sizes = [self._layout.value_bytes(count) for count in plan.counts]
            self._host.publish(plan.keys, slots, sizes)
            self._index.publish(host.number, plan.keys)
        self._end(job, StoreState.DONE, now)
        if host is not None:
            num_bytes = job.num_tokens * self._layout.token_bytes
            self._metrics.count("tier_bytes", num_bytes, tier=host.name, operation="store")
            self._observers.stored(host.name, plan.keys, num_bytes)
            self._drop_superseded(host, plan.keys, now)
        if len(self._links) > 1 or host is None:
            columns = zip(plan.keys, plan.parents, plan.tokens, plan.counts, slots, strict=True)
            self._pass_down([_Passing(*column, is_pinned=host is not None) for column in columns], now)
        if host is None:
            for slot in slots:
                self._host.drop(slot)

    def _drop_superseded(self, link: Link, keys: Sequence[BlockKey], now: float) -> None:
        """A longer block repeats what partly filled siblings hold: they only take room."""
        gone = list(
            dict.fromkeys(other for key in keys for other in self._index.superseded(link.number, key))
        )
        for key in gone:
            self._index.remove(link.number, key)
        if not gone:
            return
        if link.direct is not None and link is self._host_link:
            link.direct.evict(gone)
        else:
            link.evict(gone, now)

    def _drop(self, job: StoreJob, state: StoreState, now: float) -> None:
        host = self._kept_in
        for key, slot in zip(job.plan.keys, job.slots, strict=True):
            if host is not None:
                self._index.remove(host.number, key)
            self._host.drop(slot)
        if state is StoreState.FAILED:
            self._metrics.count("store_failures", tier="device", cause="transfer")
        self._end(job, state, now)

    def _end(self, job: StoreJob, state: StoreState, now: float) -> None:
        job.state = state
        job.slots = []
        self._copying.difference_update(job.plan.keys)
        del self._active[job.number]
        self._tokens_under_way -= job.num_tokens
        is_ok = state is StoreState.DONE
        self._on_end(
            Receipt(
                kind="store",
                label=job.label,
                status="ok" if is_ok else state.value,
                num_tokens=job.num_tokens if is_ok else 0,
                num_blocks=len(job.plan.keys) if is_ok else 0,
                num_bytes=job.num_tokens * self._layout.token_bytes if is_ok else 0,
                copy_s=job.ticket.seconds if job.ticket is not None else 0.0,
                total_s=now - job.begun,
                cause=job.cause,
            )
        )

    # ---- into the tiers below ------------------------------------------------------------------

    def cascade_promoted(self, keys: Sequence[BlockKey], source: int) -> None:
        """Blocks came up from tier ``source`` into the first one: the tiers between get them too."""
        self._pass_down(self._passing_of(keys), self._now, last=source)

    def _pass_down(self, passing: Sequence[_Passing], now: float, last: int | None = None) -> None:
        for link in self._links[:last]:
            takes = link.takes_stores if last is None else link.takes_promotions
            if link is self._host_link or not takes:
                continue
            wanted = [
                block
                for block in passing
                if not self._has(link, block.key)
                and (link.keeps_tails or block.num_tokens == self._layout.block_tokens)
            ]
            if wanted:
                self._store_into(link, wanted, now)

    def _store_into(
        self,
        link: Link,
        blocks: list[_Passing],
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

    def _make_room(self, link: Link, blocks: list[_Passing]) -> list[BlockKey]:
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

    def _put_off(self, link: Link, blocks: Sequence[_Passing]) -> None:
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
            ready = [block for block in ready if not self._has(link, block.key)]
            if ready:
                self._store_into(link, ready, now)

    def _fits(self, link: Link) -> int:
        """Blocks that may still be put on their way into a tier."""
        return max(0, self._backlog_limit - link.backlog_bytes) // self._layout.slot_bytes

    def _passing_of(self, keys: Sequence[BlockKey]) -> list[_Passing]:
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
                passing.append(_Passing(key, node.parent, node.tokens, node.num_tokens, slot, is_pinned=True))
        return passing

    def _submit(
        self,
        link: Link,
        blocks: list[_Passing],
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
                owner=_Cascade(link, blocks, num_bytes, is_second_try),
            )
        )

    def stored(self, end: Completed, cascade: _Cascade, now: float) -> None:
        """A store call has ended."""
        link = cascade.link
        link.backlog_bytes -= cascade.num_bytes
        link.storing.difference_update(block.key for block in cascade.blocks)
        if end.is_late:
            link.wrapped.breaker.report(end.outcomes[0].status, end.outcomes[0].reason)
        good: list[BlockKey] = []
        again: list[_Passing] = []
        for block, outcome in zip(cascade.blocks, end.outcomes, strict=True):
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
            if outcome.status is Status.NO_SPACE and not cascade.is_second_try:
                again.append(block)
                continue
            if link.is_indexed and outcome.status in _MAYBE_STORED:
                link.strays[block.key] = None
            self._metrics.count("store_failures", tier=link.name, cause=outcome.status.value)
            if not end.is_adrift:
                self._release(block)
        if good and link.is_indexed:
            self._drop_superseded(link, good, now)
        if good:
            self._observers.stored(link.name, good, len(good) * self._layout.slot_bytes)
        if again:
            self._second_try(link, again, now)
        self._feed(link, now)

    def _second_try(self, link: Link, blocks: list[_Passing], now: float) -> None:
        """The tier had less room than it said: make some, and try once more."""
        gone = self._capacity.evict(link, 2 * len(blocks)) if link.is_indexed else []
        if gone:
            self._store_into(link, list(blocks), now, evicted=gone, is_second_try=True)
        else:
            self._metrics.count("store_failures", len(blocks), tier=link.name, cause=Status.NO_SPACE.value)
        for block in blocks:
            self._release(block)

    def returned(self, cascade: _Cascade, now: float) -> None:
        """The worker of a store call that was given up has come back: its slots are free."""
        link = cascade.link
        for block in cascade.blocks:
            self._release(block)
        # Whether the values appeared there in the end is not known: what the index does not know of
        # must not take room.
        if link.is_indexed:
            link.evict([b.key for b in cascade.blocks if not self._index.has(link.number, b.key)], now)

    def _hold(self, block: _Passing) -> None:
        if block.is_pinned and self._host_link is not None:
            self._index.pin(self._host_link.number, block.key)
        else:
            self._host.use(block.slot)

    def _release(self, block: _Passing) -> None:
        if block.is_pinned and self._host_link is not None:
            self._index.unpin(self._host_link.number, block.key)
        else:
            self._host.drop(block.slot)

    def _write_back(self, node: Node, slot: int) -> bool:
        """A block leaves the first tier: tiers with ``write: back`` get it now."""
        block = _Passing(node.key, node.parent, node.tokens, node.num_tokens, slot, is_pinned=False)
        taken = False
        for link in self._links:
            if (
                link.config.write is WritePolicy.BACK
                and link.is_up
                and link.workers.can_store
                and not self._has(link, node.key)
                and (link.keeps_tails or node.num_tokens == self._layout.block_tokens)
            ):
                self._store_into(link, [block], self._now)
                taken = True
        if taken:
            self._host.drop(slot)
        return taken


Cascade = _Cascade
"""For the chain, which finds a finished call's owner by its type."""
