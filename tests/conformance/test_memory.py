"""The reference tier passes the kit, as whatever it says it is."""

from __future__ import annotations

from dataclasses import replace

from flexkv_core.testing import MemoryTier
from tests.support.media import InMemory


class MemoryKit(InMemory):
    def open_tier(self, context, medium):
        return MemoryTier(context, self.capabilities, medium)


class TestPlain(MemoryKit):
    pass


class TestAligned(MemoryKit):
    capabilities = replace(MemoryKit.capabilities, alignment_bytes=4096, max_batch=5, max_concurrency=1)


class TestBounded(MemoryKit):
    capabilities = replace(
        MemoryKit.capabilities,
        capacity_bytes=20 * MemoryKit.layout.slot_bytes,
        max_value_bytes=MemoryKit.layout.slot_bytes,
    )
    capacity_values = 20


class TestShared(MemoryKit):
    capabilities = replace(MemoryKit.capabilities, shared=True)
