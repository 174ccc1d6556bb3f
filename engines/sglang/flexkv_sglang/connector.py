"""FlexKVConnector: the facade between the radix cache and KVManager.

It knows requests by their handle and nothing of SGLang: what a request's prompt is, which load runs
for it, and which stores are under way.

Threads: the scheduler's thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flexkv_core.chain.lookup import Lookup
from flexkv_core.keys import BlockChain
from flexkv_core.manager import NO_TASK, KVManager, KVResponse, KVResponseStatus, Scope
from flexkv_core.models import EngineConfig
from flexkv_core.transfer import Ticket

from .transfer_log import places

logger = logging.getLogger(__name__)

_MOST_SEEN = 1024
"""Requests that something is kept for; the one that was asked about longest ago goes first."""


@dataclass
class _Seen:
    """What is known of one request while it waits.

    Attributes:
        num_tokens: Length of ``sequence``.
        sequence: The longest beginning that was asked about, under its scope; its keys are kept.
        has_asked: Whether shared tiers were asked what they have of it.
        asked_for_more: Whether lower and shared tiers were asked to bring it nearer.
        found: What it was last promised.
        is_told: Whether its receipt was written that computing it is sooner than loading it.
        prefetch: The prefetch that was begun for it.
        asked: When it was first asked for at admission; 0 before.
        is_spent: Whether it has waited for a load in vain: it is promised nothing more.
        have: Device prefix that ``origin`` speaks of.
        origin: Where the promised tokens were when they were first promised, by tier.
    """

    num_tokens: int
    sequence: BlockChain
    has_asked: bool = False
    asked_for_more: bool = False
    found: Lookup | None = None
    is_told: bool = False
    prefetch: int = NO_TASK
    asked: float = 0.0
    is_spent: bool = False
    have: int = -1
    origin: dict[str, int] = field(default_factory=dict)


class WaitBudget:
    """How long the scheduler may still be held up in one pass, however many requests want to wait."""

    def __init__(self, limit_s: float) -> None:
        """``limit_s`` seconds a pass."""
        self._limit_s = limit_s
        self._left_s = limit_s

    def renew(self) -> None:
        """A new pass begins."""
        self._left_s = self._limit_s

    @contextmanager
    def spending(self) -> Iterator[float]:
        """Gives the seconds that are left; what is spent inside is taken off."""
        began = time.monotonic()
        try:
            yield self._left_s
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began))


class FlexKVConnector:
    """One engine rank's cache below the device."""

    def __init__(self, manager: KVManager, engine: EngineConfig, *, first_tier: str) -> None:
        """A connector over a started manager.

        Args:
            manager: Owned from now on: ``shutdown`` closes it.
            engine: How the engine's side behaves.
            first_tier: Name of the tier that counts as host; the others count as storage.
        """
        self.manager = manager
        self._engine = engine
        self._first_tier = first_tier
        self._seen: dict[Hashable, _Seen] = {}
        self._prefetches: set[int] = set()
        self._lookup_wait = WaitBudget(engine.lookup_wait_s)
        self._load_wait = WaitBudget(engine.load_wait_s)

    # ---- prompts -------------------------------------------------------------------------------

    def lookup_kv(
        self, handle: Hashable, tokens: Callable[[], Sequence[int]], num_tokens: int, scope: Scope, have: int
    ) -> int:
        """How many tokens behind ``have`` the tiers hold.  A query: calling it again changes nothing.

        Args:
            handle: The request's attempt.
            tokens: Gives the ids, ``num_tokens`` of them; called only if the prompt is new.
            num_tokens: Length of the prompt as far as it may be matched.
            scope: What separates the request.
            have: Tokens on the device.
        """
        if not self.manager.may_share(scope):
            return 0
        seen = self._sequence_of(handle, tokens, num_tokens, scope, or_longer=True)
        if seen.is_spent:
            return 0
        found = self.manager.lookup(seen.sequence, start=have, max_tokens=num_tokens, scope=scope)
        if found.wants_probe and not seen.has_asked and not self.manager.chain.num_probes:
            seen.has_asked = True  # once a request: what it learns is known for a while
            with self._lookup_wait.spending() as left:
                is_answered = self.manager.ask_shared(seen.sequence, found, left, scope=scope)
            if is_answered:
                found = self.manager.lookup(seen.sequence, start=have, max_tokens=num_tokens, scope=scope)
        seen.found = found
        if found.match is None and found.why == "recompute" and not seen.is_told:
            seen.is_told = True
            self.manager.note_recompute(found, _label(handle))
        self._note_origin(handle, seen, found, have)
        self._bring_nearer(handle, seen, found, scope, have)
        return found.num_tokens - have

    def load_failed(self, handle: Hashable) -> None:
        """A request has waited for a load that did not come.

        It may stay in the queue, and be matched again when the tier is back: it waits no second time, so that
        no request is slower than its recompute and one deadline.
        """
        seen = self._seen.get(handle)
        if seen is not None:
            seen.is_spent = True

    def is_late(self, handle: Hashable) -> bool:
        """Whether a request was first asked for at admission a deadline ago, whatever has kept its load."""
        seen = self._seen.get(handle)
        if seen is None:
            return True
        seen.asked = seen.asked or time.monotonic()
        return time.monotonic() - seen.asked >= self._engine.load_deadline_s

    def _sequence_of(
        self,
        handle: Hashable,
        tokens: Callable[[], Sequence[int]],
        num_tokens: int,
        scope: Scope,
        *,
        or_longer: bool = False,
    ) -> _Seen:
        """What is known of a request, over its first ``num_tokens`` tokens, or more if they are known.

        SGLang ranks its queue by whole prompts, and admits by prompts that are a token shorter.
        """
        seen = self._seen.pop(handle, None)
        if seen is None:
            seen = _Seen(num_tokens, self.manager.sequence(tokens(), scope))
        elif seen.num_tokens < num_tokens or (seen.num_tokens > num_tokens and not or_longer):
            sequence = self.manager.sequence(tokens(), scope)
            sequence.adopt_keys(seen.sequence)  # a chunk more, or the answer behind the prompt
            seen.num_tokens, seen.sequence = num_tokens, sequence
        self._seen[handle] = seen
        if len(self._seen) > _MOST_SEEN:  # before 0.5.20 nobody tells of requests that left the queue
            del self._seen[next(iter(self._seen))]
        return seen

    def _note_origin(self, handle: Hashable, seen: _Seen, found: Lookup, have: int) -> None:
        if seen.have != have or sum(found.tokens_by_tier.values()) > sum(seen.origin.values()):
            seen.have, seen.origin = have, dict(found.tokens_by_tier)
            logger.debug(
                "[FlexKV] lookup rid=%r prompt=%d device=%d promised=%d from=%s why=%s",
                _label(handle),
                seen.num_tokens,
                have,
                found.num_tokens - have,
                places(found.tokens_by_tier),
                found.why,
            )

    def _bring_nearer(self, handle: Hashable, seen: _Seen, found: Lookup, scope: Scope, have: int) -> None:
        """Ask once for what lies below the first tier, so that it is there when the request is admitted."""
        is_below = any(tier != self._first_tier for tier in found.tokens_by_tier)
        if seen.asked_for_more or not self._engine.prefetch or not is_below:
            return
        seen.asked_for_more = True
        task = self.manager.prefetch_async(seen.sequence, start=have, scope=scope, label=_label(handle))
        if task != NO_TASK:
            seen.prefetch = task
            self._prefetches.add(task)

    def storage_tokens(self, handle: Hashable, have: int) -> int:
        """How many of the tokens promised behind ``have`` came from below the first tier."""
        seen = self._seen.get(handle)
        if seen is None or seen.have != have:
            return 0
        return sum(tokens for tier, tokens in seen.origin.items() if tier != self._first_tier)

    def forget(self, handle: Hashable) -> None:
        """The attempt is over: drop what was kept for it, and what was not yet prefetched for it."""
        seen = self._seen.pop(handle, None)
        if seen is not None and seen.prefetch != NO_TASK:
            self.manager.cancel([seen.prefetch])

    @property
    def load_deadline_s(self) -> float:
        """How long a request waits for its load at most."""
        return self._engine.load_deadline_s

    @property
    def num_seen(self) -> int:
        """Requests that something is kept for."""
        return len(self._seen)

    # ---- loads ---------------------------------------------------------------------------------

    def start_load_kv(self, handle: Hashable, have: int, count: int, scope: Scope) -> int:
        """Begin to bring the ``count`` promised tokens behind ``have`` into host slots.

        Returns:
            A task id, or -1 if the promise cannot be kept; nothing is held then.
        """
        seen = self._seen.get(handle)
        if seen is None:
            return NO_TASK
        task, mask = self.manager.get_match(
            seen.sequence,
            start=have,
            max_tokens=have + count,
            scope=scope,
            promised=seen.found,
            label=_label(handle),
        )
        if int(mask.sum()) == count:
            return task
        self.manager.metrics.count("promises_broken")
        self.release(task)
        return NO_TASK

    def retrieve_kv(self, task: int, slots: Any) -> None:
        """Let a staged load copy into device slots, one for each of its tokens."""
        self.manager.launch([task], [slots])

    def start_load_kv_layerwise(self, task: int, slots: Any) -> Ticket | None:
        """As ``retrieve_kv``, first layers first.

        Returns:
            The running copy; None if it could not be begun, and then the task is over.
        """
        self.manager.launch([task], [slots], layerwise=True)
        return self.manager.ticket(task)

    def wait_staged(self, task: int, timeout_s: float | None = None) -> bool:
        """Wait until a load's blocks lie in host slots, or it has ended; how long: as ``wait_over``."""
        return self._wait_for(lambda: self.manager.is_staged(task) or self.manager.is_over(task), timeout_s)

    def wait_over(self, task: int, timeout_s: float | None = None) -> bool:
        """Wait until nothing of a task touches any slot: up to ``timeout_s``, or as long as this pass may."""
        return self._wait_for(lambda: self.manager.is_over(task), timeout_s)

    def order_behind(self, task: int, timeout_s: float | None = None) -> bool:
        """Have the device go on behind a load's copy, where it can; how long for: as ``wait_over``."""
        ticket = self.manager.ticket(task)
        if ticket is None:
            return False
        if timeout_s is not None:
            return ticket.order_behind(timeout_s)
        with self._load_wait.spending() as left:
            return ticket.order_behind(left)

    def _wait_for(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        if timeout_s is not None:
            return self._wait(is_so, timeout_s)
        with self._load_wait.spending() as left:
            return self._wait(is_so, left)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while True:
            self.manager.poll()
            if is_so():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.manager.chain.wait_for_message(min(left, 0.0005))

    def result(self, task: int) -> KVResponse:
        """The end of a task that is over; delivers it."""
        answer = self.manager.try_wait([task]).get(task)
        return answer or KVResponse(KVResponseStatus.UNREADY, task)

    def release(self, task: int) -> None:
        """Give a task up: idempotent.  Its slots are free when ``is_over`` says so."""
        self.manager.cancel([task])
        if self.manager.is_over(task):
            self.manager.try_wait([task])

    # ---- stores --------------------------------------------------------------------------------

    def store_kv(
        self,
        handle: Hashable,
        tokens: Callable[[], Sequence[int]],
        num_tokens: int,
        scope: Scope,
        slots: Callable[[int, int], Any],
        *,
        is_finished: bool = True,
    ) -> int:
        """Copy what the tiers lack of the first ``num_tokens`` tokens, in the background.

        Args:
            handle: The request's attempt.
            tokens: Gives the ids.
            num_tokens: Tokens whose KV is final once all queued forward passes have ended.
            scope: What separates the request.
            slots: Gives the device slots of tokens ``[first, last)`` as a 1-D int64 tensor.
            is_finished: Whether the sequence ends here, so that its partly filled last block is kept.

        Returns:
            A task id, or -1 where there is nothing to do.  Until the task is over its device slots must
            keep their content.
        """
        if not self.manager.may_share(scope):
            return NO_TASK
        seen = self._sequence_of(handle, tokens, num_tokens, scope)
        task, mask = self.manager.put_match(
            seen.sequence, scope=scope, with_tail=is_finished, label=_label(handle)
        )
        first, last = _span(mask)
        if first == last:
            self.manager.try_wait([task])
            return NO_TASK
        chosen = slots(first, last)
        inside = mask[first:last]
        self.manager.launch([task], [chosen if inside.all() else chosen[inside.nonzero()[0]]])
        return task

    # ---- the rest ------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A pass of the scheduler begins: take in what has ended; requests may wait again."""
        self._lookup_wait.renew()
        self._load_wait.renew()
        self.poll()

    def poll(self) -> None:
        """Take in what has ended.  Prefetches outlive their requests, so they are collected here (HS-37)."""
        self.manager.poll()
        if self._prefetches:
            self._prefetches.difference_update(self.manager.try_wait(list(self._prefetches)))

    def reset(self) -> None:
        """Forget requests; the tiers keep their blocks."""
        self._seen.clear()

    def invalidate(self) -> None:
        """The weights changed: nothing stored so far may be served again."""
        self.manager.invalidate()
        self._seen.clear()

    def shutdown(self) -> None:
        """Close everything.  Blocks, bounded; may be called twice."""
        self._seen.clear()
        self.manager.shutdown()


def _label(handle: Hashable) -> str:
    return str(getattr(handle, "rid", handle))


def _span(mask: Any) -> tuple[int, int]:
    """First and one behind the last True of a numpy mask."""
    places = mask.nonzero()[0]
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
