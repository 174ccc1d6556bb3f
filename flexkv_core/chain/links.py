"""A tier at work in a chain: the driver's tier with its wrappers, workers, policy and estimates.

Threads: the chain's thread only, apart from what ``executor`` and ``wrappers`` run.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..keys import BlockKey
from ..models import TierConfig, WritePolicy
from ..tier import DirectTier, Status, Tier, TierCapabilities
from ..wrappers.stack import Wrapped
from .calls import Call, Completed, Verb
from .executor import TierWorkers
from .key_sets import KnownKeys, RecentKeys
from .speed import SpeedEstimate

logger = logging.getLogger(__name__)

_PIECES_EACH = 4
"""Pieces of one call for each thread."""
_TRY_EVERY_S = 10.0
"""A tier whose speed is unknown or bad is given something to load so often, to measure it."""


class Arrival(Enum):
    """How a block comes to a tier."""

    STORED = "stored"
    """The device has computed it."""
    PROMOTED = "promoted"
    """It was loaded from a tier further down."""
    LEAVING = "leaving"
    """It leaves the first tier."""


_KEEPS = {
    WritePolicy.THROUGH: {Arrival.STORED, Arrival.PROMOTED},
    WritePolicy.AROUND: {Arrival.PROMOTED},
    WritePolicy.BACK: {Arrival.LEAVING},
    WritePolicy.NEVER: frozenset[Arrival](),
}


@dataclass(eq=False)
class Link:
    """One tier of a chain.

    Attributes:
        number: Its place, from 0.
        config: Its policies.
        raw: The driver's tier.
        wrapped: The same, with wrappers.
        workers: Its queues and threads.
        capabilities: What the driver said.
        capacity_blocks: Blocks that fit, or None where the store decides.
        keeps_tails: Whether partly filled blocks are kept.
        speed: Measured time of load calls, by their bytes.
        num_loading: Blocks in load calls that have not ended.
        next_try: When a load that only measures may begin again.
        known: What a shared tier said of keys.
        backlog_bytes: Bytes in stores that are under way.
        waiting: Blocks that lie in the first tier and are to be stored here once the backlog shrinks;
            not pinned, so that a slow tier never fills the host pool.
        storing: Keys of stores that are under way.
        strays: Values that should have been removed and could not; tried again when the tier answers.
        owed: Blocks that should have been stored here and were not; offered again with the next store of
            their sequence, as far as the first tier still has them.
        doomed: Values that are to be removed, a call after the other; stores make room among them first.
        num_removing: Calls that remove, and nothing else, and have not ended.
        leaving: Keys of removals that are under way, and in how many: another thread could remove what is
            stored meanwhile.
    """

    number: int
    config: TierConfig
    raw: Tier
    wrapped: Wrapped
    workers: TierWorkers
    capabilities: TierCapabilities
    capacity_blocks: int | None
    keeps_tails: bool
    speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    known: KnownKeys = field(default_factory=KnownKeys)
    backlog_bytes: int = 0
    waiting: OrderedDict[BlockKey, None] = field(default_factory=OrderedDict)
    num_loading: int = 0
    next_try: float = float("-inf")
    storing: set[BlockKey] = field(default_factory=set)
    strays: RecentKeys = field(default_factory=RecentKeys)
    owed: RecentKeys = field(default_factory=RecentKeys)
    doomed: OrderedDict[BlockKey, None] = field(default_factory=OrderedDict)
    num_removing: int = 0
    leaving: Counter[BlockKey] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The tier's name in the chain."""
        return self.config.name

    @property
    def direct(self) -> DirectTier | None:
        """The tier as an addressable one."""
        return self.raw if isinstance(self.raw, DirectTier) else None

    @property
    def is_indexed(self) -> bool:
        """Whether this process alone fills it, so that the index knows all that is there."""
        return not self.capabilities.shared

    @property
    def is_up(self) -> bool:
        """Whether it answers."""
        return self.wrapped.breaker.is_up

    @property
    def fault(self) -> str:
        """Why it cannot be used now, in a few words; empty if it can."""
        if not self.is_up:
            return f"is down: {self.wrapped.breaker.reason}"
        if not (self.workers.can_load and self.workers.can_store):
            return "has no thread left: all of them hang in the driver"
        return ""

    @property
    def takes_loads(self) -> bool:
        """Whether its blocks are worth promising now."""
        if self.config.load_or_recompute == "recompute" and self.number:
            return False
        return self.workers.can_load and (self.is_up or self.wrapped.breaker.wants_probe)

    def keeps(self, arrival: Arrival) -> bool:
        """Whether its policies let a block in that comes this way."""
        return not self.config.read_only and arrival in _KEEPS[self.config.write]

    def takes(self, arrival: Arrival) -> bool:
        """Whether such a block is written to it now."""
        return self.keeps(arrival) and self.is_reachable

    @property
    def is_reachable(self) -> bool:
        """Whether a store has a chance: it is up, or may be probed, and not all threads hang in it."""
        return self.workers.can_store and (self.is_up or self.wrapped.breaker.wants_probe)

    def load_begins(self, num_blocks: int, now: float) -> None:
        """A load call is queued."""
        self.num_loading += num_blocks
        self.next_try = now + _TRY_EVERY_S

    def load_ended(self, end: Completed, num_bytes: int, slot_bytes: int, now: float) -> None:
        """A load call is over: what it brought says how fast the tier is, and so does a deadline.

        That a rate limit leaves no turn before the deadline says the same.
        """
        call = end.call
        self.num_loading -= len(call.keys)
        if end.is_adrift or any(end.outcomes[i].status is Status.LIMITED for i in end.bad):
            piece = call.piece or len(call.keys)
            self.speed.observe(piece * slot_bytes, self.config.load_deadline_s, now)
        elif num_bytes:
            pieces = call.num_pieces
            self.speed.observe(num_bytes / pieces, call.seconds / pieces, now, times=pieces)

    def may_try(self, now: float) -> bool:
        """Whether a load that only measures the tier may begin now: one at a time, now and then."""
        return not self.num_loading and now >= self.next_try

    def note_late(self, end: Completed) -> None:
        """A call was given up at its deadline: the breaker has not seen it.

        One that nobody had begun says nothing of a tier if it waited for a rate limit, or for all others; nor
        does one that was not to be loaded, where loads take their turns first.
        """
        has_waited = self.wrapped.limit is not None or end.call.can_wait
        has_waited = has_waited or (self.wrapped.has_turns and end.call.verb is not Verb.LOAD)
        if end.is_adrift or not has_waited:
            verb = end.call.verb
            late = [i for i in end.bad if end.outcomes[i].status is Status.TIMEOUT]
            first = end.outcomes[late[0] if late else end.bad[0]]
            self.wrapped.breaker.report(
                first.status, first.reason, verb.value, is_final=verb is Verb.LOAD, call=end.call
            )

    def evict(self, keys: Sequence[BlockKey], now: float) -> None:
        """Have workers remove values; any number.

        What is more than one call takes waits in ``doomed``: stores come in between, and each call has a
        deadline of its own.
        """
        most = max(1, self.capabilities.max_batch)
        self.doomed.update(dict.fromkeys(keys[most:]))
        if keys:
            self.num_removing += 1
            deadline = now + self.config.store_deadline_s
            self.submit_removal(Call(Verb.EVICT, list(keys[:most]), deadline=deadline, owner=self))

    def submit_removal(self, call: Call) -> None:
        """Queue a call that removes values."""
        if self.workers.store_threads > 1:  # a single one does everything in order
            self.leaving.update(call.removes)
        self.workers.submit(call)

    def removal_ended(self, call: Call) -> None:
        """Nobody removes values for this call any more."""
        if self.leaving:
            self.leaving.subtract(call.removes)
            for key in call.removes:
                if self.leaving[key] <= 0:
                    del self.leaving[key]

    def cut(self, count: int, threads: int, most: int | None = None) -> tuple[int, list[range]]:
        """How ``count`` keys come to as many threads at once: keys of a piece, and the calls that it cuts.

        A call is a few pieces for each thread: enough that the chain's thread has few ends to take in, little
        enough that who wants some of it, or waits behind it, does not wait for all.  With ``most``, pieces
        have so many keys at most, and each is a call of its own.
        """
        piece = max(1, min(most or count, self.capabilities.max_batch, -(-count // max(1, threads))))
        size = piece if most else piece * max(1, threads) * _PIECES_EACH
        return piece, [range(start, min(start + size, count)) for start in range(0, count, size)]
