"""The ``ssd`` driver passes the kit, over one directory and over two, with direct I/O and without."""

from __future__ import annotations

from flexkv_driver_ssd.config import SsdConfig
from flexkv_driver_ssd.tier import SsdTier
from tests.support.media import OnDisk


class TestSsd(OnDisk):
    options = {"path": "{0}"}

    def open_tier(self, context, medium):
        options = {**self.options, "path": self.options["path"].format(medium)}
        capacity = self.capacity_values * context.value_bytes
        config = SsdConfig(capacity=capacity, min_free=0, slab=capacity // 4, **options)
        return SsdTier(config, context)


class TestSsdTwoDirectoriesBuffered(TestSsd):
    options = {"path": "{0}/a;{0}/b", "direct_io": "off"}
    kills = 2
