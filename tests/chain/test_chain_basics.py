"""What a chain does when nothing goes wrong: every byte comes back, and nothing is left behind."""

from __future__ import annotations

import gc

import pytest

from flexkv_core.testing import Fault, FaultKind, FaultTier, MemoryTier, context_for, small_layout
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens


def prompt(seed: int, length: int) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


@pytest.fixture
def host_world():
    world = World([(cpu_tier(LAYOUT, 32), {})])
    yield world
    world.close()


@pytest.fixture
def two_tiers():
    world = World([(cpu_tier(LAYOUT, 8), {}), (MemoryTier(context_for(LAYOUT)), {})])
    yield world
    world.close()


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 5 * BLOCK + 3])
def test_host_round_trip(host_world, length):
    tokens = prompt(1, length)
    assert host_world.hit(tokens) == 0
    assert host_world.store(tokens).num_tokens == length
    assert host_world.hit(tokens) == length
    assert host_world.load(tokens) == length


@pytest.mark.parametrize("start", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_load_behind_what_the_device_has(host_world, start):
    tokens = prompt(1, 3 * BLOCK + 2)
    host_world.store(tokens)
    assert host_world.load(tokens, start) == len(tokens) - start


def test_a_hit_ends_inside_a_block(host_world):
    tokens = prompt(1, 3 * BLOCK)
    host_world.store(tokens)
    for cut in range(1, 3 * BLOCK):
        other = tokens[:cut] + prompt(9, 40)
        assert host_world.hit(other) == cut
        assert host_world.load(other) == cut


def test_lookup_changes_nothing(two_tiers):
    tokens = prompt(1, 3 * BLOCK)
    two_tiers.store(tokens)
    before = two_tiers.chain.metrics.snapshot()
    for _ in range(1000):
        two_tiers.hit(tokens)
    assert two_tiers.chain.metrics.snapshot() == before
    two_tiers.assert_idle()


def test_lower_tier_serves_after_eviction(two_tiers):
    first = prompt(1, 6 * BLOCK)
    two_tiers.store(first)
    two_tiers.store(prompt(2, 8 * BLOCK))  # pushes the first out of the host pool
    lookup = two_tiers.chain.lookup(two_tiers.sequence(first))
    assert lookup.num_tokens == len(first)
    assert lookup.tokens_by_tier == {"tier1": len(first)}
    assert two_tiers.load(first) == len(first)
    assert two_tiers.chain.lookup(two_tiers.sequence(first)).tokens_by_tier == {"tier0": len(first)}


def test_receipts_tell_the_tiers(two_tiers):
    first = prompt(1, 4 * BLOCK)
    two_tiers.store(first)
    two_tiers.store(prompt(2, 6 * BLOCK))
    two_tiers.load(first)
    receipt = two_tiers.receipts[-1]
    assert receipt.kind == "load"
    assert receipt.status == "ok"
    assert sum(receipt.tokens_by_tier.values()) == len(first)
    assert receipt.num_bytes == len(first) * LAYOUT.token_bytes


def test_chain_without_addressable_tier():
    world = World([(MemoryTier(context_for(LAYOUT)), {})], staging=16 * LAYOUT.slot_bytes)
    tokens = prompt(1, 4 * BLOCK + 3)
    world.store(tokens)
    assert world.load(tokens) == len(tokens)
    world.close()


def test_restart_is_warm():
    tier = MemoryTier(context_for(LAYOUT))
    world = World([(cpu_tier(LAYOUT, 8), {}), (tier, {})])
    tokens = prompt(1, 4 * BLOCK + 3)
    world.store(tokens)
    medium = tier.medium
    world.close()
    again = World([(cpu_tier(LAYOUT, 8), {}), (MemoryTier(context_for(LAYOUT), medium=medium), {})])
    assert again.load(tokens) == len(tokens)
    again.close()


@pytest.mark.parametrize("error", [OSError("no such disk"), TypeError("a bug"), RuntimeError("half way")])
def test_a_driver_that_cannot_list_starts_empty(error):
    tier = MemoryTier(context_for(LAYOUT))
    world = World([(cpu_tier(LAYOUT, 8), {}), (tier, {})])
    tokens = prompt(1, 4 * BLOCK)
    world.store(tokens)
    world.close()
    again = MemoryTier(context_for(LAYOUT), medium=tier.medium)
    listed = again.list_blocks

    def breaks():
        yield next(iter(listed()))[:2]
        raise error

    again.list_blocks = breaks
    world = World([(cpu_tier(LAYOUT, 8), {}), (again, {})])
    world.chain.warm_up()
    assert world.store(tokens)
    assert world.load(tokens) == len(tokens)
    world.close()


def test_a_longer_tail_takes_the_place_of_a_shorter_one(host_world):
    for length in range(1, BLOCK + 1):
        host_world.store(prompt(1, length))
    assert host_world.chain.index.count(0) == 1


@pytest.mark.parametrize("policy", [{"write": "never"}, {"write": "around"}, {"read_only": True}])
def test_a_first_tier_that_takes_no_stores_only_lends_its_slots(policy):
    below = MemoryTier(context_for(LAYOUT))
    world = World([(cpu_tier(LAYOUT, 8), policy), (below, {})])
    tokens = prompt(1, 3 * BLOCK)
    world.store(tokens)
    assert world.chain.index.count(0) == 0
    assert len(below.medium.values) == 3
    assert world.load(tokens) == len(tokens)
    assert world.chain.index.count(0) == (3 if policy == {"write": "around"} else 0)
    world.close()


def test_write_around_fills_a_tier_by_promotion_only():
    slow = MemoryTier(context_for(LAYOUT))
    between = MemoryTier(context_for(LAYOUT))
    world = World([(cpu_tier(LAYOUT, 4), {}), (between, {"write": "around"}), (slow, {})])
    first = prompt(1, 2 * BLOCK)
    world.store(first)
    assert len(between.medium.values) == 0
    world.store(prompt(2, 4 * BLOCK))
    assert world.load(first) == len(first)
    assert len(between.medium.values) == 2
    world.close()


WORK = {
    "store": lambda w: w.store(prompt(9, 8 * BLOCK)),
    "load": lambda w: w.load(prompt(1, 8 * BLOCK)),
    "failed load": lambda w: (
        w.chain.links[1].raw.add("load", Fault(FaultKind.RAISE)),
        w.load(prompt(1, 8 * BLOCK)),
    ),
    "prefetch": lambda w: (
        w.chain.prefetch(
            w.sequence(prompt(1, 8 * BLOCK)), w.chain.lookup(w.sequence(prompt(1, 8 * BLOCK))), start=0
        ),
        w.settle(),
    ),
    "reset": lambda w: (w.chain.forget_all(), w.settle()),
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("promote", ["always", "never"])
def test_nothing_waits_for_the_garbage_collector(work, promote):
    """Its passes would stop the engine's thread, and what moved bytes keeps buffers meanwhile."""
    world = World(
        [(cpu_tier(LAYOUT, 8), {}), (FaultTier(MemoryTier(context_for(LAYOUT))), {"promote": promote})]
    )
    world.store(prompt(1, 8 * BLOCK))
    world.store(prompt(2, 8 * BLOCK))
    gc.collect()
    gc.disable()
    try:
        WORK[work](world)
        world.transfer.history.clear()
        assert gc.collect() == 0
    finally:
        gc.enable()
        world.close()
