"""Counts calls, blocks and bytes by tier, operation and status, and names in the log what failed.

Threads: any.  Two that fail in the same way at the same moment may both write their line.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from ..keys import BlockKey
from ..metrics import Metrics
from ..tier import Outcome, Status, Tier
from .base import WrappedTier
from .breaker import IS_DOWN, NEUTRAL

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
"""A tier fails at every request: one line in so many seconds for each operation and status."""


class MeteredTier(WrappedTier):
    """Outermost: sees what the chain sees."""

    def __init__(self, inner: Tier, name: str, metrics: Metrics) -> None:
        super().__init__(inner)
        self._name = name
        self._metrics = metrics
        self._logged: dict[tuple[str, Status], float] = {}

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
        if telling := [outcome for outcome in outcomes if _is_telling(outcome)]:
            self._name_failures(operation, telling, len(outcomes))
        return outcomes

    def _name_failures(self, operation: str, telling: Sequence[Outcome], total: int) -> None:
        """One line for each kind of failure, with the first block's reason; what was not tried needs none.

        A miss with a reason is one: the block is there, and cannot be used here.
        """
        kinds = Counter(outcome.status for outcome in telling)
        for status in kinds:
            reason = next(outcome.reason for outcome in telling if outcome.status is status)
            now = time.monotonic()
            if (
                reason.startswith(IS_DOWN)
                or now - self._logged.get((operation, status), -LOG_EVERY_S) < LOG_EVERY_S
            ):
                continue
            self._logged[operation, status] = now
            logger.warning(
                "[FlexKV] tier %s: %s of %d%s blocks failed (%s): %s",
                self._name,
                operation,
                kinds[status],
                f" of {total}" if kinds[status] < total else "",
                status.value,
                reason,
            )


def _is_telling(outcome: Outcome) -> bool:
    if outcome.status is Status.OK or outcome.status in NEUTRAL:
        return False
    return outcome.status is not Status.MISS or bool(outcome.reason)
