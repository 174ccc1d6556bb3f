"""Lanes: one queue of a tier each, and the threads that work it off.

Workers cut a call into pieces, each one call of the driver: so many threads are at it at once, and the
chain's thread pays for one.

Threads: ``submit``, ``expire``, ``withdraw``, ``hurry`` and ``close`` belong to the chain's thread.
``Lane._lock`` covers the queue and what its calls note of their pieces; workers and the chain's thread take
it, and nothing else is locked inside, but for the completion queue's own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..keys import BlockKey
from ..tier import BufferState, Outcome, Status, Tier, failed
from ..wrappers.deadline import within
from .calls import Call, Completed, Completions, Faltered, Phase, Piece, Returned, Verb, completed

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_ALIVE = (Phase.QUEUED, Phase.RUNNING)
_CLOSING = "the chain is closing"
_NO_TURN = "no turn before the deadline"


class Lane:
    """One queue and its threads; what its methods do is told by ``TierWorkers``."""

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
            late = [call for call in self._open if call.deadline <= now and call.phase is not Phase.ADRIFT]
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
                call.phase = Phase.ADRIFT
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
        if call.phase is not Phase.QUEUED:
            return False
        return self._abandon(call, Status.CANCELLED, "nobody waits for it any more", only_queued=True)

    def hurry(self, call: Call, deadline: float) -> None:
        """A call that could wait is needed now; what it has waited so far does not count."""
        with self._lock:
            if not call.can_wait:
                return
            if call.phase is Phase.QUEUED:
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
            is_adrift = call.phase is Phase.ADRIFT
            self._num_adrift -= is_adrift
            self._num_later -= call.can_wait
            call.take_in(piece, outcomes, seconds)
            goes_on = bool(call.running) or call.has_more
            if not goes_on:
                call.end()
        if goes_on:
            if call.verb is Verb.LOAD and not is_adrift and not all(o.is_ok for o in outcomes):
                self._completions.put(Faltered(call, piece.first, outcomes))
            return
        if is_adrift:
            self._completions.put(Returned(call))
        else:
            self._completions.put(completed(call))
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
