"""Whatever a driver raises or returns becomes one outcome per key, and no more calls at once than it takes.

The only place where a driver's exceptions are caught.  A ``TierError`` has its status from its
class, and is named in the log by the meter; anything else is a bug of the driver: logged here with its
trace, once in a while, and counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ..errors import (
    CorruptBlockError,
    TierAccessError,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    UnsupportedOperationError,
)
from ..keys import BlockKey
from ..metrics import Metrics
from ..tier import BufferState, Outcome, Status, Tier, failed
from .base import WrappedTier
from .turns import Turns

logger = logging.getLogger(__name__)

_STATUS_OF: Sequence[tuple[type[TierError], Status]] = (
    (TierTimeoutError, Status.TIMEOUT),
    (TierUnavailableError, Status.UNAVAILABLE),
    (TierFullError, Status.NO_SPACE),
    (TierAccessError, Status.DENIED),
    (TierClosedError, Status.CANCELLED),
    (CorruptBlockError, Status.CORRUPT),
    (UnsupportedOperationError, Status.UNSUPPORTED),
)
_LOG_EVERY_S = 10.0
_READS = frozenset({"lookup", "load"})
_NO_TURN = "the driver takes no more calls at once: no turn before the deadline"
_STUCK = "the driver takes no more calls at once, and none has come back by its deadline"
_BLANK = bytes(8)
"""Longer than no magic number: a buffer that begins with it holds no value."""


class GuardedTier(WrappedTier):
    """A tier that never raises from a data method and always returns as many outcomes as keys.

    A buffer's former content may be the very value that is asked for: it is made none before the driver
    is called, so that only what this call wrote can pass for a value.
    """

    def __init__(self, inner: Tier, name: str, metrics: Metrics, turns: Turns | None = None) -> None:
        """Guard ``inner``; calls take ``turns`` where there are more threads than it takes calls at once."""
        super().__init__(inner)
        self._turns = turns
        self._name = name
        self._metrics = metrics
        self._last_log = -_LOG_EVERY_S

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._call("lookup", len(keys), lambda: self.inner.lookup(keys))

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        for view in into:
            view[: len(_BLANK)] = _BLANK
        return self._call("load", len(keys), lambda: self.inner.load(keys, into))

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        return self._call("store", len(keys), lambda: self.inner.store(keys, values))

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._call("evict", len(keys), lambda: self.inner.evict(keys))

    def check_health(self) -> None:
        if self._turns is None:
            return self.inner.check_health()
        with self._turns.turn(reads=True) as has_turn:
            if not has_turn:
                raise TierTimeoutError(_NO_TURN, tier=self._name, operation="check_health")
            return self.inner.check_health()

    def _call(self, operation: str, count: int, run: Callable[[], list[Outcome]]) -> list[Outcome]:
        if self._turns is None:
            return self._checked(operation, count, run)
        with self._turns.turn(reads=operation in _READS) as has_turn:
            if not has_turn:
                return [self._no_turn(self._turns)] * count
            return self._checked(operation, count, run)

    @staticmethod
    def _no_turn(turns: Turns) -> Outcome:
        """Others were first, which says nothing of the tier; that nobody comes back says all of it."""
        if turns.is_stuck:
            return failed(Status.TIMEOUT, _STUCK)
        return failed(Status.LIMITED, _NO_TURN)

    def _checked(self, operation: str, count: int, run: Callable[[], list[Outcome]]) -> list[Outcome]:
        try:
            outcomes = run()
        except TierError as exc:
            status = next((s for kind, s in _STATUS_OF if isinstance(exc, kind)), Status.INVALID)
            reason = str(exc).removeprefix(f"tier {self._name}: ")  # who tells it names the tier himself
            return [failed(status, reason)] * count
        except Exception as exc:  # noqa: BLE001 - a foreign driver may raise anything; it must not reach the engine
            reason = f"{type(exc).__name__}: {exc}"
            self._metrics.count("driver_bugs", tier=self._name, operation=operation)
            self._log_bug(operation, count, reason, trace=True)
            return [failed(Status.UNAVAILABLE, reason, BufferState.UNTOUCHED)] * count
        if (
            isinstance(outcomes, list)
            and len(outcomes) == count
            and all(isinstance(outcome, Outcome) for outcome in outcomes)
        ):
            return outcomes
        self._metrics.count("driver_bugs", tier=self._name, operation=operation)
        reason = f"the driver returned nonsense: {type(outcomes).__name__} for {count} keys"
        self._log_bug(operation, count, reason, trace=False)
        return [failed(Status.INVALID, reason)] * count

    def _log_bug(self, operation: str, count: int, reason: str, *, trace: bool) -> None:
        now = time.monotonic()
        if now - self._last_log < _LOG_EVERY_S:
            return
        self._last_log = now
        logger.warning(
            "[FlexKV] tier %s: a fault of the driver in %s of %d blocks: %s",
            self._name,
            operation,
            count,
            reason,
            exc_info=trace,
        )
