"""A tier behind rate limits that nobody reaches passes the kit: it is the same tier."""

from __future__ import annotations

from flexkv_core.metrics import Metrics
from flexkv_core.models import LimitsConfig
from flexkv_core.testing import MemoryTier
from flexkv_core.wrappers.limit import LimitedTier
from tests.support.media import InMemory

FAST = {"bytes_per_s": "1TB", "operations_per_s": 1e9}


class TestLimited(InMemory):
    def open_tier(self, context, medium):
        inner = MemoryTier(context, self.capabilities, medium)
        limits = LimitsConfig.model_validate({"load": FAST, "store": FAST})
        return LimitedTier(inner, limits, name=context.name, metrics=Metrics())
