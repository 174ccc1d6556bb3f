"""The reference tier: a dictionary.  What the kit is tested with, and the shortest example of a tier.

Threads: one lock round the dictionary, held for a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flexkv_core.errors import TierClosedError, UnsupportedOperationError
from flexkv_core.keys import BlockKey
from flexkv_core.tier import (
    DONE,
    MISS,
    Outcome,
    Status,
    StoredBlock,
    Tier,
    TierCapabilities,
    TierContext,
    TierUsage,
    failed,
    loaded,
)


@dataclass
class Medium:
    """What outlives a ``MemoryTier``: give the same one to two tiers, and they share or restart."""

    values: dict[BlockKey, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryTier(Tier):
    """Values in a dictionary, with whatever capabilities a test wants to see honoured."""

    def __init__(
        self,
        context: TierContext,
        capabilities: TierCapabilities | None = None,
        medium: Medium | None = None,
    ) -> None:
        """Open over ``medium`` (default: an empty one of its own)."""
        self.capabilities = capabilities or TierCapabilities(can_list=True)
        self.context = context
        self.medium = medium or Medium()
        self.is_closed = False

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._open("lookup"):
            found = [self.medium.values.get(key) for key in keys]
            return [MISS if value is None else Outcome(Status.OK, len(value)) for value in found]

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        with self._open("load"):
            return [self._load_one(key, view) for key, view in zip(keys, into, strict=True)]

    def _load_one(self, key: BlockKey, view: memoryview) -> Outcome:
        value = self.medium.values.get(key)
        if value is None:
            return MISS
        if len(value) > len(view):
            return failed(Status.CORRUPT, f"value of {len(value)} B, buffer of {len(view)} B")
        view[: len(value)] = value
        return loaded(len(value))

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        with self._open("store"):
            return [self._store_one(key, value) for key, value in zip(keys, values, strict=True)]

    def _store_one(self, key: BlockKey, value: memoryview) -> Outcome:
        limit = self.capabilities.max_value_bytes
        if limit and len(value) > limit:
            return failed(Status.INVALID, f"value of {len(value)} B, at most {limit} B")
        kept = self.medium.values
        used = sum(map(len, kept.values())) - len(kept.get(key, b""))
        if self.capabilities.capacity_bytes and used + len(value) > self.capabilities.capacity_bytes:
            return failed(Status.NO_SPACE, "full")
        kept[key] = bytes(value)
        return Outcome(Status.OK, len(value))

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._open("evict"):
            return [MISS if self.medium.values.pop(key, None) is None else DONE for key in keys]

    def list_blocks(self) -> Iterator[list[StoredBlock]]:
        if not self.capabilities.can_list:
            raise UnsupportedOperationError("this tier cannot list", operation="list")
        with self._open("list"):
            rows = [
                StoredBlock(key, len(value), value[: self.context.head_bytes])
                for key, value in self.medium.values.items()
            ]
        return iter([rows])

    def usage(self) -> TierUsage:
        with self.medium.lock:
            sizes = [len(value) for value in self.medium.values.values()]
        return TierUsage(len(sizes), sum(sizes), self.capabilities.capacity_bytes)

    def close(self) -> None:
        with self.medium.lock:
            self.is_closed = True

    def _open(self, operation: str) -> _Entry:
        return _Entry(self, operation)


class _Entry:
    """The lock, refused after ``close``."""

    def __init__(self, tier: MemoryTier, operation: str) -> None:
        self._tier = tier
        self._operation = operation

    def __enter__(self) -> None:
        self._tier.medium.lock.acquire()
        if self._tier.is_closed:
            self._tier.medium.lock.release()
            name = self._tier.context.name
            raise TierClosedError(f"tier {name} is closed", tier=name, operation=self._operation)

    def __exit__(self, *_: object) -> None:
        self._tier.medium.lock.release()
