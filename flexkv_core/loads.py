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

from .errors import TransferError
from .executor import Call, Completed, Verb
from .keys import BlockChain, BlockKey
from .links import Link
from .match import Match
from .models import WritePolicy
from .parts import ChainParts
from .plan import LoadPlan, plan_load
from .receipts import Receipt
from .tier import Outcome, Status
from .transfer import CopyJob, Fence, HostSpans, Ticket


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
        plan: What it brings, in order.
        deadline: When it is given up, on the chain's clock.
        is_prefetch: Ends when its blocks lie in host slots.
        state: Where it stands.
        cause: Why it failed; empty otherwise.
        ticket: The copy to the device, once there is one.
        number: Unique in the process.
        slots: Host slot of each block; -1 while it is not there.
        pinned: Blocks of the first tier that it pins; each protects all before it.
        lent: Unpublished slots that it uses.
    """

    label: str
    start: int
    plan: LoadPlan
    begun: float
    deadline: float
    is_prefetch: bool = False
    state: LoadState = LoadState.STAGING
    cause: str = ""
    ticket: Ticket | None = None
    slots: list[int] = field(default_factory=list)
    pinned: list[BlockKey] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)
    num_waiting: int = 0
    bound: tuple[Any, Fence] | None = None
    staged: float = 0.0
    given_up: LoadState | None = None
    number: int = field(default_factory=_numbers.__next__)

    @property
    def num_tokens(self) -> int:
        """Tokens that it brings."""
        return self.plan.num_tokens

    @property
    def is_over(self) -> bool:
        """Whether it has ended, so that nothing of it touches any slot."""
        return self.state in _OVER


@dataclass(eq=False)
class _Fill:
    """One block on its way from a lower tier into a host slot."""

    key: BlockKey
    link: Link
    slot: int
    is_promoted: bool
    jobs: list[tuple[LoadJob, int]] = field(default_factory=list)


@dataclass(eq=False)
class FillBatch:
    """What a load call's end is looked up by."""

    link: Link
    fills: list[_Fill]


class Loads:
    """All loads of a chain."""

    def __init__(self, parts: ChainParts) -> None:
        """No loads yet; work on the chain's ``parts``."""
        self._layout = parts.layout
        self._links = parts.links
        self._index = parts.index
        self._host = parts.host
        self._capacity = parts.capacity
        self._transfer = parts.transfer
        self._metrics = parts.metrics
        self._observers = parts.observers
        self._on_end = parts.on_end
        self._host_link = parts.host_link
        self._fills: dict[BlockKey, _Fill] = {}
        self._active: dict[int, LoadJob] = {}
        self.on_promoted: Callable[[Sequence[BlockKey], int], None] = lambda _keys, _source: None
        """Told of blocks that came up into the first tier, and from which one."""

    @property
    def num_active(self) -> int:
        """Loads that are not over, and fills that go on without one."""
        return len(self._active) + len(self._fills)

    def begin(
        self,
        chain: BlockChain,
        start: int,
        match: Match,
        *,
        label: str,
        now: float,
        deadline: float,
        is_prefetch: bool = False,
    ) -> LoadJob | None:
        """Pin what was matched, and start to bring it into host slots.

        Returns:
            The load, whose ``num_tokens`` may be less than was matched where host slots are short; None
            where nothing can be brought.
        """
        plan = plan_load(chain, match, start)
        self._cut_vanished(plan)
        job = LoadJob(label, start, plan, begun=now, deadline=deadline, is_prefetch=is_prefetch)
        self._take_host_blocks(job)
        to_fill = [i for i, slot in enumerate(job.slots) if slot < 0]
        if to_fill:
            to_fill = self._prepare_fills(job, chain, to_fill, now)
        if not plan.keys:
            self._let_go(job)
            return None
        for tier in set(plan.tiers):
            self._index.touch(
                tier, (key for key, at in zip(plan.keys, plan.tiers, strict=True) if at == tier), now
            )
        self._active[job.number] = job
        job.num_waiting = len(to_fill)
        if not to_fill:
            self._staged(job, now)
        return job

    def bind(self, job: LoadJob, device_slots: Any, fence: Fence, now: float) -> None:
        """Say where the tokens go: one device slot each.  The copy starts once all is staged."""
        if job.is_over:
            return
        job.bound = (device_slots, fence)
        if job.state is LoadState.STAGED:
            self._copy(job, now)

    def cancel(self, job: LoadJob, now: float) -> None:
        """Give a load up.  Until ``is_over`` its device slots must not be used for anything else."""
        self._give_up(job, LoadState.CANCELLED, "cancelled", now)

    def cancel_all(self, now: float) -> None:
        """Give every load up; those that copy end with their copy."""
        for job in list(self._active.values()):
            self.cancel(job, now)

    def advance(self, now: float) -> None:
        """End what has ended; give up what is late."""
        for job in list(self._active.values()):
            if job.state is LoadState.COPYING and job.ticket is not None and job.ticket.is_over:
                self._copied(job, job.ticket, now)
            elif job.deadline <= now and job.given_up is None:
                self._metrics.count("load_deadlines")
                self._give_up(job, LoadState.FAILED, Status.TIMEOUT.value, now)

    # ---- staging -------------------------------------------------------------------------------

    def _cut_vanished(self, plan: LoadPlan) -> None:
        """What was matched may have left since: bring what stands before the first gap."""
        for tier in set(plan.tiers):
            if not self._links[tier].is_indexed:
                continue
            unready = self._index.unready(tier, plan.keys)
            gap = next((i for i in unready if plan.tiers[i] == tier), None)
            if gap is not None:
                self._metrics.count("load_shortened", len(plan.keys) - gap, cause="vanished")
                plan.cut(gap)

    def _take_host_blocks(self, job: LoadJob) -> None:
        """Blocks that lie in the first tier: their slots, and one pin at the end of each run."""
        plan, host, direct = job.plan, self._host_link, self._host.direct
        if host is None or direct is None:
            job.slots = [-1] * len(plan.keys)
            return
        here = [tier == host.number for tier in plan.tiers]
        job.slots = direct.borrow(plan.keys) if all(here) else [-1] * len(plan.keys)
        for i, is_here in enumerate(here):
            if not is_here:
                continue
            if job.slots[i] < 0:
                job.slots[i] = direct.borrow([plan.keys[i]])[0]
            if i + 1 == len(here) or not here[i + 1]:  # the last of a run protects those before it
                self._index.pin(host.number, plan.keys[i])
                job.pinned.append(plan.keys[i])

    def _prepare_fills(self, job: LoadJob, chain: BlockChain, to_fill: list[int], now: float) -> list[int]:
        """Host slots for what lies below; the plan is cut where there are no more.

        Sources are pinned first, so that making room cannot take them.
        """
        plan = job.plan
        new = [i for i in to_fill if plan.keys[i] not in self._fills]
        for i in new:
            self._pin_source(plan.tiers[i], plan.keys[i])
        slots = self._capacity.take_host_slots(self._host_link, len(new))
        if len(slots) < len(new):
            cut = new[len(slots)]
            for i in new[len(slots) :]:
                self._unpin_source(plan.tiers[i], plan.keys[i])
            self._metrics.count("load_shortened", len(plan.keys) - cut, cause="no_host_slots")
            plan.cut(cut)
            del job.slots[cut:]
            new, to_fill = new[: len(slots)], [i for i in to_fill if i < cut]
        fresh = [self._new_fill(plan, i, chain, slot, now) for i, slot in zip(new, slots, strict=True)]
        for i in to_fill:
            self._fills[plan.keys[i]].jobs.append((job, i))
        self._submit(fresh, now)
        return to_fill

    def _pin_source(self, tier: int, key: BlockKey) -> None:
        if self._links[tier].is_indexed:
            self._index.pin(tier, key)

    def _unpin_source(self, tier: int, key: BlockKey) -> None:
        if self._links[tier].is_indexed:
            self._index.unpin(tier, key)

    def _new_fill(self, plan: LoadPlan, i: int, chain: BlockChain, slot: int, now: float) -> _Fill:
        key, link = plan.keys[i], self._links[plan.tiers[i]]
        host = self._host_link
        is_promoted = self._is_promoted(link, key)
        if is_promoted and host is not None:
            node = self._index.node(key)
            # A block of a shared tier is in no index, but it is whole, so the prompt has its tokens.
            number = plan.block + i
            parent = node.parent if node is not None else chain.parent(number)
            tokens = node.tokens if node is not None else chain.block(number)
            size = self._layout.value_bytes(plan.stored_tokens[i])
            self._index.add(host.number, key, parent, tokens, num_bytes=size, now=now)
        fill = self._fills[key] = _Fill(key, link, slot, is_promoted)
        return fill

    def _is_promoted(self, link: Link, key: BlockKey) -> bool:
        host = self._host_link
        if host is None or host.config.read_only or host.config.write is WritePolicy.NEVER:
            return False
        if self._index.has(host.number, key):
            return False
        wish = link.config.promote
        if isinstance(wish, str):
            return wish == "always"
        place = self._index.place(link.number, key)
        return place is None or place.hits + 1 >= wish

    def _submit(self, fills: list[_Fill], now: float) -> None:
        view = self._host.pool.view
        for link in self._links:
            mine = [fill for fill in fills if fill.link is link]
            for batch in link.batches(len(mine), link.workers.load_threads):
                part = [mine[i] for i in batch]
                link.workers.submit(
                    Call(
                        Verb.LOAD,
                        [fill.key for fill in part],
                        [view(fill.slot)[: self._layout.slot_bytes] for fill in part],
                        deadline=now + link.config.load_deadline_s,
                        owner=FillBatch(link, part),
                    )
                )

    def filled(self, end: Completed, batch: FillBatch, now: float) -> None:
        """A load call has ended."""
        if end.is_late:
            batch.link.wrapped.breaker.report(end.outcomes[0].status, end.outcomes[0].reason)
        good: list[_Fill] = []
        num_bytes = 0
        for fill, outcome in zip(batch.fills, end.outcomes, strict=True):
            del self._fills[fill.key]
            self._unpin_source(fill.link.number, fill.key)
            if outcome.is_ok:
                num_bytes += outcome.num_bytes
                good.append(fill)
                self._fill_succeeded(fill, outcome, now)
            else:
                self._fill_failed(fill, outcome, now, is_adrift=end.is_adrift)
        if good:
            batch.link.speed.observe(num_bytes, end.call.seconds)
            self._observers.loaded(batch.link.name, [fill.key for fill in good], num_bytes)
            self.on_promoted([fill.key for fill in good if fill.is_promoted], batch.link.number)

    def returned(self, batch: FillBatch) -> None:
        """The worker of a load call that was given up has come back."""
        for fill in batch.fills:
            self._host.end_quarantine(fill.slot)

    def _fill_succeeded(self, fill: _Fill, outcome: Outcome, now: float) -> None:
        key, slot, host = fill.key, fill.slot, self._host_link
        if fill.is_promoted and host is not None:
            self._host.publish([key], [slot], [outcome.num_bytes])
            self._index.publish(host.number, [key])
        for job, position in fill.jobs:
            job.slots[position] = slot
            if fill.is_promoted and host is not None:
                self._index.pin(host.number, key)
                job.pinned.append(key)
            else:
                self._host.use(slot)
                job.lent.append(slot)
            job.num_waiting -= 1
            if not job.num_waiting and job.state is LoadState.STAGING:
                self._staged(job, now)
        if not fill.is_promoted:
            self._host.drop(slot)

    def _fill_failed(self, fill: _Fill, outcome: Outcome, now: float, *, is_adrift: bool) -> None:
        link = fill.link
        if fill.is_promoted and self._host_link is not None:
            self._index.remove(self._host_link.number, fill.key)
        if is_adrift:
            self._host.quarantine(fill.slot)
        else:
            self._host.drop(fill.slot)
        self._metrics.count("load_failures", tier=link.name, cause=outcome.status.value)
        if outcome.status in (Status.MISS, Status.CORRUPT):
            self._forget(link, fill.key, is_damaged=outcome.status is Status.CORRUPT, now=now)
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
            link.evict([key], now)

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
        plan = job.plan
        spans = HostSpans(self._host.pool, job.slots, plan.stored_tokens, plan.first, plan.last)
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
        for key in job.plan.keys:
            fill = self._fills.get(key)
            if fill is not None:
                fill.jobs = [entry for entry in fill.jobs if entry[0] is not job]
        self._end(job, state, now)

    def _end(self, job: LoadJob, state: LoadState, now: float) -> None:
        job.state = state
        self._active.pop(job.number, None)
        self._let_go(job)
        self._on_end(self._receipt(job, now))

    def _let_go(self, job: LoadJob) -> None:
        if self._host_link is not None:
            for key in job.pinned:
                self._index.unpin(self._host_link.number, key)
        for slot in job.lent:
            self._host.drop(slot)
        job.pinned, job.lent = [], []

    def _receipt(self, job: LoadJob, now: float) -> Receipt:
        by_tier = {self._links[tier].name: count for tier, count in job.plan.tokens_by_tier().items()}
        is_ok = job.state is LoadState.DONE
        return Receipt(
            kind="prefetch" if job.is_prefetch else "load",
            label=job.label,
            status="ok" if is_ok else job.state.value,
            num_tokens=job.num_tokens if is_ok else 0,
            num_blocks=len(job.plan.keys) if is_ok else 0,
            num_bytes=job.num_tokens * self._layout.token_bytes if is_ok else 0,
            tokens_by_tier=by_tier,
            staging_s=max(0.0, (job.staged or now) - job.begun),
            copy_s=job.ticket.seconds if job.ticket is not None else 0.0,
            total_s=now - job.begun,
            cause=job.cause,
        )
