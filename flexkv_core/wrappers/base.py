"""What all wrappers share: everything that they do not change is the inner tier's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..buffers import HostRegion
from ..keys import BlockKey
from ..tier import Outcome, StoredBlock, Tier, TierUsage


class WrappedTier(Tier):
    """Passes every call on."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self.inner.lookup(keys)

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        return self.inner.load(keys, into)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        return self.inner.store(keys, values)

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self.inner.evict(keys)

    def close(self) -> None:
        self.inner.close()

    def list_blocks(self) -> Iterator[list[StoredBlock]]:
        return self.inner.list_blocks()

    def usage(self) -> TierUsage:
        return self.inner.usage()

    def check_health(self) -> None:
        self.inner.check_health()

    def register(self, region: HostRegion) -> None:
        self.inner.register(region)
