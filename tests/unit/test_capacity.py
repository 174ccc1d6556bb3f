"""What a chain refuses at start, how calls are cut, and what is believed of shared tiers."""

from __future__ import annotations

import pytest

from flexkv_core.chain.fitting import capacity_blocks, check_links
from flexkv_core.chain.key_sets import KnownKeys
from flexkv_core.errors import ConfigError
from flexkv_core.models import TierConfig
from flexkv_core.testing import MemoryTier, context_for, small_layout
from flexkv_core.tier import TierCapabilities
from flexkv_driver_cpu.config import CpuConfig
from flexkv_driver_cpu.tier import CpuTier
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout()
KEY = bytes(32)
PLAIN, DIRECT = TierCapabilities(), TierCapabilities(direct_slots=True)
EXPIRING, SHARED = TierCapabilities(shared=True, expires=True), TierCapabilities(shared=True)


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
        ([tier(), tier(ttl_s=5)], [DIRECT, EXPIRING], "ttl_s: values of a shared tier"),
        ([tier(), tier(ttl_s=5)], [DIRECT, SHARED], "ttl_s: values of a shared tier"),
        ([tier(), tier(promote=2)], [DIRECT, SHARED], "promote: hits are counted"),
        ([tier(), tier(promote="never")], [DIRECT, SHARED], ""),
        ([tier(), tier(promote=2)], [DIRECT, PLAIN], ""),
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


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", ["pool", "store"])
def test_room_for_less_than_one_block_is_told_in_numbers(at, kind):
    less = LAYOUT.slot_bytes - 1
    tiers = [MemoryTier(context_for(LAYOUT)), MemoryTier(context_for(LAYOUT))]
    if kind == "pool":
        tiers[at] = CpuTier(CpuConfig(capacity=less), context_for(LAYOUT))
    else:
        tiers[at] = MemoryTier(context_for(LAYOUT), TierCapabilities(capacity_bytes=less))
    with pytest.raises(ConfigError, match=rf"tiers\[{at}\].*a block takes [\d,]+ B, .*raise its capacity"):
        World([(tier, {}) for tier in tiers])
    for opened in tiers:
        opened.close()


@pytest.mark.parametrize("count", [0, 1, 5, 64, 65, 1000, 5000])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_calls_cover_all_and_no_piece_is_too_long(count, threads):
    world = World([(MemoryTier(context_for(LAYOUT), TierCapabilities(max_batch=64)), {})])
    piece, calls = world.chain.links[0].cut(count, threads)
    assert [i for call in calls for i in call] == list(range(count))
    assert 1 <= piece <= 64
    pieces = sum(-(-len(call) // piece) for call in calls)
    assert pieces >= min(count, threads) - 1, "as many at once as there are threads"
    assert len(calls) <= 1 + pieces // threads
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
    monkeypatch.setattr("flexkv_core.chain.key_sets._KNOWN_LIMIT", 10)
    known = KnownKeys()
    for number in range(30):
        known.note(number.to_bytes(32, "big"), 0.0, is_there=True)
    assert len(known) == 10


@pytest.mark.parametrize("is_there", [True, False])
def test_answers_are_not_kept_longer_than_believed(is_there):
    known = KnownKeys(found_s=60, missing_s=2)
    for number in range(30_000):
        known.note(number.to_bytes(32, "big"), number / 100, is_there=is_there)
    assert len(known) <= (60 if is_there else 2) * 100 + 1


def test_an_answer_takes_the_place_of_its_opposite():
    known = KnownKeys(found_s=60, missing_s=60)
    for number in range(5):
        known.note(KEY, number, is_there=bool(number % 2))
        assert known.get(KEY, number) is bool(number % 2)
        assert known.there_until([KEY], 0, 1, number) == number % 2
    assert len(known) == 1
