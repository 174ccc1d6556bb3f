"""Loads: blocks from wherever they are, through host slots, to the device.  All of a load or nothing.

A load is STAGING until all its fills have ended, STAGED until the engine has bound device slots to it,
COPYING, and then over, exactly once.  A load that is given up lets go of what it holds at once, or, if
it is being copied, when its copy has ended.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import TransferError
from ..index.match import Match
from ..index.stretch import in_a_row
from ..keys import BlockChain
from ..tier import Status
from ..transfer import CopyJob, Fence, HostSpans, Ticket, begin_copy
from .choice import Choice
from .fill_batch import FillBatch, Run, Waiter
from .fills import Fills
from .jobs import LoadJob, LoadState
from .parts import ChainParts
from .plan import LoadPlan, plan_load
from .receipts import Receipt


class Loads:
    """All loads of a chain."""

    def __init__(self, parts: ChainParts, fills: Fills) -> None:
        """No loads yet; ``fills`` tells of its ends from now on."""
        self._layout = parts.layout
        self._links = parts.links
        self._index = parts.index
        self._host = parts.host
        self._transfer = parts.transfer
        self._metrics = parts.metrics
        self._on_end = parts.on_end
        self._host_link = parts.host_link
        self._active: dict[int, LoadJob] = {}
        self._fills = fills
        fills.on_filled, fills.on_failed = self._filled, self._fill_failed

    @property
    def num_active(self) -> int:
        """Loads that are not over."""
        return len(self._active)

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
        choice: Choice | None = None,
    ) -> LoadJob | None:
        """Pin what was matched, and start to bring it into host slots.

        Returns:
            The load, whose ``num_tokens`` may be less than was matched where host slots are short; None
            where nothing can be brought.
        """
        plan = plan_load(chain, match, start)
        self._cut_vanished(plan)
        job = LoadJob(
            label, start, plan, begun=now, deadline=deadline, is_prefetch=is_prefetch, choice=choice
        )
        self._take_host_blocks(job)
        to_fill: Sequence[int] = range(len(job.slots))
        if job.pinned:
            to_fill = [i for i in to_fill if job.slots[i] < 0]
        if to_fill:
            to_fill = self._prepare_fills(job, chain, to_fill, now)
        if not plan.keys or (is_prefetch and not to_fill):
            self._let_go(job)
            return None
        for tier in set(plan.tiers):
            self._index.touch(tier, plan.keys_in(tier), now)
        self._active[job.number] = job
        job.from_below = to_fill
        job.num_waiting = len(to_fill)
        if not to_fill:
            self._staged(job, now)
        return job

    def bind(
        self, job: LoadJob, device_slots: Any, fence: Fence, now: float, *, layerwise: bool = False
    ) -> None:
        """Say where the tokens go: one device slot each.  The copy starts once all is staged."""
        if job.is_over:
            return
        job.is_layerwise = layerwise
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
            elif job.deadline <= now and job.given_up is None and not _is_in_use(job):
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
        if plan.tiers.count(host.number) == len(plan.tiers):
            runs = [(0, len(plan.keys))] if plan.keys else []
        else:
            runs = in_a_row([i for i, tier in enumerate(plan.tiers) if tier == host.number])
        job.slots = [-1] * len(plan.keys)
        if not job.is_prefetch:
            self._fills.prefetched.used(plan.keys)
        for first, last in runs:
            job.slots[first:last] = direct.borrow(plan.keys[first:last])
            self._index.pin(host.number, plan.keys[last - 1])  # the last of a run protects those before it
            job.pinned.append(plan.keys[last - 1])

    def _prepare_fills(
        self, job: LoadJob, chain: BlockChain, to_fill: Sequence[int], now: float
    ) -> Sequence[int]:
        """Have what lies below brought; the plan is cut where there are no more host slots."""
        plan = job.plan
        available = self._fills.begin(plan, to_fill, chain, now, is_prefetch=job.is_prefetch)
        if available < len(plan.keys):
            if not job.is_prefetch:
                self._metrics.count("load_shortened", len(plan.keys) - available, cause="no_host_slots")
            plan.cut(available)
            del job.slots[available:]
            to_fill = [i for i in to_fill if i < available]
        self._fills.wait_for(job, to_fill)
        return to_fill

    def _filled(self, batch: FillBatch, good: Sequence[Run], now: float) -> None:
        for waiter in batch.waiting:
            for first, last in good:
                self._take_over(waiter, batch, max(first, waiter.first), min(last, waiter.last))
        for job in dict.fromkeys(waiter.job for waiter in batch.waiting):
            if not job.num_waiting and job.state is LoadState.STAGING:
                self._staged(job, now)

    def _take_over(self, waiter: Waiter, batch: FillBatch, first: int, last: int) -> None:
        """Blocks ``first`` to ``last`` of a batch have come for a load that waits for them."""
        if first >= last:
            return
        job, at = waiter.job, waiter.position + first - waiter.first
        slots = batch.slots[first:last]
        job.slots[at : at + len(slots)] = slots
        job.num_waiting -= len(slots)
        if batch.is_promoted and self._host_link is not None:
            job.pinned += self._index.pin_ends(self._host_link.number, batch.keys[first:last])
        else:
            self._host.use(slots)
            job.lent += slots

    def _fill_failed(self, job: LoadJob, cause: str, now: float) -> None:
        self._give_up(job, LoadState.FAILED, cause, now)

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
            copy = CopyJob(job.number, spans, device_slots, fence, job.is_layerwise)
            job.ticket = begin_copy(self._transfer.load, copy)
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
        self._fills.leave(job)
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
        self._host.drop(job.lent)
        job.pinned, job.lent = [], []

    def _prefetch_receipt(self, job: LoadJob, now: float) -> Receipt:
        """What came up from below, also if the rest did not: it stays in the first tier."""
        plan, brought = job.plan, job.brought()
        by_tier: dict[str, int] = {}
        for i in brought:
            name = self._links[plan.tiers[i]].name
            by_tier[name] = by_tier.get(name, 0) + plan.last[i] - plan.first[i]
        num_tokens = sum(by_tier.values())
        return Receipt(
            kind="prefetch",
            label=job.label,
            status="ok" if job.state is LoadState.DONE else job.state.value,
            num_tokens=num_tokens,
            num_blocks=len(brought),
            num_bytes=num_tokens * self._layout.token_bytes,
            tokens_by_tier=by_tier,
            staging_s=max(0.0, (job.staged or now) - job.begun),
            total_s=now - job.begun,
            cause=job.cause,
            choice=job.choice,
        )

    def _receipt(self, job: LoadJob, now: float) -> Receipt:
        if job.is_prefetch:
            return self._prefetch_receipt(job, now)
        by_tier = {self._links[tier].name: count for tier, count in job.plan.tokens_by_tier().items()}
        is_ok = job.state is LoadState.DONE
        return Receipt(
            kind="load",
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
            choice=job.choice,
            is_layerwise=job.is_layerwise,
        )


def _is_in_use(job: LoadJob) -> bool:
    """Whether the engine reads what the copy brings while it runs: then only its end counts."""
    return job.is_layerwise and job.state is LoadState.COPYING
