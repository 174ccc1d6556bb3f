"""Calls of a tier: what workers are asked to do, in pieces, and how its end is told.

Threads: a call is made and taken in by the chain's thread; in between, what it notes of its pieces belongs to
the lock of its lane (``executor``).
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..keys import BlockKey
from ..tier import Outcome


class Verb(str, Enum):
    """What a call does."""

    LOAD = "load"
    STORE = "store"
    LOOKUP = "lookup"
    EVICT = "evict"


class Phase(Enum):
    """Where a call stands."""

    QUEUED = 0
    RUNNING = 1
    OVER = 2
    ADRIFT = 3


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
    phase: Phase = Phase.QUEUED
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
        return self.phase is Phase.QUEUED or (self.phase is Phase.RUNNING and self.begun < len(self.keys))

    def next_piece(self) -> Piece:
        """What a worker takes now.  Each piece makes its own room; the last one makes the rest."""
        first, count = self.begun, len(self.keys)
        last = min(count, first + self.piece) if self.piece else count
        removes = self.removes[first:] if last == count else self.removes[first:last]
        piece = Piece(self, first, last, removes)
        if not self.outcomes:
            self.outcomes = [None] * count
        self.phase, self.begun = Phase.RUNNING, last
        self.running.append(piece)
        return piece

    def take_in(self, piece: Piece, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A piece is over.  What is left to be removed may be told before the call is over."""
        self.running.remove(piece)
        self.seconds += seconds
        self.num_pieces += 1
        self._kept += piece.left
        if self.phase is not Phase.ADRIFT:
            self.outcomes[piece.first : piece.last] = outcomes

    def cut(self, outcome: Outcome) -> None:
        """Nobody takes any more of it: the rest ends like this."""
        self.outcomes[self.begun :] = [outcome] * (len(self.keys) - self.begun)
        self._kept += self.removes[self.begun :]
        self.begun = len(self.keys)

    def end(self) -> None:
        """Nothing of it is queued or runs any more."""
        is_begun = self.phase is not Phase.QUEUED and self.begun >= len(self.keys)
        self.left = [*self._kept, *(() if is_begun else self.removes[self.begun :])]
        self.phase = Phase.OVER


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
        is_adrift: Workers are still inside the tier: ``Returned`` follows, and until then the buffers that
            are ``UNCERTAIN`` must not be used.
        is_late: The deadline ended it, begun or not: no wrapper has seen what was not over.
        is_refused: Nobody will begin it, since no thread has come back from the tier.
    """

    call: Call
    outcomes: list[Outcome]
    bad: Sequence[int]
    is_adrift: bool = False
    is_late: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Faltered:
    """A piece of a load has not brought all, and the call is not over: who needs it need not wait.

    Attributes:
        call: Which call; its end is told as always.
        first: Position of the piece's first key.
        outcomes: What the piece gave.
    """

    call: Call
    first: int
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Returned:
    """The last worker of a call that was adrift has come back: its buffers are nobody's now."""

    call: Call


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a worker wants the chain's thread to do; run by ``drain``'s caller."""

    run: Callable[[], None]


Message = Completed | Faltered | Returned | Notice


def completed(call: Call) -> Completed:
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
