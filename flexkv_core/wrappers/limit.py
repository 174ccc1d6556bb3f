"""A tier that is read and written no faster than its configuration allows.

A call waits in its worker's thread, never in the scheduler's, and only where its turn comes early enough
before the call's deadline for what such a call took lately; otherwise it ends at once as LIMITED, and is
counted: what was to be loaded is computed, what was to be stored is not.  What a load will bring is
estimated before and settled after.

Threads: any; ``Allowance`` locks itself, and nobody waits while it is locked.  Estimates are not locked:
that one of two observations is lost does no harm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..keys import BlockKey
from ..metrics import Metrics
from ..models import LimitConfig, LimitsConfig
from ..tier import Outcome, Status, Tier, failed
from .base import WrappedTier
from .deadline import remaining_s

Clock = Callable[[], float]
_WEIGHT = 0.2
"""How much one call says of the next one's length and time."""


class Allowance:
    """What may pass: it grows with time, up to a burst, and may be overdrawn by one call.

    A call that takes more than there is waits until it would be there; later calls wait behind it.
    """

    def __init__(self, per_s: float, burst_s: float, clock: Clock) -> None:
        """``per_s`` units a second; ``burst_s`` seconds' worth are saved up at most."""
        self._per_s = per_s
        self._most = per_s * burst_s
        self._left = self._most
        self._clock = clock
        self._at = clock()
        self._lock = threading.Lock()

    def take(self, amount: float, most_wait_s: float) -> float | None:
        """Take ``amount``; how long to wait before it may pass, or None (and nothing taken) if too long."""
        with self._lock:
            self._grow()
            wait_s = max(0.0, (min(amount, self._most) - self._left) / self._per_s)
            if wait_s > most_wait_s:
                return None
            self._left -= amount
            return wait_s

    def give(self, amount: float) -> None:
        """Give back what was taken and not used; a negative amount takes more."""
        with self._lock:
            self._grow()
            self._left = min(self._most, self._left + amount)

    def _grow(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now


@dataclass(frozen=True)
class _Permit:
    """What a call has taken; None where it may not pass."""

    wait_s: float | None
    num_bytes: float


class _Direction:
    """The limits of one direction."""

    def __init__(self, config: LimitConfig, clock: Clock) -> None:
        self._bytes = Allowance(config.bytes_per_s, config.burst_s, clock) if config.bytes_per_s else None
        per_s = config.operations_per_s
        self._values = Allowance(per_s, config.burst_s, clock) if per_s else None
        self._clock = clock
        self._call_s = 0.0

    def ask(self, num_values: int, num_bytes: float) -> _Permit:
        # One whose turn came at the last moment would be given up inside of the tier, and held against it.
        left_s = remaining_s()
        most_wait_s = max(min(left_s, 0.0), left_s - self._call_s)
        first = self._values.take(num_values, most_wait_s) if self._values is not None else 0.0
        if first is None:
            return _Permit(None, 0)
        second = self._bytes.take(num_bytes, most_wait_s) if self._bytes is not None else 0.0
        if second is None:
            if self._values is not None:
                self._values.give(num_values)
            return _Permit(None, 0)
        return _Permit(max(first, second), num_bytes)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Note how long a call takes, apart from its wait."""
        began = self._clock()
        try:
            yield
        finally:
            self._call_s += _WEIGHT * (self._clock() - began - self._call_s)

    def settle(self, permit: _Permit, num_bytes: float) -> None:
        if self._bytes is not None:
            self._bytes.give(permit.num_bytes - num_bytes)


class LimitedTier(WrappedTier):
    """Loads and stores pass at the configured rates; lookups and removals are free."""

    def __init__(
        self,
        inner: Tier,
        config: LimitsConfig,
        *,
        name: str,
        metrics: Metrics,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """Limit ``inner``.

        Args:
            inner: The tier.
            config: Its limits.
            name: Its name, for counters.
            metrics: Where to count.
            clock: Monotonic seconds.
            sleep: Waits so many seconds; default: one that ``interrupt`` ends.
        """
        super().__init__(inner)
        self._name = name
        self._metrics = metrics
        self._loads = _Direction(config.load, clock)
        self._stores = _Direction(config.store, clock)
        self._stop = threading.Event()
        self._sleep = sleep or self._stop.wait
        self._load_bytes = 0.0

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        expected = len(keys) * (self._load_bytes or float(max(map(len, into), default=0)))
        permit = self._loads.ask(len(keys), expected)
        if not self._may_pass(permit, "load", len(keys)):
            return self._refused(len(keys))
        read = 0.0
        try:
            with self._loads.timed():
                outcomes = self.inner.load(keys, into)
            read = float(sum(outcome.num_bytes for outcome in outcomes if outcome.is_ok))
            good = sum(outcome.is_ok for outcome in outcomes)
            if good:
                average = read / good
                self._load_bytes += _WEIGHT * (average - self._load_bytes) if self._load_bytes else average
            return outcomes
        finally:
            self._loads.settle(permit, read)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        permit = self._stores.ask(len(keys), sum(map(len, values)))
        if not self._may_pass(permit, "store", len(keys)):
            return self._refused(len(keys))
        with self._stores.timed():
            return self.inner.store(keys, values)

    def interrupt(self) -> None:
        """The chain closes: nobody waits any more, and what waits ends as LIMITED."""
        self._stop.set()

    def _may_pass(self, permit: _Permit, operation: str, count: int) -> bool:
        if permit.wait_s:
            self._metrics.observe_seconds(
                "limit_wait_seconds", permit.wait_s, tier=self._name, operation=operation
            )
            self._sleep(permit.wait_s)
        if permit.wait_s is None or (permit.wait_s and self._stop.is_set()):
            self._metrics.count("limited_blocks", count, tier=self._name, operation=operation)
            return False
        return True

    @staticmethod
    def _refused(count: int) -> list[Outcome]:
        return [failed(Status.LIMITED, "the tier's rate limit: no turn before the deadline")] * count
