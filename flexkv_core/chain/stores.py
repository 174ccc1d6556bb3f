"""Stores: blocks from the device into host slots.

A store holds its device slots from ``begin`` until its copy has ended (the engine keeps them locked
for as long).  Then its blocks appear in the first tier, and are handed to the cascade into the tiers
below.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import TransferError
from ..index.stretch import Stretch
from ..keys import BlockChain, BlockKey
from ..models import WritePolicy
from ..transfer import CopyJob, Fence, HostSpans, begin_copy
from .cascade import Cascade
from .jobs import StoreJob, StoreState
from .links import Arrival
from .parts import ChainParts
from .passing import passing
from .plan import StorePlan, plan_store
from .receipts import Receipt


class Stores:
    """All stores of a chain."""

    def __init__(self, parts: ChainParts, cascade: Cascade, max_tokens: int) -> None:
        """No stores yet.

        Args:
            parts: What the chain consists of.
            cascade: Takes blocks on into the tiers below.
            max_tokens: Tokens that may be under way at once.
        """
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
        self._kept_in = parts.kept_in
        self._cascade = cascade
        self._max_tokens = max_tokens
        self._active: dict[int, StoreJob] = {}
        self._tokens_under_way = 0
        self._copying: set[BlockKey] = set()

    @property
    def num_active(self) -> int:
        """Stores whose copy is not over."""
        return len(self._active)

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
        if not any(link.takes(Arrival.STORED) for link in self._links):
            self._cascade.pass_over(chain.hash_to(num_tokens // chain.block_tokens))
            return None
        self._cascade.mend(chain.hash_to(num_tokens // chain.block_tokens), now)
        plan = plan_store(
            chain,
            num_tokens,
            self._missing,
            page_tokens=page_tokens,
            with_tail=with_tail and self.keeps_tails,
        )
        self._drop_known_tail(plan)
        self._limit(plan)
        if not plan.stretches:
            return None
        slots = self._reserve(plan)
        if len(slots) < plan.num_blocks:
            self._metrics.count("store_dropped_blocks", plan.num_blocks - len(slots), cause="no_host_slots")
            plan.cut(len(slots))
        if not plan.stretches:
            return None
        host = self._kept_in
        for stretch in plan.stretches:
            if host is None:
                self._copying.update(stretch.keys)
            else:
                size = self._layout.value_bytes(stretch.tokens_each)
                self._index.add(host.number, stretch, num_bytes=size, now=now)
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
            job.ticket = begin_copy(self._transfer.store, CopyJob(job.number, spans, device_slots, fence))
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
            self._cascade.renew(self._kept_in, keys)
            return self._index.missing(self._kept_in.number, keys)
        takers = [link for link in self._links if link.takes(Arrival.STORED) and link is not self._host_link]
        return [
            i
            for i, key in enumerate(keys)
            if key not in self._copying and not all(self._cascade.has(link, key) for link in takers)
        ]

    def _drop_known_tail(self, plan: StorePlan) -> None:
        """Tiers that keep no tails never have one, and are no reason to copy it again."""
        if self._kept_in is not None or not plan.stretches or not plan.stretches[-1].is_tail:
            return
        takers = [link for link in self._links if link.takes(Arrival.STORED) and link is not self._host_link]
        key = plan.stretches[-1].keys[0]
        if all(self._cascade.has(link, key) for link in takers if link.keeps_tails):
            plan.cut(plan.num_blocks - 1)

    def _limit(self, plan: StorePlan) -> None:
        """Cut a plan so that no more than ``max_store_tokens`` are under way."""
        room = self._max_tokens - self._tokens_under_way
        if plan.num_tokens <= room:
            return
        fits = 0
        for stretch in plan.stretches:
            some = min(len(stretch), max(0, room) // stretch.tokens_each)
            fits += some
            room -= some * stretch.tokens_each
            if some < len(stretch):
                break
        self._metrics.count("store_dropped_blocks", plan.num_blocks - fits, cause="too_many_under_way")
        plan.cut(fits)

    def _reserve(self, plan: StorePlan) -> list[int]:
        """Host slots; the sequence's own beginning is pinned while others make room."""
        host, before = self._host_link, plan.stretches[0].parent
        if host is None or not self._index.has(host.number, before):
            return self._capacity.take_host_slots(host, plan.num_blocks)
        self._index.pin(host.number, before)
        try:
            return self._capacity.take_host_slots(host, plan.num_blocks)
        finally:
            self._index.unpin(host.number, before)

    def _arrived(self, job: StoreJob, now: float) -> None:
        host, plan, slots = self._kept_in, job.plan, job.slots
        goes_down = len(self._links) > 1 or host is None
        if goes_down:  # a header is written only for what leaves host memory
            self._host.filled(slots)
        if host is not None:
            keys = plan.keys
            sizes = [self._layout.value_bytes(stretch.tokens_each) for stretch in plan.stretches]
            self._host.publish(keys, slots, _each(plan.stretches, sizes))
            self._index.publish(host.number, keys)
        self._end(job, StoreState.DONE, now)
        if host is not None:
            num_bytes = job.num_tokens * self._layout.token_bytes
            self._metrics.count("tier_bytes", num_bytes, tier=host.name, operation="store")
            self._observers.stored(host.name, keys, num_bytes)
            self._capacity.drop_superseded(host, keys, now)
        if goes_down:
            self._cascade.pass_down(passing(plan.stretches, slots, is_pinned=host is not None), now)
        if host is None:
            self._host.drop(slots)

    def _drop(self, job: StoreJob, state: StoreState, now: float) -> None:
        if self._kept_in is not None:
            self._index.remove(self._kept_in.number, job.plan.keys)
        self._host.drop(job.slots)
        if state is StoreState.FAILED:
            self._metrics.count("store_failures", tier="device", cause="transfer")
        self._end(job, state, now)

    def _end(self, job: StoreJob, state: StoreState, now: float) -> None:
        job.state = state
        job.slots = []
        if self._copying:
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
                num_blocks=job.plan.num_blocks if is_ok else 0,
                num_bytes=job.num_tokens * self._layout.token_bytes if is_ok else 0,
                copy_s=job.ticket.seconds if job.ticket is not None else 0.0,
                total_s=now - job.begun,
                cause=job.cause,
            )
        )


def _each(stretches: Sequence[Stretch], values: Sequence[int]) -> list[int]:
    """One value for each block, of one for each stretch."""
    column: list[int] = []
    for stretch, value in zip(stretches, values, strict=True):
        column += [value] * len(stretch)
    return column
