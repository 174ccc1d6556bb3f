"""The ``cpu`` driver passes the kit."""

from __future__ import annotations

from flexkv_core.testing import TierTests
from flexkv_driver_cpu.config import CpuConfig
from flexkv_driver_cpu.tier import CpuTier


class TestCpu(TierTests):
    def open_tier(self, context, medium):
        return CpuTier(CpuConfig(capacity=self.capacity_values * context.value_bytes), context)
