"""Loads: blocks from wherever they are, through host slots, to the device.  All of a load or nothing.

A *fill* brings one block from a lower tier into one host slot; several loads may wait for the same
fill.  A load is STAGING until all its fills have ended, STAGED until the engine has bound device
slots to it, COPYING, and then over, exactly once.  A load that is given up lets go of what it holds
at once, except for slots that a copy or a late worker may still touch.

Threads: the chain's thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .buffers import Slot
from .capacity import Capacity
from .drivers import Observers
from .errors import TransferError
from .executor import Call, Verb
from .host import HostSlots
from .index import BlockIndex, Hit
from .keys import BlockChain, BlockKey
from .layout import BlockLayout
from .links import Link
from .metrics import Metrics
from .models import WritePolicy
from .plan import LoadBlock, plan_load
from .receipts import Receipt
from .tier import BufferState, Outcome, Status
from .transfer import BlockSpan, CopyJob, Fence, Ticket, Transfer


class LoadState(str, Enum):
    """Where a load stands; the last three are terminal."""

    STAGING = "staging"
    STAGED = "staged"
    COPYING = "copying"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_OVER = frozenset({LoadState.DONE, LoadState.FAILED, LoadState.CANCELLED})
_numbers = itertools.count(1)


@dataclass(eq=False)
class LoadJob:
    """One load.

    Attributes:
        label: The request, for people.
        start: First token that it brings.
        blocks: What it brings, in order.
        deadline: When it is given up, on the chain's clock.
        is_prefetch: Ends when its blocks lie in host slots.
        state: Where it stands.
        cause: Why it failed; empty otherwise.
        ticket: The copy to the device, once there is one.
        number: Unique in the process.
    """

    label: str
    start: int
    blocks: list[LoadBlock]
    begun: float
    deadline: float
    is_prefetch: bool = False
    state: LoadState = LoadState.STAGING
    cause: str = ""
    ticket: Ticket | None = None
    slots: list[Slot | None] = field(default_factory=list)
    is_pinned: list[bool] = field(default_factory=list)
    num_waiting: int = 0
    bound: tuple[Any, Fence] | None = None
    staged: float = 0.0
    given_up: LoadState | None = None
    number: int = field(default_factory=_numbers.__next__)

    @property
    def num_tokens(self) -> int:
        """Tokens that it brings."""
        return sum(block.last - block.first for block in self.blocks)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, so that nothing of it touches any slot."""
        return self.state in _OVER


@dataclass(eq=False)
class _Fill:
    """One block on its way from a lower tier into a host slot."""

    block: LoadBlock
    link: Link
    slot: Slot
    is_promoted: bool
    jobs: list[tuple[LoadJob, int]] = field(default_factory=list)


@dataclass(eq=False)
class _FillBatch:
    """What a load call's end is looked up by."""

    link: Link
    fills: list[_Fill]


class Loads:
    """All loads of a chain."""

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
        self._on_end = on_end
        self._host_link = links[0] if host.direct is not None else None
        self._fills: dict[BlockKey, _Fill] = {}
        self._active: dict[int, LoadJob] = {}
        self.cascade: Callable[[Sequence[BlockKey], int], None] = lambda _keys, _source: None

    @property
    def num_active(self) -> int:
        """Loads that are not over, and fills that go on without one."""
        return len(self._active) + len(self._fills)

    def begin(
        self,
        chain: BlockChain,
        start: int,
        hits: Sequence[Hit],
        *,
        label: str,
        now: float,
        deadline: float,
        is_prefetch: bool = False,
    ) -> LoadJob | None:
        """Pin what was hit, and start to bring it into host slots.

        Returns:
            The load, whose ``num_tokens`` may be less than was hit where host slots are short; None
            where nothing can be brought.
        """
        blocks = plan_load(chain, hits, start)
        for block in blocks:
            self._pin_source(block)
        blocks, slots = self._reserve(blocks)
        if not blocks:
            return None
        job = LoadJob(label, start, blocks, begun=now, deadline=deadline, is_prefetch=is_prefetch)
        job.slots = [None] * len(blocks)
        job.is_pinned = [False] * len(blocks)
        fills: list[_Fill] = []
        for position, block in enumerate(blocks):
            self._attach(job, position, block, slots, fills, now)
        self._touch(blocks, now)
        self._submit(fills, now)
        self._active[job.number] = job
        if not job.num_waiting:
            self._staged(job, now)
        return job

    def bind(self, job: LoadJob, device_slots: Any, fence: Fence, now: float) -> None:
        """Say where the tokens go: one device slot each.  The copy starts once all is staged."""
        job.bound = (device_slots, fence)
        if job.state is LoadState.STAGED:
            self._copy(job, now)

    def cancel(self, job: LoadJob, now: float) -> None:
        """Give a load up.  Until ``is_over`` its device slots must not be used for anything else."""
        self._give_up(job, LoadState.CANCELLED, "cancelled", now)

    def advance(self, now: float) -> None:
        """End what has ended; give up what is late."""
        for job in list(self._active.values()):
            if job.state is LoadState.COPYING and job.ticket is not None and job.ticket.is_over:
                self._copied(job, job.ticket, now)
            elif job.deadline <= now and job.given_up is None:
                self._metrics.count("load_deadlines")
                self._give_up(job, LoadState.FAILED, Status.TIMEOUT.value, now)

    # ---- staging -------------------------------------------------------------------------------

    def _is_host(self, tier: int) -> bool:
        return self._host_link is not None and tier == self._host_link.number

    def _pin_source(self, block: LoadBlock) -> None:
        if self._links[block.tier].is_indexed and not self._joins(block):
            self._index.pin(block.tier, block.key)

    def _unpin_source(self, block: LoadBlock) -> None:
        if self._links[block.tier].is_indexed:
            self._index.unpin(block.tier, block.key)

    def _joins(self, block: LoadBlock) -> bool:
        return block.key in self._fills and not self._is_host(block.tier)

    def _reserve(self, blocks: list[LoadBlock]) -> tuple[list[LoadBlock], list[Slot]]:
        """Host slots for what is to be filled; the plan is cut where there are no more."""
        to_fill = [
            i
            for i, block in enumerate(blocks)
            if not self._is_host(block.tier) and block.key not in self._fills
        ]
        slots = self._capacity.take_host_slots(self._host_link, len(to_fill)) if to_fill else []
        if len(slots) < len(to_fill):
            cut = to_fill[len(slots)]
            for block in blocks[cut:]:
                if not self._joins(block):
                    self._unpin_source(block)
            self._metrics.count("load_shortened", len(blocks) - cut, cause="no_host_slots")
            blocks = blocks[:cut]
        return blocks, slots

    def _attach(
        self,
        job: LoadJob,
        position: int,
        block: LoadBlock,
        slots: list[Slot],
        fills: list[_Fill],
        now: float,
    ) -> None:
        direct = self._host.direct
        if direct is not None and self._is_host(block.tier):
            job.slots[position] = direct.borrow(block.key)
            job.is_pinned[position] = True
            return
        fill = self._fills.get(block.key)
        if fill is None:
            fill = self._new_fill(block, slots.pop(0), now)
            fills.append(fill)
        fill.jobs.append((job, position))
        job.num_waiting += 1

    def _new_fill(self, block: LoadBlock, slot: Slot, now: float) -> _Fill:
        link = self._links[block.tier]
        is_promoted = self._is_promoted(link, block.key)
        if is_promoted and self._host_link is not None:
            node = self._index.node(block.key)
            tokens = node.tokens if node is not None else block.tokens
            self._index.add(
                self._host_link.number,
                block.key,
                block.parent,
                tokens,
                num_bytes=self._layout.value_bytes(block.stored_tokens),
                now=now,
            )
        fill = self._fills[block.key] = _Fill(block, link, slot, is_promoted)
        return fill

    def _is_promoted(self, link: Link, key: BlockKey) -> bool:
        host = self._host_link
        if host is None or host.config.read_only or host.config.write is WritePolicy.NEVER:
            return False
        if self._index.place(host.number, key) is not None:
            return False
        wish = link.config.promote
        if isinstance(wish, str):
            return wish == "always"
        place = self._index.place(link.number, key)
        return place is None or place.hits + 1 >= wish

    def _touch(self, blocks: Sequence[LoadBlock], now: float) -> None:
        for tier in {block.tier for block in blocks}:
            keys = [block.key for block in blocks if block.tier == tier]
            self._index.touch(tier, keys, now, is_hit=True)

    def _submit(self, fills: list[_Fill], now: float) -> None:
        for link in self._links:
            mine = [fill for fill in fills if fill.link is link]
            for batch in link.batches(len(mine), link.workers.load_threads):
                part = [mine[i] for i in batch]
                link.workers.submit(
                    Call(
                        Verb.LOAD,
                        [fill.block.key for fill in part],
                        [fill.slot.view for fill in part],
                        deadline=now + link.config.load_deadline_s,
                        owner=_FillBatch(link, part),
                    )
                )

    def filled(self, call: Call, batch: _FillBatch, outcomes: Sequence[Outcome], now: float) -> None:
        """A load call has ended."""
        good: list[BlockKey] = []
        num_bytes = 0
        for fill, outcome in zip(batch.fills, outcomes, strict=True):
            del self._fills[fill.block.key]
            self._unpin_source(fill.block)
            if outcome.is_ok:
                num_bytes += outcome.num_bytes
                good.append(fill.block.key)
                self._fill_succeeded(fill, outcome, now)
            else:
                self._fill_failed(fill, outcome, now)
        if good:
            batch.link.speed.observe(num_bytes, call.seconds)
            self._observers.loaded(batch.link.name, good, num_bytes)
            promoted = [f.block.key for f in batch.fills if f.is_promoted and f.block.key in good]
            self.cascade(promoted, batch.link.number)

    def returned(self, batch: _FillBatch) -> None:
        """The worker of a load call that was given up has come back."""
        for fill in batch.fills:
            self._host.end_quarantine(fill.slot)

    def _fill_succeeded(self, fill: _Fill, outcome: Outcome, now: float) -> None:
        key, slot = fill.block.key, fill.slot
        host = self._host_link
        if fill.is_promoted and host is not None:
            self._host.publish(key, slot, outcome.num_bytes)
            self._index.publish(host.number, key)
        for job, position in fill.jobs:
            job.slots[position] = slot
            job.is_pinned[position] = fill.is_promoted
            if fill.is_promoted and host is not None:
                self._index.pin(host.number, key)
            else:
                self._host.use(slot)
            job.num_waiting -= 1
            if not job.num_waiting and job.state is LoadState.STAGING:
                self._staged(job, now)
        if not fill.is_promoted:
            self._host.drop(slot)

    def _fill_failed(self, fill: _Fill, outcome: Outcome, now: float) -> None:
        link, key = fill.link, fill.block.key
        if fill.is_promoted and self._host_link is not None:
            self._index.remove(self._host_link.number, key)
        if outcome.buffer is BufferState.UNCERTAIN:
            self._host.quarantine(fill.slot)
            link.wrapped.breaker.report(outcome.status, outcome.reason)
        else:
            self._host.drop(fill.slot)
        self._metrics.count("load_failures", tier=link.name, cause=outcome.status.value)
        if outcome.status in (Status.MISS, Status.CORRUPT):
            self._forget(link, key, is_damaged=outcome.status is Status.CORRUPT, now=now)
        for job, _ in fill.jobs:
            self._give_up(job, LoadState.FAILED, f"{link.name}:{outcome.status.value}", now)

    def _forget(self, link: Link, key: BlockKey, *, is_damaged: bool, now: float) -> None:
        """A tier that promised a block does not have it: do not promise it again."""
        if not link.is_indexed:
            link.known.note(key, now, is_there=False)
        else:
            place = self._index.place(link.number, key)
            if place is not None and not place.pins:
                self._index.remove(link.number, key)
        if is_damaged and not link.config.read_only:
            link.workers.submit(Call(Verb.EVICT, [key], deadline=now + link.config.store_deadline_s))

    # ---- copying -------------------------------------------------------------------------------

    def _staged(self, job: LoadJob, now: float) -> None:
        job.state = LoadState.STAGED
        job.staged = now
        if job.is_prefetch:
            self._end(job, LoadState.DONE, now)
        elif job.bound is not None:
            self._copy(job, now)

    def _copy(self, job: LoadJob, now: float) -> None:
        if job.bound is None:
            raise AssertionError("a load is copied only once it is bound")
        device_slots, fence = job.bound
        spans = [
            BlockSpan(slot, block.stored_tokens, block.first, block.last)
            for slot, block in zip(job.slots, job.blocks, strict=True)
            if slot is not None
        ]
        try:
            job.ticket = self._transfer.load(CopyJob(job.number, spans, device_slots, fence))
        except TransferError as exc:
            self._metrics.count("load_failures", tier="device", cause="transfer")
            self._give_up(job, LoadState.FAILED, f"transfer: {exc}", now)
            return
        job.state = LoadState.COPYING

    def _copied(self, job: LoadJob, ticket: Ticket, now: float) -> None:
        if ticket.error is not None:
            self._metrics.count("load_failures", tier="device", cause="transfer")
            job.cause = job.cause or f"transfer: {ticket.error}"
            self._end(job, LoadState.FAILED, now)
        else:
            self._end(job, job.given_up or LoadState.DONE, now)

    def _give_up(self, job: LoadJob, state: LoadState, cause: str, now: float) -> None:
        if job.is_over or job.given_up is not None:
            return
        job.cause = cause
        if job.state is LoadState.COPYING:
            job.given_up = state  # the copy is never aborted; what it touches is let go when it is over
            return
        for block in job.blocks:
            fill = self._fills.get(block.key)
            if fill is not None:
                fill.jobs = [entry for entry in fill.jobs if entry[0] is not job]
        self._end(job, state, now)

    def _end(self, job: LoadJob, state: LoadState, now: float) -> None:
        job.state = state
        self._active.pop(job.number, None)
        for position, slot in enumerate(job.slots):
            if slot is None:
                continue
            if job.is_pinned[position] and self._host_link is not None:
                self._index.unpin(self._host_link.number, job.blocks[position].key)
            else:
                self._host.drop(slot)
        job.slots = []
        self._on_end(self._receipt(job, now))

    def _receipt(self, job: LoadJob, now: float) -> Receipt:
        by_tier: dict[str, int] = {}
        for block in job.blocks:
            name = self._links[block.tier].name
            by_tier[name] = by_tier.get(name, 0) + block.last - block.first
        is_ok = job.state is LoadState.DONE
        return Receipt(
            kind="prefetch" if job.is_prefetch else "load",
            label=job.label,
            status="ok" if is_ok else job.state.value,
            num_tokens=job.num_tokens if is_ok else 0,
            num_blocks=len(job.blocks) if is_ok else 0,
            num_bytes=job.num_tokens * self._layout.token_bytes if is_ok else 0,
            tokens_by_tier=by_tier,
            staging_s=max(0.0, (job.staged or now) - job.begun),
            copy_s=job.ticket.seconds if job.ticket is not None else 0.0,
            total_s=now - job.begun,
            cause=job.cause,
        )


FillBatch = _FillBatch
"""For the chain, which finds a finished call's owner by its type."""
