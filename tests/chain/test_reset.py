"""A reset removes any number of blocks, and nobody waits or loses anything for it."""

from __future__ import annotations

import pytest

from flexkv_core.testing import Fault, FaultKind, FaultTier, MemoryTier, context_for, small_layout
from flexkv_core.tier import TierCapabilities
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
BATCH = 4


def prompt(seed: int, blocks: int) -> list[int]:
    return [seed * 1000 + i for i in range(blocks * BLOCK)]


class Slow(MemoryTier):
    """Takes 20 s for each removal, on the chain's clock."""

    clock = None

    def evict(self, keys):
        if self.clock is not None:
            self.clock.advance(20.0)
        return super().evict(keys)


@pytest.fixture(params=[1, 2], ids=["one store thread", "two store threads"])
def reset(request):
    """A world over a full lower tier of 32 blocks, in which a reset has begun and hangs."""
    can = TierCapabilities(can_list=True, max_batch=BATCH, capacity_bytes=32 * LAYOUT.slot_bytes)
    tier = FaultTier(Slow(context_for(LAYOUT), can))
    world = World([(cpu_tier(LAYOUT, 64), {}), (tier, {"store_threads": request.param})])
    for seed in range(4):
        world.store(prompt(seed, 8))
    assert len(tier.inner.medium.values) == 32
    tier.add("evict", Fault(FaultKind.HANG))
    world.chain.forget_all()
    tier.wait_hanging()
    tier.calls.clear()
    yield world, tier
    tier.release()
    world.close()


def finish(world: World, tier: FaultTier) -> None:
    """Let it go on; the tier holds what the index says, and nothing was lost."""
    tier.release()
    world.settle()
    link = world.chain.links[1]
    assert set(tier.inner.medium.values) == set(world.chain.index.keys(1))
    assert not link.doomed
    assert not link.num_removing
    assert world.count("store_failures") == world.count("evict_failures") == 0


def test_stores_come_between_its_calls(reset):
    world, tier = reset
    world.begin_store(prompt(9, 2))
    world.chain.poll()
    finish(world, tier)
    operations = [operation for operation, _ in tier.calls]
    assert "evict" in operations[operations.index("store") :]
    assert world.chain.index.count(1) == 2


def test_what_is_stored_meanwhile_makes_room_among_what_goes(reset):
    world, tier = reset
    for seed in range(5, 8):
        job, _ = world.begin_store(prompt(seed, 8))
        world.until(lambda job=job: job.is_over)
    finish(world, tier)
    assert world.count("store_dropped_blocks") == 0
    assert world.chain.index.count(1) == 24


def test_what_is_stored_again_stays(reset):
    world, tier = reset
    job, _ = world.begin_store(prompt(3, 8))
    world.until(lambda: job.is_over)
    finish(world, tier)
    removed = world.count("store_dropped_blocks", cause="being_removed")
    assert removed <= BATCH
    assert world.chain.index.count(1) == 8 - removed


def test_each_call_has_a_deadline_of_its_own(reset):
    world, tier = reset
    assert world.chain.links[1].config.store_deadline_s < 20.0 * 32 / BATCH
    tier.inner.clock = world.clock
    finish(world, tier)
    assert world.chain.faults() == []
    assert tier.inner.medium.values == {}


def test_a_call_that_was_given_up_goes_on_when_its_worker_is_back(reset):
    world, tier = reset
    world.clock.advance(31.0)
    world.until(lambda: not world.chain.links[1].num_removing)
    assert world.chain.links[1].doomed
    finish(world, tier)
    assert tier.inner.medium.values == {}


def test_a_tier_that_goes_down_meanwhile_is_emptied_when_it_is_back(reset):
    world, tier = reset
    tier.always("evict", Fault(FaultKind.RAISE))
    tier.release()
    world.settle()
    link = world.chain.links[1]
    assert link.doomed
    tier.always("evict", None)
    world.clock.advance(60.0)
    world.store(prompt(9, 1))
    world.settle()
    assert not link.doomed
    assert set(tier.inner.medium.values) == set(world.chain.index.keys(1))
