"""A tier that is down answers at once, is probed, and comes back by itself.

Failures in a row are counted for each operation: a store that answers questions and brings nothing must
not look healthy for its answers.  It comes back with any call that succeeds, and goes at the next failure
of the operation that took it down.

While one call probes, others wait for its answer: they are most often parts of one load or store, cut for
several threads, of which a single part would be of no use.

Threads: any; ``_answered`` covers the state, and no call is made while it is held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ..keys import BlockKey
from ..tier import BufferState, Outcome, Status, Tier, failed
from .base import WrappedTier
from .deadline import remaining_s, running_call

DOWN = frozenset({Status.UNAVAILABLE, Status.TIMEOUT, Status.DENIED, Status.INVALID})
"""Statuses that say something about the tier, not about a block.

``INVALID`` for a whole call, again and again, is a driver or a server that cannot be talked to: its
promises would cost every request a failed load, for ever.
"""

NEUTRAL = frozenset({Status.LIMITED})
"""Statuses of calls that never reached the tier."""

IS_DOWN = "the tier is down: "
"""How the reason of a call begins that was not let through."""

StateChanged = Callable[[str, str], None]
"""Called with the new state (``up``, ``down``, ``probing``) and the reason."""


class BreakerTier(WrappedTier):
    """Counts failures in a row, by operation; at the limit the tier is down until a probe succeeds."""

    def __init__(
        self,
        inner: Tier,
        *,
        failures: int,
        reset_s: float,
        on_change: StateChanged = lambda _state, _reason: None,
        clock: Callable[[], float] = time.monotonic,
        most_wait_s: float = 5.0,
    ) -> None:
        """A breaker that opens after ``failures`` failed calls and probes every ``reset_s`` seconds.

        ``most_wait_s`` is how long a call waits for a probe, if its deadline leaves it so long: what takes
        longer is no tier that anybody should wait for.
        """
        super().__init__(inner)
        self._limit = failures
        self._reset_s = reset_s
        self._on_change = on_change
        self._clock = clock
        self._most_wait_s = most_wait_s
        self._answered = threading.Condition()
        self._failures: dict[str, int] = {}
        self._down_since: float | None = None
        self._prober: object | None = None
        self._reason = ""

    @property
    def is_up(self) -> bool:
        """Whether calls are let through, apart from probes."""
        return self._down_since is None

    @property
    def reason(self) -> str:
        """What the last failure said."""
        return self._reason

    @property
    def wants_probe(self) -> bool:
        """Whether the next call would be let through as a probe."""
        down = self._down_since
        return down is not None and self._prober is None and self._clock() - down >= self._reset_s

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._guarded("lookup", len(keys), lambda: self.inner.lookup(keys))

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        return self._guarded("load", len(keys), lambda: self.inner.load(keys, into))

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        return self._guarded("store", len(keys), lambda: self.inner.store(keys, values))

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._guarded("evict", len(keys), lambda: self.inner.evict(keys))

    def report(
        self,
        status: Status,
        reason: str,
        operation: str = "lookup",
        *,
        is_final: bool = False,
        call: object | None = None,
    ) -> None:
        """Count a call that was given up from outside (a deadline) as what it was.

        Args:
            status: What it was.
            reason: For the log.
            operation: What it did.
            is_final: The tier is down at once: a request has waited for it as long as any may, and whoever
                comes next must not wait as well.
            call: Which call, pieces of which ``within`` was told: if one was probing, another may.
        """
        if self._limit and status in DOWN:
            self._note(operation, call, is_down=True, reason=reason, is_final=is_final)

    def _guarded(self, operation: str, count: int, run: Callable[[], list[Outcome]]) -> list[Outcome]:
        call = running_call() or object()
        if self._limit and not self._may_pass(call):
            reason = f"{IS_DOWN}{self._reason}"
            return [failed(Status.UNAVAILABLE, reason, BufferState.UNTOUCHED)] * count
        try:
            outcomes = run()
        except BaseException as exc:
            if self._limit:  # or a probe that broke would be under way for ever
                self._note(operation, call, is_down=True, reason=repr(exc))
            raise
        if self._limit and outcomes and all(outcome.status in NEUTRAL for outcome in outcomes):
            with self._answered:
                self._end_probe(call)  # nothing was learnt: the next call may find out
        elif self._limit and outcomes:
            bad = next((outcome for outcome in outcomes if outcome.status in DOWN), None)
            is_down = bad is not None and all(o.status in DOWN for o in outcomes)
            self._note(operation, call, is_down=is_down, reason=bad.reason if bad is not None else "")
        return outcomes

    def _may_pass(self, call: object) -> bool:
        if self._down_since is None:  # as always: nothing to wait for
            return True
        with self._answered:
            self._answered.wait_for(
                lambda: self._prober is None or self._down_since is None,
                timeout=max(0.0, min(self._most_wait_s, remaining_s())),
            )
            if self._down_since is None:
                return True
            if self._prober is not None or self._clock() - self._down_since < self._reset_s:
                return False
            self._prober = call
        self._on_change("probing", self._reason)
        return True

    def _end_probe(self, call: object | None) -> None:
        """A call is over or given up: if it was probing, nobody is.  Called under the lock."""
        if call is not None and call in (self._prober, getattr(self._prober, "whole", None)):
            self._prober = None
            self._answered.notify_all()

    def _note(
        self, operation: str, call: object | None, *, is_down: bool, reason: str, is_final: bool = False
    ) -> None:
        change: tuple[str, str] | None = None
        with self._answered:
            was_down = self._down_since is not None
            self._end_probe(call)
            if not is_down:
                self._failures.pop(operation, None)
                self._down_since = None
                self._answered.notify_all()
                if was_down:
                    change = ("up", "")
            else:
                failures = self._failures[operation] = self._failures.get(operation, 0) + 1
                self._reason = reason
                if was_down or is_final or failures >= self._limit:
                    self._down_since = self._clock()
                    if not was_down:
                        change = ("down", reason)
        if change is not None:
            self._on_change(*change)
