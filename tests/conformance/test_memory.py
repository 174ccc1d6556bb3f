"""The reference tier passes the kit, as whatever it says it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.testing import Medium, MemoryTier, TierTests


class MemoryKit(TierTests):
    """Over a dictionary that outlives the tier, reached behind its back."""

    capabilities = TierCapabilities(can_list=True)

    @pytest.fixture
    def medium(self):
        return Medium()

    def open_tier(self, context, medium):
        return MemoryTier(context, self.capabilities, medium)

    def read_medium(self, medium, key):
        return medium.values.get(key)

    def write_medium(self, medium, key, data):
        medium.values.pop(key, None)
        if data is not None:
            medium.values[key] = data


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
