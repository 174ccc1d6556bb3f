"""A tier round any tier that misbehaves: by script, or by a seeded schedule.

    tier = FaultTier(MemoryTier(context))
    tier.add("load", Fault(FaultKind.HANG))          # the next load call hangs until tier.release()
    tier.always("store", Fault(FaultKind.RAISE, error=TierUnavailableError("down")))
    tier = FaultTier(inner, SeededFaults(seed=7, rate=0.2))

Threads: any.  ``_lock`` covers the script, the log and ``_round``, and is never held during a call; it is
taken inside ``_gate``, which covers who hangs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from flexkv_core.errors import TierUnavailableError
from flexkv_core.keys import BlockKey
from flexkv_core.tier import Outcome, StoredBlock, Tier, TierUsage, failed, loaded

from .clock import FakeClock
from .fault_plan import LOAD_KINDS, Fault, FaultKind, Schedule


class FaultTier(Tier):
    """A tier that does what ``inner`` does, except when it is told to misbehave.

    It is never a ``DirectTier``: round one it shows an ordinary tier with the same values.
    ``calls`` logs every call as ``(operation, number of keys)``.
    """

    def __init__(self, inner: Tier, schedule: Schedule | None = None, clock: FakeClock | None = None) -> None:
        """Wrap ``inner``; ``schedule`` is asked where no script stands; ``clock`` serves DELAY."""
        self.inner = inner
        self.capabilities = replace(inner.capabilities, direct_slots=False)
        self.calls: list[tuple[str, int]] = []
        self._schedule = schedule
        self._clock = clock or FakeClock()
        self._lock = threading.Lock()
        self._once: dict[str, deque[Fault]] = {}
        self._always: dict[str, Fault] = {}
        self._seen: dict[BlockKey, bytes] = {}
        self._gate = threading.Condition()
        self._hanging = 0
        self._round = 0

    # -- the script

    def add(self, operation: str, *faults: Fault) -> None:
        """Strike the next calls of ``operation`` (``lookup``, ``load``, ``store``, ``evict``, ``list``)."""
        with self._lock:
            self._once.setdefault(operation, deque()).extend(faults)

    def always(self, operation: str, fault: Fault | None) -> None:
        """Strike every call of ``operation`` from now on; None ends it."""
        with self._lock:
            self._always.pop(operation, None)
            if fault is not None:
                self._always[operation] = fault

    def release(self) -> None:
        """Let every call go on that hangs now, or has been told to and is on its way there."""
        with self._gate:
            with self._lock:
                self._round += 1
            self._hanging = 0
            self._gate.notify_all()

    @property
    def num_hanging(self) -> int:
        """Calls that hang now."""
        return self._hanging

    def wait_hanging(self, count: int = 1, timeout_s: float = 60.0) -> None:
        """Block until ``count`` calls hang.  Raises AssertionError on expiry.

        For calls that come by themselves: where they come only while the test goes on (messages must be taken
        in first, say), wait for ``num_hanging``.
        """
        with self._gate:
            if not self._gate.wait_for(lambda: self._hanging >= count, timeout_s):
                raise AssertionError(f"{self._hanging} calls hang, {count} expected")

    # -- the tier

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._run("lookup", keys, lambda some, _: self.inner.lookup(some), ())

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        return self._run("load", keys, self.inner.load, into)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        with self._lock:
            self._seen.update((key, bytes(value)) for key, value in zip(keys, values, strict=True))
        return self._run("store", keys, self.inner.store, values)

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._run("evict", keys, lambda some, _: self.inner.evict(some), ())

    def list_blocks(self) -> Iterator[list[StoredBlock]]:
        fault, _ = self._next("list", [])
        if fault is not None and fault.kind is FaultKind.RAISE:
            raise fault.error or TierUnavailableError("made by the test", operation="list")
        return self.inner.list_blocks()

    def usage(self) -> TierUsage:
        return self.inner.usage()

    def close(self) -> None:
        self.release()
        self.inner.close()

    # -- how

    def _next(self, operation: str, keys: Sequence[BlockKey]) -> tuple[Fault | None, int]:
        """What strikes this call, and the round that it hangs in."""
        with self._lock:
            self.calls.append((operation, len(keys)))
            once, entered = self._once.get(operation), self._round
            if once:
                return once.popleft(), entered
            if operation in self._always:
                return self._always[operation], entered
        return (self._schedule(operation, keys) if self._schedule is not None else None), entered

    def _run(
        self,
        operation: str,
        keys: Sequence[BlockKey],
        call: Callable[[Sequence[BlockKey], Sequence[memoryview]], list[Outcome]],
        views: Sequence[memoryview],
    ) -> list[Outcome]:
        fault, entered = self._next(operation, keys)
        if fault is None or (fault.kind in LOAD_KINDS and operation != "load"):
            return call(keys, views)
        if fault.kind is FaultKind.RAISE:
            raise fault.error or TierUnavailableError("made by the test", operation=operation)
        if fault.kind is FaultKind.HANG:
            self._hang(entered)
        elif fault.kind is FaultKind.DELAY:
            self._clock.sleep(fault.seconds)
        if fault.kind in (FaultKind.FAIL_KEYS, FaultKind.LIE):
            return self._skip_some(fault, keys, views, call)
        outcomes = call(keys, views)
        if fault.kind in LOAD_KINDS:
            return self._spoil(fault, keys, views, outcomes)
        returned: list[Outcome] = _nonsense(fault.kind, outcomes)
        return returned

    def _hang(self, entered: int) -> None:
        """Until the round is another than that in which the call was told to hang."""
        with self._gate:
            if self._round == entered:
                self._hanging += 1
                self._gate.notify_all()
                self._gate.wait_for(lambda: self._round > entered)

    def _skip_some(
        self,
        fault: Fault,
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        call: Callable[[Sequence[BlockKey], Sequence[memoryview]], list[Outcome]],
    ) -> list[Outcome]:
        told = loaded(len(views[0]) if views else 0)
        if fault.kind is FaultKind.FAIL_KEYS:
            told = failed(fault.status, "made by the test", fault.buffer)
        rest = [place for place in range(len(keys)) if not fault.strikes(place)]
        done = call([keys[place] for place in rest], [views[place] for place in rest] if views else ())
        by_place = dict(zip(rest, done, strict=True))
        return [by_place.get(place, told) for place in range(len(keys))]

    def _spoil(
        self,
        fault: Fault,
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        outcomes: list[Outcome],
    ) -> list[Outcome]:
        for place, (key, view, outcome) in enumerate(zip(keys, views, outcomes, strict=True)):
            if not fault.strikes(place) or not (outcome.is_ok or fault.kind is FaultKind.REPLACE):
                continue
            size = outcome.num_bytes
            if fault.kind is FaultKind.FLIP:
                view[fault.bit // 8 % size] ^= 1 << fault.bit % 8
            elif fault.kind is FaultKind.TRUNCATE:
                outcomes[place] = loaded(size // 2)
                view[size // 2 :] = bytes(len(view) - size // 2)
            else:
                other = fault.value if fault.kind is FaultKind.REPLACE else self._other_than(key)
                view[: len(other)] = other
                outcomes[place] = loaded(len(other) or size)
        return outcomes

    def _other_than(self, key: BlockKey) -> bytes:
        with self._lock:
            return next((value for seen, value in self._seen.items() if seen != key), b"")


def _nonsense(kind: FaultKind, outcomes: list[Outcome]) -> Any:
    if kind is FaultKind.RETURN_NONE:
        return None
    if kind is FaultKind.RETURN_SHORT:
        return outcomes[:-1]
    if kind is FaultKind.RETURN_LONG:
        return [*outcomes, *outcomes[-1:]]
    if kind is FaultKind.RETURN_JUNK:
        return [outcome.status.value for outcome in outcomes]
    return outcomes
