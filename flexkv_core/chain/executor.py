"""Queues and worker threads: the only place of the core that starts a thread for a tier.

Each tier has a load queue and a store queue with threads of their own, so that stores never delay
loads.  A call is submitted by the chain's thread, run by workers, and comes back through one
completion queue that the chain's thread drains.  Workers cut it into pieces, each one call of the driver:
so many threads are at it at once, and the chain's thread pays for one.

Every call ends exactly once, with one outcome per key.  One that passes its deadline ends with
``TIMEOUT`` for what is not over; if workers are at it, the buffers of these pieces are ``UNCERTAIN`` and the
call is *adrift* until the last of them returns, which is reported by a second message (``Returned``): only
then may the buffers be used again.

Threads: ``submit``, ``drain``, ``expire`` and ``close`` belong to the chain's thread.  ``_Lane._lock``
covers a lane's queue and what its calls note of their pieces; workers and the chain's thread take it, and
nothing else is locked inside, but for the completion queue's own.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..keys import BlockKey
from ..tier import BufferState, Outcome, Status, Tier, failed
from ..wrappers.deadline import within

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class Verb(str, Enum):
    """What a call does."""

    LOAD = "load"
    STORE = "store"
    LOOKUP = "lookup"
    EVICT = "evict"


class _Phase(Enum):
    QUEUED = 0
    RUNNING = 1
    OVER = 2
    ADRIFT = 3


_ALIVE = (_Phase.QUEUED, _Phase.RUNNING)
_CLOSING = "the chain is closing"
_NO_TURN = "no turn before the deadline"


def _no_buffers(_first: int, _last: int) -> Sequence[memoryview]:
    return []


@dataclass(eq=False, slots=True)
class Call:
    """One job for one tier.  Workers cut it into pieces, each of which is one call of the driver.

    Attributes:
        verb: What to do.
        keys: Distinct keys.
        buffers: Gives a buffer for each of ``keys[first:last]`` (load and store).  The worker calls it first:
            it may take its time (sealing values, for one).
        evict_first: Keys to remove before a store, by the same workers, to make room.
        piece: Keys that a worker takes at once; 0 for all.
        can_wait: Nobody needs it now: it goes behind all others of its lane, and where there are several
            threads it leaves one to them.
        deadline: When it is given up, on the executor's clock.
        owner: What the chain finds its job again with; opaque here.
        number: Unique; for logs.
        left: Keys that were to be removed and may still be there; final once all workers are back.
        seconds: How long the tier took for all pieces together, one after another.
        num_pieces: Pieces that are over.
        phase: Where it stands; the lane's, as all below.
        begun: Keys that workers have taken.
        running: Pieces that workers are at.
        outcomes: What the pieces gave that are over; None for each key of the others.
    """

    verb: Verb
    keys: Sequence[BlockKey]
    buffers: Callable[[int, int], Sequence[memoryview]] = _no_buffers
    evict_first: Sequence[BlockKey] = ()
    piece: int = 0
    can_wait: bool = False
    deadline: float = float("inf")
    owner: object = None
    number: int = field(default_factory=itertools.count().__next__)
    left: Sequence[BlockKey] = ()
    seconds: float = 0.0
    num_pieces: int = 0
    phase: _Phase = _Phase.QUEUED
    begun: int = 0
    running: list[Piece] = field(default_factory=list)
    outcomes: list[Outcome | None] = field(default_factory=list)
    _kept: list[BlockKey] = field(default_factory=list)

    @property
    def removes(self) -> Sequence[BlockKey]:
        """Keys that it removes."""
        return self.keys if self.verb is Verb.EVICT else self.evict_first

    @property
    def has_more(self) -> bool:
        """Whether something of it is queued."""
        return self.phase is _Phase.QUEUED or (self.phase is _Phase.RUNNING and self.begun < len(self.keys))

    def next_piece(self) -> Piece:
        """What a worker takes now.  Each piece makes its own room; the last one makes the rest."""
        first, count = self.begun, len(self.keys)
        last = min(count, first + self.piece) if self.piece else count
        removes = self.removes[first:] if last == count else self.removes[first:last]
        piece = Piece(self, first, last, removes)
        if not self.outcomes:
            self.outcomes = [None] * count
        self.phase, self.begun = _Phase.RUNNING, last
        self.running.append(piece)
        return piece

    def take_in(self, piece: Piece, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A piece is over.  What is left to be removed may be told before the call is over."""
        self.running.remove(piece)
        self.seconds += seconds
        self.num_pieces += 1
        self._kept += piece.left
        if self.phase is not _Phase.ADRIFT:
            self.outcomes[piece.first : piece.last] = outcomes

    def cut(self, outcome: Outcome) -> None:
        """Nobody takes any more of it: the rest ends like this."""
        self.outcomes[self.begun :] = [outcome] * (len(self.keys) - self.begun)
        self._kept += self.removes[self.begun :]
        self.begun = len(self.keys)

    def end(self) -> None:
        """Nothing of it is queued or runs any more."""
        is_begun = self.phase is not _Phase.QUEUED and self.begun >= len(self.keys)
        self.left = [*self._kept, *(() if is_begun else self.removes[self.begun :])]
        self.phase = _Phase.OVER


@dataclass(eq=False, slots=True)
class Piece:
    """A part of a call that one worker is at: one call of the driver.

    Attributes:
        whole: The call.
        first: Position of its first key in the call.
        last: One behind its last.
        left: Keys that it was to remove and may still be there.
        waits_for_turn: It has not reached the tier, which takes other calls first.
    """

    whole: Call
    first: int
    last: int
    left: Sequence[BlockKey] = ()
    waits_for_turn: bool = False

    @property
    def keys(self) -> Sequence[BlockKey]:
        """Its keys."""
        call = self.whole
        is_all = self.first == 0 and self.last == len(call.keys)
        return call.keys if is_all else call.keys[self.first : self.last]


@dataclass(frozen=True, slots=True)
class Completed:
    """A call's end: the only one.

    Attributes:
        call: Which call.
        outcomes: One for each key.
        bad: Positions of those that are not OK.
        is_adrift: A worker is still inside the tier: ``Returned`` follows, and until then the call's
            buffers must not be used.
        is_late: The deadline ended it, begun or not: no wrapper has seen this failure.
        is_refused: Nobody will begin it, since no thread has come back from the tier.
    """

    call: Call
    outcomes: list[Outcome]
    bad: Sequence[int]
    is_adrift: bool = False
    is_late: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """The worker of a call that was adrift has come back: its buffers are nobody's now."""

    call: Call


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a worker wants the chain's thread to do; run by ``drain``'s caller."""

    run: Callable[[], None]


Message = Completed | Returned | Notice


def _completed(call: Call) -> Completed:
    """The end of a call whose pieces are all over."""
    outcomes = [outcome for outcome in call.outcomes if outcome is not None]
    return Completed(call, outcomes, [i for i, outcome in enumerate(outcomes) if not outcome.is_ok])


class Completions:
    """The one queue through which all workers answer."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """For workers."""
        self._queue.put(message)

    def drain(self) -> list[Message]:
        """All messages so far, in order; never blocks."""
        messages: list[Message] = []
        try:
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages

    def is_empty(self) -> bool:
        """Whether ``drain`` would return nothing."""
        return self._queue.empty()

    def wait(self, timeout_s: float) -> list[Message]:
        """As ``drain``, but waits up to ``timeout_s`` for the first message."""
        try:
            first = self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return []
        return [first, *self.drain()]


class _Lane:
    """One queue and its threads."""

    def __init__(self, name: str, tier: Tier, threads: int, completions: Completions, clock: Clock) -> None:
        self._tier = tier
        self._completions = completions
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[Call] = deque()
        self._later: deque[Call] = deque()
        self._num_later = 0
        self._open: set[Call] = set()
        self._num_adrift = 0
        self._is_closed = False
        self.threads = [
            threading.Thread(target=self._work, name=f"flexkv-{name}-{i}", daemon=True)
            for i in range(threads)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def submit(self, call: Call) -> None:
        with self._lock:
            if not self._is_closed and not self.is_stuck:
                (self._later if call.can_wait else self._queue).append(call)
                self._open.add(call)
                self._wake.notify(-(-len(call.keys) // call.piece) if call.piece else 1)
                return
        call.end()
        if self._is_closed:
            self._tell_end(call, Status.CANCELLED, _CLOSING)
        else:
            self._tell_end(call, Status.UNAVAILABLE, "no thread has come back from the tier")

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_stuck(self) -> bool:
        return self._num_adrift >= len(self.threads)

    def expire(self, now: float) -> None:
        """End the calls whose deadline has passed."""
        if not self._open:
            return
        with self._lock:
            late = [call for call in self._open if call.deadline <= now and call.phase is not _Phase.ADRIFT]
        for call in late:
            self._abandon(call, Status.TIMEOUT, "the deadline passed")

    def _abandon(self, call: Call, status: Status, reason: str, *, only_queued: bool = False) -> bool:
        """End a call from outside: at once if no worker is at it, else adrift; False if it is over already.

        What its pieces have brought by then counts.
        """
        with self._lock:
            if call.phase not in (_ALIVE[:1] if only_queued else _ALIVE):
                return False
            if call.has_more:
                (self._later if call.can_wait else self._queue).remove(call)
            if call.running:
                call.phase = _Phase.ADRIFT
                self._num_adrift += len(call.running)
            else:
                self._open.discard(call)
                call.end()
            # Under the lock: a worker, which takes it on its way back, must not be heard of first.
            self._tell_end(call, status, reason)
            return True

    def _tell_end(self, call: Call, status: Status, reason: str) -> None:
        """Tell of a call that has ended from outside; what workers are at is uncertain."""
        if status is Status.TIMEOUT and call.running and all(piece.waits_for_turn for piece in call.running):
            status, reason = Status.LIMITED, _NO_TURN
        untouched = failed(status, reason, BufferState.UNTOUCHED)
        given = call.outcomes or [None] * len(call.keys)
        bad = [i for i, outcome in enumerate(given) if outcome is None or not outcome.is_ok]
        outcomes = [untouched if outcome is None else outcome for outcome in given]
        for piece in call.running:
            uncertain = failed(status, reason, BufferState.UNCERTAIN)
            if status is Status.TIMEOUT and piece.waits_for_turn:
                uncertain = failed(Status.LIMITED, _NO_TURN, BufferState.UNCERTAIN)
            outcomes[piece.first : piece.last] = [uncertain] * (piece.last - piece.first)
        self._completions.put(
            Completed(
                call,
                outcomes,
                bad,
                is_adrift=bool(call.running),
                is_late=status is Status.TIMEOUT,
                is_refused=status is Status.UNAVAILABLE,
            )
        )

    def withdraw(self, call: Call) -> bool:
        """End a call that nobody has begun; False if somebody has."""
        if call.phase is not _Phase.QUEUED:
            return False
        return self._abandon(call, Status.CANCELLED, "nobody waits for it any more", only_queued=True)

    def hurry(self, call: Call, deadline: float) -> None:
        """A call that could wait is needed now; what it has waited so far does not count."""
        with self._lock:
            if not call.can_wait:
                return
            if call.phase is _Phase.QUEUED:
                call.deadline = max(call.deadline, deadline)
            if call.has_more:
                self._later.remove(call)
                self._queue.append(call)
            self._num_later -= len(call.running)
            call.can_wait = False
            self._wake.notify_all()

    def _next(self) -> Piece | None:
        """What to do next; a call that can wait leaves a thread free for what cannot."""
        calls = self._queue
        if not calls:
            if not self._later or self._num_later >= max(1, len(self.threads) - 1):
                return None
            self._num_later += 1
            calls = self._later
        piece = calls[0].next_piece()
        if not calls[0].has_more:
            calls.popleft()
        return piece

    def _work(self) -> None:
        while True:
            with self._wake:
                while (piece := self._next()) is None:
                    if self._is_closed:
                        return
                    self._wake.wait()
            started = self._clock()
            outcomes = self._run(piece)
            self._take_in(piece, outcomes, self._clock() - started)

    def _take_in(self, piece: Piece, outcomes: list[Outcome], seconds: float) -> None:
        """A worker is back; the last one of a call tells of its end."""
        call = piece.whole
        with self._lock:
            is_adrift = call.phase is _Phase.ADRIFT
            self._num_adrift -= is_adrift
            self._num_later -= call.can_wait
            call.take_in(piece, outcomes, seconds)
            if call.running or call.has_more:
                return
            call.end()
        if is_adrift:
            self._completions.put(Returned(call))
        else:
            self._completions.put(_completed(call))
        with self._lock:  # only now: whoever sees nothing open must find the message there
            self._open.discard(call)

    def _run(self, piece: Piece) -> list[Outcome]:
        tier, call, keys = self._tier, piece.whole, piece.keys
        try:
            with within(call.deadline, self._clock, piece):
                views = call.buffers(piece.first, piece.last)
                if call.verb is Verb.LOAD:
                    return tier.load(keys, views)
                if call.verb is Verb.STORE:
                    self._evict(piece, piece.left)
                    return tier.store(keys, views) if keys else []
                if call.verb is Verb.EVICT:
                    return self._evict(piece, keys)
                return tier.lookup(keys)
        except BaseException as exc:  # noqa: BLE001 - the thread's top: a driver may even call sys.exit
            logger.exception("[FlexKV] a tier's wrapper failed in %s", call.verb.value)
            return [failed(Status.UNAVAILABLE, repr(exc), BufferState.UNCERTAIN)] * len(keys)

    def _evict(self, piece: Piece, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Remove any number of keys, as many at once as the tier takes; note those that stay."""
        outcomes: list[Outcome] = []
        size = max(1, self._tier.capabilities.max_batch)
        for start in range(0, len(keys), size):
            outcomes += self._tier.evict(keys[start : start + size])
        piece.left = [
            key
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome.status not in (Status.OK, Status.MISS)
        ]
        return outcomes

    def close(self) -> None:
        """Take no more calls; end the queued ones; let the running ones run."""
        with self._lock:
            self._is_closed = True
            queued = [*self._queue, *self._later]
            begun = [call for call in queued if call.running]
            for call in begun:  # what workers are at may end
                call.cut(failed(Status.CANCELLED, _CLOSING, BufferState.UNTOUCHED))
                (self._later if call.can_wait else self._queue).remove(call)
            self._wake.notify_all()
        for call in queued:
            if call.has_more:
                self._abandon(call, Status.CANCELLED, _CLOSING)

    def join(self, deadline: float) -> list[str]:
        """Wait for the threads; names of those that did not end (a driver that hangs)."""
        for thread in self.threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self.threads if thread.is_alive()]


class TierWorkers:
    """A tier's lanes: loads, stores with evictions, and where a tier must be asked, lookups."""

    def __init__(
        self,
        name: str,
        tier: Tier,
        *,
        load_threads: int,
        store_threads: int,
        lookup_threads: int = 0,
        completions: Completions,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make threads ``flexkv-<name>-<lane>-<i>``; without any for lookups, these go with loads."""
        self._loads = _Lane(f"{name}-load", tier, load_threads, completions, clock)
        self._stores = _Lane(f"{name}-store", tier, store_threads, completions, clock)
        self._lookups = self._loads
        if lookup_threads:
            self._lookups = _Lane(f"{name}-lookup", tier, lookup_threads, completions, clock)
        self._lanes = list(dict.fromkeys((self._loads, self._stores, self._lookups)))
        self.load_threads = load_threads
        self.store_threads = store_threads

    def start(self) -> None:
        """Start the threads; what was queued before is begun now."""
        for lane in self._lanes:
            lane.start()

    def submit(self, call: Call) -> None:
        """Queue a call; its end comes through the completions."""
        lane = {Verb.LOAD: self._loads, Verb.LOOKUP: self._lookups}.get(call.verb, self._stores)
        lane.submit(call)

    def withdraw(self, call: Call) -> bool:
        """End a load that nobody waits for; its end comes as always.  False if somebody has begun it."""
        return self._loads.withdraw(call)

    def hurry(self, call: Call, deadline: float) -> None:
        """A load that could wait is needed now, and given up at ``deadline`` if nobody has begun it yet."""
        self._loads.hurry(call, deadline)

    @property
    def num_open(self) -> int:
        """Calls that are queued, running or adrift."""
        return sum(lane.num_open for lane in self._lanes)

    @property
    def can_load(self) -> bool:
        """Whether a thread is left for loads: not all of them are lost in the tier."""
        return not self._loads.is_stuck

    @property
    def can_store(self) -> bool:
        """Whether a thread is left for stores."""
        return not self._stores.is_stuck

    @property
    def num_open_stores(self) -> int:
        """The same, of stores and evictions."""
        return self._stores.num_open

    def expire(self, now: float) -> None:
        """End calls whose deadline has passed."""
        for lane in self._lanes:
            lane.expire(now)

    def close(self) -> None:
        """Take no more calls and end the queued ones."""
        for lane in self._lanes:
            lane.close()

    def join(self, deadline: float) -> list[str]:
        """Wait for the threads until ``deadline`` (``time.monotonic``); names of those that hang."""
        return [name for lane in self._lanes for name in lane.join(deadline)]


def run_bounded(name: str, function: Callable[[], None], timeout_s: float) -> bool:
    """Run foreign code that may hang in a thread of its own; False if it has not ended in time.

    What it raises is logged: a driver that fails to close must not keep the others from closing.
    """

    def run() -> None:
        try:
            function()
        except Exception:  # noqa: BLE001 - the thread's top, round a foreign driver
            logger.exception("[FlexKV] %s failed", name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
