"""A tier behind rate limits that nobody reaches passes the kit: it is the same tier."""

from __future__ import annotations

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.metrics import Metrics
from flexkv_core.models import LimitsConfig
from flexkv_core.testing import Medium, MemoryTier, TierTests
from flexkv_core.wrappers.limit import LimitedTier

FAST = {"bytes_per_s": "1TB", "operations_per_s": 1e9}


class TestLimited(TierTests):
    capabilities = TierCapabilities(can_list=True)

    @pytest.fixture
    def medium(self):
        return Medium()

    def open_tier(self, context, medium):
        inner = MemoryTier(context, self.capabilities, medium)
        limits = LimitsConfig.model_validate({"load": FAST, "store": FAST})
        return LimitedTier(inner, limits, name=context.name, metrics=Metrics())

    def read_medium(self, medium, key):
        return medium.values.get(key)

    def write_medium(self, medium, key, data):
        medium.values.pop(key, None)
        if data is not None:
            medium.values[key] = data
