"""The ``ssd`` driver passes the kit, over one directory and over two, with direct I/O and without."""

from __future__ import annotations

from pathlib import Path

from flexkv_core.testing import TierTests
from flexkv_driver_ssd.config import SsdConfig
from flexkv_driver_ssd.tier import SsdTier
from tests.support.ssd_disk import peek, remove, replace, spots


class TestSsd(TierTests):
    options = {"path": "{0}"}

    def open_tier(self, context, medium):
        options = {**self.options, "path": self.options["path"].format(medium)}
        capacity = self.capacity_values * context.value_bytes
        config = SsdConfig(capacity=capacity, min_free=0, slab=capacity // 4, **options)
        return SsdTier(config, context)

    def read_medium(self, medium, key):
        spot = spots(Path(medium)).get(key)
        return None if spot is None else peek(spot)

    def write_medium(self, medium, key, data):
        spot = spots(Path(medium))[key]
        if data is None:
            remove(spot)
        else:
            replace(spot, data)


class TestSsdTwoDirectoriesBuffered(TestSsd):
    options = {"path": "{0}/a;{0}/b", "direct_io": "off"}
