"""Tries again what may succeed on another try, never beyond the call's deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..keys import BlockKey
from ..tier import BufferState, Outcome, Status, Tier
from .base import WrappedTier
from .deadline import remaining_s

RETRYABLE = frozenset({Status.UNAVAILABLE, Status.TIMEOUT})
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class RetriedTier(WrappedTier):
    """Asks again for the keys whose outcome was retryable, after a growing, jittered pause."""

    def __init__(self, inner: Tier, retries: int, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._retries = retries
        self._sleep = sleep

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._again(keys, (), lambda k, _: self.inner.lookup(k))

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        return self._again(keys, into, self.inner.load)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        return self._again(keys, values, self.inner.store)

    def _again(
        self,
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        call: Callable[[Sequence[BlockKey], Sequence[memoryview]], list[Outcome]],
    ) -> list[Outcome]:
        outcomes = call(keys, views)
        pause = _FIRST_PAUSE_S
        for _ in range(self._retries):
            # A buffer that was begun is written anew: a call that has returned writes no more.
            again = [i for i, outcome in enumerate(outcomes) if outcome.status in RETRYABLE]
            wait = pause * (0.5 + random.random())  # noqa: S311 - jitter, not a secret
            if not again or remaining_s() <= wait:
                break
            self._sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            retried = call([keys[i] for i in again], [views[i] for i in again] if views else ())
            for i, outcome in zip(again, retried, strict=True):
                outcomes[i] = _after(outcomes[i], outcome)
        return outcomes


def _after(before: Outcome, outcome: Outcome) -> Outcome:
    """A buffer that one try has begun to write is not untouched because the next one did not get so far."""
    if not outcome.is_ok and before.buffer is BufferState.UNCERTAIN:
        return replace(outcome, buffer=BufferState.UNCERTAIN)
    return outcome
