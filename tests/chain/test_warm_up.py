"""What a persistent tier lists at start comes back as it was stored: in rows, each with its age."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv_core.testing import Medium, MemoryTier, context_for, small_layout
from flexkv_core.testing.strategies import prompts
from flexkv_core.tier import TierCapabilities
from tests.support.chains import World, cpu_tier
from tests.support.places import check_places

LAYOUT = small_layout(block_tokens=4)
BLOCK = LAYOUT.block_tokens
CAN = TierCapabilities(persistent=True, can_list=True, capacity_bytes=512 * LAYOUT.slot_bytes)
START_S = 1000.0
"""The test's clock at a restart."""


class DatedTier(MemoryTier):
    """Lists its blocks in a given order, each with the time of its last use."""

    def __init__(self, medium: Medium, used=None, order=sorted) -> None:
        super().__init__(context_for(LAYOUT), CAN, medium)
        self.used, self.order = used or {}, order

    def list_blocks(self):
        blocks = [block for batch in super().list_blocks() for block in batch]
        for key in self.order([block.key for block in blocks]):
            block = next(block for block in blocks if block.key == key)
            yield [replace(block, last_used=self.used.get(key, 0.0))]


def opened(tier: MemoryTier, **policy) -> World:
    world = World([(cpu_tier(LAYOUT, 128), {}), (tier, policy)], layout=LAYOUT)
    check_places(world.chain.index._tiers[1])
    return world


def places(world: World) -> int:
    tier = world.chain.index._tiers[1]
    return len({id(tier.get(key)) for key in tier})


@settings(max_examples=30)
@given(prompts(), st.integers(0, 1 << 32), st.lists(st.sampled_from([0.0, 30.0, 500.0]), min_size=1))
def test_every_block_comes_back_in_whatever_order_it_is_listed(stored, seed, ages):
    medium, random = Medium(), Random(seed)
    before = opened(MemoryTier(context_for(LAYOUT), CAN, medium))
    for tokens in stored:
        before.store(tokens)
    before.close()
    used = {key: START_S - random.choice(ages) for key in sorted(medium.values)}
    world = opened(DatedTier(medium, used, lambda keys: random.sample(sorted(keys), len(keys))))
    try:
        assert set(world.chain.index.keys(1)) == medium.values.keys()
        for tokens in stored:
            assert world.load(tokens) == len(tokens)
        check_places(world.chain.index._tiers[1])
        world.chain.forget_all()
        world.settle()
        assert not medium.values
    finally:
        world.close()


def test_what_was_stored_together_is_one_place():
    medium, tokens = Medium(), list(range(100 * BLOCK))
    before = opened(MemoryTier(context_for(LAYOUT), CAN, medium))
    before.store(tokens)
    before.store([*tokens[: 50 * BLOCK], *range(900, 900 + 20 * BLOCK)])
    stored = places(before)
    before.close()
    world = opened(DatedTier(medium))
    assert places(world) == 3 <= stored
    world.close()


@pytest.mark.parametrize("apart", [0.0, 59.0, 61.0, 500.0])
def test_the_longest_unused_leaves_first(apart):
    """Also within a row: a conversation that goes on is as old as its last turn."""
    medium, old, new = Medium(), list(range(8 * BLOCK)), list(range(500, 500 + 8 * BLOCK))
    before = opened(MemoryTier(context_for(LAYOUT), CAN, medium))
    for tokens in (old, new):
        before.store(tokens)
    keys = {name: before.sequence(tokens).keys() for name, tokens in (("old", old), ("new", new))}
    before.close()
    used = dict.fromkeys(keys["old"], START_S - 600.0) | dict.fromkeys(keys["new"][:4], START_S - 700.0)
    used |= dict.fromkeys(keys["new"][4:], START_S - 700.0 + apart)
    world = opened(DatedTier(medium, used))
    assert places(world) == 2 + (apart > 60)
    gone = [key for blocks in world.chain.index.evict(1, 4) for key in reversed(blocks.keys)]
    assert gone == (keys["new"] if apart < 100 else keys["old"])[:3:-1]
    world.close()


def test_what_is_listed_twice_or_is_none_of_ours_is_left_out():
    medium, tokens = Medium(), list(range(6 * BLOCK))
    before = opened(MemoryTier(context_for(LAYOUT), CAN, medium))
    before.store(tokens)
    keys = before.sequence(tokens).keys()
    before.close()
    medium.values[bytes(32)] = medium.values[keys[0]]
    medium.values[bytes(31) + b"\1"] = b"junk"
    world = opened(DatedTier(medium, order=lambda listed: [*listed, keys[3], *keys[:2]]))
    world.settle()
    assert world.count("foreign_blocks", tier="tier1") == 5
    assert medium.values.keys() == set(keys)
    assert world.load(tokens) == len(tokens)
    world.close()


@pytest.mark.parametrize(("used_s", "served"), [(10.0, True), (99.0, True), (101.0, False)])
def test_after_a_restart_the_time_to_live_counts_from_the_last_use(used_s, served):
    medium, tokens = Medium(), list(range(6 * BLOCK))
    before = opened(MemoryTier(context_for(LAYOUT), CAN, medium))
    before.store(tokens)
    before.close()
    world = opened(DatedTier(medium, dict.fromkeys(medium.values, START_S - used_s)), ttl_s=100.0)
    assert world.load(tokens) == (len(tokens) if served else 0)
    world.chain._parts.capacity.evict(world.chain.links[0], 128, is_final=True)
    world.clock.advance(91.0)  # that it was loaded makes it no younger
    assert world.hit(tokens) == 0
    world.close()
