"""Blocks in a host pool whose slots the device copies to and from directly.

Threads: ``_lock`` covers the dictionary of published slots; the pool has a lock of its own, taken
inside.  Copies in ``load`` and ``store`` run under it too, so that ``close`` unmaps nothing that is
being copied; copying memoryviews holds the interpreter's lock anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import repeat

from flexkv_core import (
    DONE,
    MISS,
    BlockKey,
    DirectTier,
    HostRegion,
    Outcome,
    SlotPool,
    Status,
    TierCapabilities,
    TierClosedError,
    TierContext,
    TierUsage,
    failed,
    loaded,
)

from .config import CpuConfig

_PAGE = 4096


class CpuTier(DirectTier):
    """Published slots by key, over one host region."""

    def __init__(self, config: CpuConfig, context: TierContext) -> None:
        """Map the pool.  Raises HostMemoryError, with the numbers, before anything is allocated."""
        slot_bytes = -(-context.value_bytes // _PAGE) * _PAGE
        num_slots = config.capacity // slot_bytes
        self._name = context.name
        self._region = HostRegion(num_slots * slot_bytes, huge_pages=config.huge_pages)
        self._pool = SlotPool(self._region, slot_bytes, num_slots)
        self._lock = threading.Lock()
        self._published: dict[BlockKey, int] = {}
        self._sizes: dict[int, int] = {}
        self._is_closed = False
        self.capabilities = TierCapabilities(
            direct_slots=True,
            capacity_bytes=num_slots * slot_bytes,
            max_value_bytes=slot_bytes,
            max_batch=1024,
            max_concurrency=8,
        )

    @property
    def slots(self) -> SlotPool:
        return self._pool

    def reserve(self, count: int) -> list[int]:
        self._check_open("reserve")
        return self._pool.take(count)

    def publish(self, keys: Sequence[BlockKey], slots: Sequence[int], sizes: Sequence[int]) -> None:
        with self._lock:
            self._publish(keys, slots, sizes)

    def _publish(self, keys: Sequence[BlockKey], slots: Sequence[int], sizes: Sequence[int]) -> None:
        published = self._published
        old = []
        if not published.keys().isdisjoint(keys):
            old = [published[key] for key in keys if key in published]
        self._sizes.update(zip(slots, sizes, strict=True))
        published.update(zip(keys, slots, strict=True))
        self._pool.give(old)

    def release(self, slots: Sequence[int]) -> None:
        self._pool.give(slots)

    def borrow(self, keys: Sequence[BlockKey]) -> list[int]:
        published = self._published
        return list(map(published.get, keys, repeat(-1)))

    def withdraw(self, keys: Sequence[BlockKey]) -> list[int]:
        with self._lock:
            return list(map(self._published.pop, keys, repeat(-1)))

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        self._check_open("lookup")
        slots = self.borrow(keys)
        return [MISS if slot < 0 else Outcome(Status.OK, self._sizes[slot]) for slot in slots]

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        self._check_open("load")
        return [self._load_one(key, view) for key, view in zip(keys, into, strict=True)]

    def _load_one(self, key: BlockKey, view: memoryview) -> Outcome:
        # Under the lock, so that no eviction gives the slot to another block meanwhile.
        with self._lock:
            self._check_open("load")
            slot = self._published.get(key, -1)
            if slot < 0:
                return MISS
            num_bytes = self._sizes[slot]
            if num_bytes > len(view):
                return failed(Status.CORRUPT, f"value of {num_bytes} B, buffer of {len(view)} B")
            view[:num_bytes] = self._pool.view(slot)[:num_bytes]
            return loaded(num_bytes)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        self._check_open("store")
        return [self._store_one(key, value) for key, value in zip(keys, values, strict=True)]

    def _store_one(self, key: BlockKey, value: memoryview) -> Outcome:
        if len(value) > self._pool.slot_bytes:
            return failed(Status.INVALID, f"value of {len(value)} B, slot of {self._pool.slot_bytes} B")
        with self._lock:
            self._check_open("store")
            slots = self._pool.take(1)
            if not slots:
                return failed(Status.NO_SPACE, "the host pool is full")
            self._pool.view(slots[0])[: len(value)] = value
            self._publish([key], slots, [len(value)])
            return Outcome(Status.OK, len(value))

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        self._check_open("evict")
        slots = self.withdraw(keys)
        self._pool.give([slot for slot in slots if slot >= 0])
        return [MISS if slot < 0 else DONE for slot in slots]

    def usage(self) -> TierUsage:
        taken = self._pool.capacity - self._pool.num_free
        return TierUsage(
            len(self._published), taken * self._pool.slot_bytes, self.capabilities.capacity_bytes
        )

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._published.clear()
        self._region.close()

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise TierClosedError(f"tier {self._name} is closed", tier=self._name, operation=operation)


def open_tier(config: CpuConfig, context: TierContext) -> CpuTier:
    """Open a host pool."""
    return CpuTier(config, context)
