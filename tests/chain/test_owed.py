"""What a lower tier should have had and has not: counted, and mended with the next store of its sequence."""

from __future__ import annotations

import pytest

from flexkv_core import hookimpl
from flexkv_core.errors import TierUnavailableError
from flexkv_core.testing import Fault, FaultKind, FaultTier, MemoryTier, context_for, small_layout
from flexkv_core.tier import Status, TierCapabilities
from tests.support.chains import World, cpu_tier
from tests.support.waiting import DEADLINE_S

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
AWAY = Fault(FaultKind.RAISE, error=TierUnavailableError("away"))
RESET_S = 5.0


def prompt(seed: int, blocks: float) -> list[int]:
    return [seed * 10_000 + i for i in range(int(blocks * BLOCK))]


def memory(blocks: int = 0, **capabilities) -> FaultTier:
    can = {"can_list": True, "capacity_bytes": blocks * LAYOUT.slot_bytes} | capabilities
    return FaultTier(MemoryTier(context_for(LAYOUT), TierCapabilities(**can)))


@pytest.fixture
def worlds():
    made: list[World] = []

    def make(below: FaultTier, host: int = 64, first: dict | None = None, **policy) -> World:
        breaker = {"breaker_failures": 2, "breaker_reset_s": RESET_S}
        made.append(World([(cpu_tier(LAYOUT, host), first or {}), (below, breaker | policy)]))
        return made[-1]

    yield make
    for world in made:
        world.chain.links[1].raw.release()
        world.close()


def lacking(world: World, tokens: list[int]) -> int:
    """How many blocks of a prompt the lower tier cannot load, asked alone."""
    keys = world.sequence(tokens).keys()
    return sum(not outcome.is_ok for outcome in world.chain.links[1].raw.inner.lookup(keys))


LOSSES = {
    "unavailable": AWAY,
    "a bug": Fault(FaultKind.RAISE, error=ZeroDivisionError("bug")),
    "nonsense": Fault(FaultKind.RETURN_NONE),
    "one of them": Fault(FaultKind.FAIL_KEYS, at=(0,), status=Status.UNAVAILABLE),
    "denied": Fault(FaultKind.FAIL_KEYS, at=(0, 1), status=Status.DENIED),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_hole_below_is_mended_when_its_sequence_is_stored_again(worlds, loss, shared):
    below = memory(shared=shared)
    world = worlds(below, breaker_failures=0)
    below.always("store", LOSSES[loss])
    world.store(prompt(1, 4))
    assert world.count("store_failures", tier="tier1")
    below.always("store", None)
    world.store(prompt(1, 5))
    assert lacking(world, prompt(1, 5)) == 0
    assert len(world.chain.links[1].owed) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_passed_over_while_a_tier_is_down_is_counted_and_comes_later(worlds, shared):
    below = memory(shared=shared)
    world = worlds(below, store_threads=1)
    below.always("store", AWAY)
    for seed in range(2):
        world.store(prompt(seed, 1))
    assert not world.chain.links[1].is_up
    world.store(prompt(3, 6))
    assert world.count("store_dropped_blocks", tier="tier1", cause="tier_down") == 6
    below.always("store", None)
    world.clock.advance(RESET_S + 1)
    world.store(prompt(4, 1))
    assert world.chain.links[1].is_up
    world.store(prompt(3, 7))
    assert lacking(world, prompt(3, 7)) == 0


def test_what_is_owed_is_bounded(worlds, monkeypatch):
    below = memory()
    world = worlds(below, host=128)
    world.chain.links[1].owed._limit = world.chain.links[1].strays._limit = 10
    below.always("store", AWAY)
    for seed in range(20):
        world.clock.advance(RESET_S + 1)
        world.store(prompt(seed, 5))
    assert len(world.chain.links[1].owed) == 10
    assert len(world.chain.links[1].strays) <= 10


def test_a_call_that_never_reached_the_tier_leaves_nothing_to_be_removed(worlds):
    below = memory(max_batch=4)
    world = worlds(below, store_threads=1)
    below.always("store", AWAY)
    for seed in range(4):
        world.store(prompt(seed, 8))
    reached = sum(count for operation, count in below.calls if operation == "store")
    assert len(world.chain.links[1].strays) == reached == 8


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_full_first_tier_loses_nothing_that_its_tier_below_can_take(worlds, write):
    world = worlds(memory(), write=write)
    planned = 0
    for seed in range(40):
        job = world.store(prompt(seed, 8))
        planned += 8
        assert job is not None
        assert job.plan.num_blocks == 8
    assert world.count("store_dropped_blocks") == 0
    assert sum(world.hit(prompt(seed, 8)) for seed in range(40)) == planned * BLOCK


def test_slots_that_are_written_back_need_no_further_block_to_leave(worlds):
    below = memory()
    late = {"eviction": {"start_threshold": 1.0}}
    world = worlds(below, host=16, first=late, write="back", store_threads=1)
    for seed in range(2):
        world.store(prompt(seed, 8))
    below.add("store", Fault(FaultKind.HANG))
    counts = []
    for seed in range(10, 14):
        job, slots = world.begin_store(prompt(seed, 4))
        counts.append(world.chain.index.count(0))
        if job is None:
            world.device.free(slots)
    assert min(counts) >= 12, counts
    below.wait_hanging()
    below.release()
    assert world.chain.drain(DEADLINE_S)


@pytest.mark.parametrize("breaker_failures", [0, 2])
def test_a_hung_write_back_starves_nobody(worlds, breaker_failures):
    """Slots that a worker hangs on are lost for as long; all others serve stores and loads."""
    below = memory()
    policy = {"breaker_failures": breaker_failures, "store_deadline_s": 1.0, "store_threads": 2}
    world = worlds(below, host=16, write="back", **policy)
    for seed in range(2):
        world.store(prompt(seed, 6))
    below.always("store", Fault(FaultKind.HANG))
    for seed in (10, 11):
        job, slots = world.begin_store(prompt(seed, 8))
        if job is None:
            world.device.free(slots)
    below.wait_hanging()
    world.clock.advance(2.0)
    world.until(lambda: world.chain.links[1].backlog_bytes == 0)
    for seed in range(20, 26):
        job, slots = world.begin_store(prompt(seed, 2))
        world.until(lambda job=job: job is None or job.is_over)
        assert job is not None
        assert job.plan.num_blocks == 2, seed
        world.device.free(slots)
        assert world.hit(prompt(seed, 2)) == 2 * BLOCK
    below.always("store", None)
    below.release()
    assert world.chain.drain(DEADLINE_S)


def test_while_nothing_is_written_back_room_is_made_at_once(worlds):
    """Slots that wait for a tier which is down come free late; those of blocks that leave now do not."""
    below = memory()
    world = worlds(below, host=32, write="back", store_threads=1)
    for seed in range(4):
        world.store(prompt(seed, 6))
    below.add("store", Fault(FaultKind.HANG))
    world.begin_store(prompt(10, 12))
    below.wait_hanging()
    leaving = world.chain._parts.capacity.num_leaving
    assert leaving
    breaker = world.chain.links[1].wrapped.breaker
    breaker.report(Status.TIMEOUT, "away", "lookup", is_final=True)
    for seed in range(11, 17):
        world.chain.poll()
        job, _ = world.begin_store(prompt(seed, 4))
        assert job is not None
        assert job.plan.num_blocks == 4
    assert world.chain._parts.capacity.num_leaving == leaving
    below.release()
    assert world.chain.drain(DEADLINE_S)


def test_a_tier_that_is_written_back_to_comes_up_again_by_itself(worlds):
    below = memory()
    world = worlds(below, host=4, write="back")
    below.always("store", AWAY)
    for seed in range(6):
        world.store(prompt(seed, 2))
    assert not world.chain.links[1].is_up
    dropped = world.count("store_dropped_blocks", tier="tier1", cause="tier_down")
    world.store(prompt(7, 2))
    assert world.count("store_dropped_blocks", tier="tier1", cause="tier_down") > dropped
    below.always("store", None)
    world.clock.advance(RESET_S + 1)
    for seed in range(10, 13):
        world.store(prompt(seed, 2))
    assert world.chain.links[1].is_up
    assert world.chain.index.count(1)


def test_promotions_wait_for_a_tier_that_is_written_around(worlds):
    far = memory()
    first = World([(cpu_tier(LAYOUT, 32), {}), (far, {})])
    first.store(prompt(1, 8))
    first.close()
    again = MemoryTier(context_for(LAYOUT), far.capabilities, medium=far.inner.medium)
    middle = {"write": "around", "store_threads": 1}
    world = World([(cpu_tier(LAYOUT, 8), {}), (memory(), middle), (again, {})])
    assert world.load(prompt(1, 8)) == 8 * BLOCK
    assert world.chain.index.count(1) == 8
    world.close()


class Mirror:
    """What an observer believes to lie in each tier."""

    def __init__(self) -> None:
        self.have: dict[str, set[bytes]] = {}

    @hookimpl
    def flexkv_blocks_stored(self, tier, keys):
        self.have.setdefault(tier, set()).update(keys)

    @hookimpl
    def flexkv_blocks_evicted(self, tier, keys):
        self.have.setdefault(tier, set()).difference_update(keys)


@pytest.mark.parametrize("write", ["through", "back"])
def test_observers_can_keep_a_mirror_of_every_tier(worlds, write):
    mirror, below = Mirror(), memory(20)
    world = worlds(below, host=8, write=write)
    world.chain.observers.add(mirror)
    world.store(prompt(1, 4))
    world.store(prompt(2, 8))
    world.load(prompt(1, 4))  # comes up
    world.store(prompt(3, 1.5))
    world.store(prompt(3, 2))  # a longer block supersedes a tail
    below.add("load", Fault(FaultKind.FLIP, bit=8 * 4100))
    world.store(prompt(4, 8))
    world.load(prompt(1, 4))  # one of them is damaged, and forgotten
    for seed in range(5, 9):
        world.store(prompt(seed, 6))
    world.settle()
    for number, name in enumerate(("tier0", "tier1")):
        assert mirror.have[name] == set(world.chain.index.keys(number)), name
