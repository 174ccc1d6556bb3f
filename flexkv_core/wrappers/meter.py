"""Counts calls, blocks and bytes by tier, operation and status, and how long calls take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from ..keys import BlockKey
from ..metrics import Metrics
from ..tier import Outcome, Tier
from .base import WrappedTier


class MeteredTier(WrappedTier):
    """Outermost: sees what the chain sees."""

    def __init__(self, inner: Tier, name: str, metrics: Metrics) -> None:
        super().__init__(inner)
        self._name = name
        self._metrics = metrics

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._metered("lookup", lambda: self.inner.lookup(keys))

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        return self._metered("load", lambda: self.inner.load(keys, into))

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        return self._metered("store", lambda: self.inner.store(keys, values))

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._metered("evict", lambda: self.inner.evict(keys))

    def _metered(self, operation: str, run: Callable[[], list[Outcome]]) -> list[Outcome]:
        started = time.perf_counter()
        outcomes = run()
        seconds = time.perf_counter() - started
        self._metrics.observe_seconds("tier_call_seconds", seconds, tier=self._name, operation=operation)
        for status, count in Counter(outcome.status.value for outcome in outcomes).items():
            self._metrics.count("tier_blocks", count, tier=self._name, operation=operation, status=status)
        moved = sum(outcome.num_bytes for outcome in outcomes if outcome.is_ok)
        if moved and operation != "lookup":
            self._metrics.count("tier_bytes", moved, tier=self._name, operation=operation)
        return outcomes
