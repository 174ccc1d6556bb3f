"""A tier at work in a chain: the driver's tier with its wrappers, workers, policy and estimates.

Threads: the chain's thread only, apart from what ``executor`` and ``wrappers`` run.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ..demands import unmet_demands
from ..keys import BlockKey
from ..layout import BlockLayout, round_up
from ..models import CodecConfig, TierConfig, WritePolicy
from ..tier import DirectTier, Status, Tier, TierCapabilities
from ..wrappers.encoding import stored_bytes
from ..wrappers.stack import Wrapped
from .executor import Call, Completed, TierWorkers, Verb
from .speed import SpeedEstimate

logger = logging.getLogger(__name__)

_KNOWN_LIMIT = 200_000
"""Answers of each kind: 13 million tokens in blocks of 64, in some 40 MiB."""
_NEVER = float("-inf")
_OWED_LIMIT = 100_000
"""Blocks that a tier missed and values that could not be removed: so many of each are remembered."""
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


class RecentKeys:
    """A set of keys that forgets the oldest beyond a limit."""

    def __init__(self, limit: int = _OWED_LIMIT) -> None:
        """No keys."""
        self._limit = limit
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._keys)

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Remember keys."""
        self._keys.update(dict.fromkeys(keys))
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def take(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Forget those of the keys that are here, and return them."""
        found = [key for key in keys if key in self._keys] if self._keys else []
        for key in found:
            del self._keys[key]
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()


class KnownKeys:
    """What a shared tier said of keys, for a while: there, or not there."""

    def __init__(self, found_s: float = 60.0, missing_s: float = 2.0) -> None:
        """Believe a positive answer for ``found_s`` seconds and a negative one for ``missing_s``."""
        self._spans = {True: found_s, False: missing_s}
        self._there: OrderedDict[BlockKey, float] = OrderedDict()
        self._missing: OrderedDict[BlockKey, float] = OrderedDict()  # until when, the first to end first

    def __len__(self) -> int:
        return len(self._there) + len(self._missing)

    def note(self, key: BlockKey, now: float, *, is_there: bool) -> None:
        """Remember an answer, or what a load or store found out."""
        mine, other = (self._there, self._missing) if is_there else (self._missing, self._there)
        other.pop(key, None)
        mine[key] = now + self._spans[is_there]
        mine.move_to_end(key)
        self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        """Two of each kind at most, so that no note takes long: one is added at a time."""
        for answers in (self._there, self._missing):
            for _ in range(2):
                if answers and (len(answers) > _KNOWN_LIMIT or next(iter(answers.values())) < now):
                    answers.popitem(last=False)

    def get(self, key: BlockKey, now: float) -> bool | None:
        """True, False, or None where nothing recent is known."""
        if self._there.get(key, _NEVER) >= now:
            return True
        return False if self._missing.get(key, _NEVER) >= now else None

    def there_until(self, keys: Sequence[BlockKey], start: int, stop: int, now: float) -> int:
        """One behind the last of ``keys[start:stop]`` that is known to be there, without a gap."""
        get = self._there.get
        for at in range(start, stop):
            if get(keys[at], _NEVER) < now:
                return at
        return stop

    def clear(self) -> None:
        """Forget everything."""
        self._there.clear()
        self._missing.clear()


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
        if end.is_adrift or (not num_bytes and any(o.status is Status.LIMITED for o in end.outcomes)):
            piece = call.piece or len(call.keys)
            self.speed.observe(piece * slot_bytes, self.config.load_deadline_s, now)
        elif num_bytes:
            self.speed.observe(num_bytes / call.num_pieces, call.seconds / call.num_pieces, now)

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


class LaneThreads(NamedTuple):
    """Threads of a tier's lanes."""

    load: int
    store: int
    lookup: int


def lane_threads(config: TierConfig, can: TierCapabilities) -> LaneThreads:
    """How many threads each lane gets: together no more than the driver takes calls at once.

    Each lane has one at least.  Where that is more than the driver takes, calls take turns (``Turns``).
    """
    lookups = 1 if can.shared else 0
    budget = can.max_concurrency - lookups
    loads = config.load_threads or min(-(-budget // 2), budget - (config.store_threads or 1))
    loads = max(1, min(loads, budget - 1))
    stores = max(1, min(config.store_threads or budget, budget - loads))
    wanted = (config.load_threads or 0) + (config.store_threads or 0)
    if wanted > loads + stores:
        logger.warning(
            "[FlexKV] tier %s: the driver takes %d calls at once: load_threads is %d, store_threads %d",
            config.name,
            can.max_concurrency,
            loads,
            stores,
        )
    return LaneThreads(loads, stores, lookups)


def capacity_blocks(
    capabilities: TierCapabilities, layout: BlockLayout, codec: CodecConfig | None = None
) -> int | None:
    """How many full blocks fit, or None where the store itself decides.

    With a codec each block counts with the room that it takes when it does not shrink.
    """
    if not capabilities.capacity_bytes:
        return None
    longest = stored_bytes(codec or CodecConfig(), layout)
    return capabilities.capacity_bytes // round_up(longest, max(1, capabilities.alignment_bytes))


def check_links(configs: Sequence[TierConfig], capabilities: Sequence[TierCapabilities]) -> list[str]:
    """Why this order of tiers cannot work, in all points; empty if it can."""
    return [
        f"tiers[{number}] ({configs[number].name}): {field}: {line}"
        for number, field, line in unmet_demands(configs, capabilities)
    ]


def check_values(configs: Sequence[TierConfig], tiers: Sequence[Tier], layout: BlockLayout) -> list[str]:
    """Whether blocks of this layout fit into the tiers at all."""
    findings = []
    for number, (config, tier) in enumerate(zip(configs, tiers, strict=True)):
        can = tier.capabilities
        where = f"tiers[{number}] ({config.name})"
        longest = stored_bytes(config.codec, layout)
        if can.max_value_bytes and longest > can.max_value_bytes:
            findings.append(
                f"{where}: a block takes {longest:,} B, the tier's values at most "
                f"{can.max_value_bytes:,} B: lower block_tokens"
            )
        if capacity_blocks(can, layout, config.codec) == 0:
            findings.append(
                f"{where}: a block takes {longest:,} B, the tier has room for "
                f"{can.capacity_bytes:,} B, which is less than one block: raise its capacity"
            )
        if isinstance(tier, DirectTier) and not tier.slots.capacity:
            findings.append(
                f"{where}: a block takes {longest:,} B, its memory has room for none: raise its capacity"
            )
        if number == 0 and isinstance(tier, DirectTier) != can.direct_slots:
            findings.append(
                f"{where}: the driver says direct_slots={can.direct_slots}, its class says otherwise"
            )
    return findings
