"""What a chain refuses at start, how calls are cut, and what is believed of shared tiers."""

from __future__ import annotations

import pytest

from flexkv_core.errors import ConfigError
from flexkv_core.links import KnownKeys, capacity_blocks, check_links
from flexkv_core.models import TierConfig
from flexkv_core.testing import MemoryTier, context_for, small_layout
from flexkv_core.tier import TierCapabilities
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout()
KEY = bytes(32)
PLAIN, DIRECT = TierCapabilities(), TierCapabilities(direct_slots=True)
EXPIRING = TierCapabilities(shared=True, expires=True)


def tier(**policy) -> TierConfig:
    return TierConfig(name="t", driver="x", **policy)


@pytest.mark.parametrize(
    ("configs", "capabilities", "complaint"),
    [
        ([tier()], [PLAIN], ""),
        ([tier(), tier(write="back")], [DIRECT, PLAIN], ""),
        ([tier(write="back")], [DIRECT], "write: back needs"),
        ([tier(), tier(write="back")], [PLAIN, PLAIN], "write: back needs"),
        ([tier(), tier(), tier(write="back")], [DIRECT, PLAIN, PLAIN], "write: back needs"),
        ([tier(), tier(write="back", read_only=True)], [DIRECT, PLAIN], "exclude each other"),
        ([tier(), tier(ttl_s=5)], [DIRECT, EXPIRING], "expiry"),
        ([tier(), tier(ttl_s=5)], [DIRECT, PLAIN], ""),
    ],
)
def test_orders_that_cannot_work_are_named(configs, capabilities, complaint):
    findings = check_links(configs, capabilities)
    assert [complaint in finding for finding in findings] == ([True] if complaint else [])


@pytest.mark.parametrize(
    ("capacity", "alignment", "blocks"), [(0, 1, None), (1, 1, 0), (3, 1, 3), (3, 4096, 3), (3, 1 << 20, 0)]
)
def test_blocks_that_fit(capacity, alignment, blocks):
    can = TierCapabilities(
        capacity_bytes=capacity * LAYOUT.slot_bytes if capacity != 1 else 1, alignment_bytes=alignment
    )
    assert capacity_blocks(can, LAYOUT) == blocks


@pytest.mark.parametrize(
    "can",
    [
        TierCapabilities(max_value_bytes=LAYOUT.slot_bytes - 1),
        TierCapabilities(capacity_bytes=LAYOUT.slot_bytes - 1),
        TierCapabilities(direct_slots=True),
    ],
)
def test_tiers_that_cannot_hold_a_block_stop_the_start(can):
    memory = MemoryTier(context_for(LAYOUT), can)
    host = cpu_tier(LAYOUT, 2)
    rows = [(memory, {})] if can.direct_slots else [(host, {}), (memory, {})]
    with pytest.raises(ConfigError, match="tiers"):
        World(rows)
    host.close()


@pytest.mark.parametrize("count", [0, 1, 5, 64, 65, 1000])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_batches_cover_all_and_none_is_too_long(count, threads):
    world = World([(MemoryTier(context_for(LAYOUT), TierCapabilities(max_batch=64)), {})])
    batches = world.chain.links[0].batches(count, threads)
    assert [i for batch in batches for i in batch] == list(range(count))
    assert all(1 <= len(batch) <= 64 for batch in batches)
    assert len(batches) >= min(count, threads) - 1
    world.close()


def test_answers_of_shared_tiers_age():
    known = KnownKeys(found_s=10, missing_s=2)
    assert known.get(KEY, 0.0) is None
    known.note(KEY, 0.0, is_there=False)
    assert known.get(KEY, 2.0) is False
    assert known.get(KEY, 2.1) is None
    known.note(KEY, 3.0, is_there=True)
    assert known.get(KEY, 13.0) is True
    assert known.get(KEY, 13.1) is None
    known.clear()
    assert known.get(KEY, 3.0) is None


def test_answers_are_bounded(monkeypatch):
    monkeypatch.setattr("flexkv_core.links._KNOWN_LIMIT", 10)
    known = KnownKeys()
    for number in range(30):
        known.note(number.to_bytes(32, "big"), 0.0, is_there=True)
    assert len(known._answers) == 10
