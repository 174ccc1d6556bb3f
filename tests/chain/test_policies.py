"""Policies of a chain, each by what a later prompt gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexkv_core.testing import (
    Fault,
    FaultKind,
    FaultTier,
    Medium,
    MemoryTier,
    context_for,
    make_value,
    small_layout,
)
from flexkv_core.tier import TierCapabilities
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout(block_tokens=4)
BLOCK = LAYOUT.block_tokens


def prompt(seed: int, blocks: float) -> list[int]:
    return [seed * 1000 + i for i in range(int(blocks * BLOCK))]


def memory(blocks: int = 0, medium: Medium | None = None, **capabilities) -> MemoryTier:
    can = {"can_list": True, "capacity_bytes": blocks * LAYOUT.slot_bytes} | capabilities
    return MemoryTier(context_for(LAYOUT), TierCapabilities(**can), medium)


@pytest.fixture
def chain():
    made: list[World] = []

    def make(*tiers, **kwargs) -> World:
        rows = [tier if isinstance(tier, tuple) else (tier, {}) for tier in tiers]
        made.append(World(rows, **({"layout": LAYOUT} | kwargs)))
        return made[-1]

    yield make
    for world in made:
        world.close()


def origin(world: World, tokens) -> dict[str, int]:
    return world.chain.lookup(world.sequence(tokens)).tokens_by_tier


@pytest.mark.parametrize("promote", ["always", "never", 1, 2, 3])
def test_promotion(chain, promote):
    world = chain(cpu_tier(LAYOUT, 4), (memory(), {"promote": promote}))
    world.store(prompt(1, 2))
    world.store(prompt(2, 4))
    needed = {"always": 1, "never": 99}.get(promote, promote)
    for number in range(1, 5):
        assert world.load(prompt(1, 2)) == 2 * BLOCK
        assert origin(world, prompt(1, 2)) == {"tier0" if number >= needed else "tier1": 2 * BLOCK}


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "mru", "filo"])
def test_eviction_orders(chain, policy):
    """Three prompts of two blocks; a and then b are loaded; one has to go for a fourth."""
    world = chain((cpu_tier(LAYOUT, 6), {"eviction": {"policy": policy}}))
    names = {"a": prompt(1, 2), "b": prompt(2, 2), "c": prompt(3, 2)}
    for tokens in names.values():
        world.clock.advance(1)
        world.store(tokens)
    for name in "aab":
        world.clock.advance(1)
        world.load(names[name])
    world.clock.advance(1)
    world.store(prompt(4, 2))
    gone = [name for name, tokens in names.items() if not world.hit(tokens)]
    assert gone == [{"lru": "c", "lfu": "c", "slru": "c", "fifo": "a", "mru": "b", "filo": "c"}[policy]]


def test_the_start_threshold_keeps_room_free(chain):
    world = chain((cpu_tier(LAYOUT, 8), {"eviction": {"start_threshold": 0.5}}))
    for seed in range(5):
        world.store(prompt(seed, 2))
        assert world.chain.index.count(0) <= 4


def test_a_hot_prefix_outlives_its_branches(chain):
    world = chain(cpu_tier(LAYOUT, 8))
    head = prompt(1, 3)
    for seed in range(2, 12):
        world.store(head + prompt(seed, 1.5))
        assert world.hit(head) == len(head)
        assert world.hit(head + prompt(seed, 1.5)) == len(head) + 6


@pytest.mark.parametrize("length", range(1, 2 * BLOCK + 1))
def test_growing_sequences_keep_one_tail(chain, length):
    world = chain(cpu_tier(LAYOUT, 8), memory())
    for cut in range(1, length + 1):
        world.store(prompt(1, 4)[:cut])
    assert world.chain.index.count(0) == world.chain.index.count(1) == -(-length // BLOCK)
    assert len(world.chain.links[1].raw.medium.values) == -(-length // BLOCK)
    assert world.load(prompt(1, 4)) == length


@pytest.mark.parametrize(
    ("shared", "store_tails", "kept"), [(False, None, 3), (True, None, 2), (False, False, 2), (True, True, 3)]
)
def test_which_tiers_keep_tails(chain, shared, store_tails, kept):
    tier = memory(shared=shared)
    world = chain(cpu_tier(LAYOUT, 8), (tier, {"store_tails": store_tails}))
    world.store(prompt(1, 2.5))
    assert len(tier.medium.values) == kept


def test_a_read_only_tier_serves_and_is_never_touched(chain):
    medium = Medium()
    first = chain(cpu_tier(LAYOUT, 8), memory(medium=medium))
    first.store(prompt(1, 2))
    first.close()
    tier = FaultTier(memory(medium=medium))
    world = chain(cpu_tier(LAYOUT, 8), (tier, {"read_only": True}))
    tier.add("load", Fault(FaultKind.FLIP, bit=8 * 4100))
    assert world.load(prompt(1, 2)) == 0
    world.store(prompt(2, 2))
    assert world.load(prompt(2, 2)) == 2 * BLOCK
    world.chain.forget_all()
    world.settle()
    assert {operation for operation, _ in tier.calls} == {"list", "load"}
    assert len(medium.values) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("with_host", [True, False])
def test_any_number_of_tiers(chain, count, with_host):
    below = [memory() for _ in range(count)]
    world = chain(*([cpu_tier(LAYOUT, 4)] if with_host else []), *below, staging=8 * LAYOUT.slot_bytes)
    world.store(prompt(1, 3.5))
    for seed in range(2, 4):
        world.store(prompt(seed, 4))
    assert [len(tier.medium.values) for tier in below] == [12] * count
    first = len(below) - count + int(with_host)
    assert origin(world, prompt(1, 3.5)) == {f"tier{first}": 14}
    below[0].medium.values.clear()  # the next tier is asked once the first has failed
    assert world.load(prompt(1, 3.5)) == 0
    assert world.load(prompt(1, 3.5)) == (14 if count > 1 else 0)


def test_what_comes_from_far_is_kept_on_the_way(chain):
    far = memory()
    first = chain(cpu_tier(LAYOUT, 8), far)
    first.store(prompt(1, 3))
    first.close()
    near = memory()
    world = chain(cpu_tier(LAYOUT, 8), near, memory(medium=far.medium))
    assert world.load(prompt(1, 3)) == 3 * BLOCK
    assert len(near.medium.values) == 3


@pytest.mark.parametrize("page", [1, 2, 4])
def test_hits_are_whole_pages(chain, page):
    layout = small_layout(block_tokens=4, page_tokens=page)
    world = chain(cpu_tier(layout, 8), layout=layout)
    world.store(prompt(1, 2.75))
    assert world.hit(prompt(1, 4)) == 11 // page * page
    for cut in range(12):
        other = [*prompt(1, 4)[:cut], 7, 8, 9, 10]
        assert world.load(other) == min(cut, 11 // page * page) // page * page


def test_a_restart_takes_over_what_is_whole(chain):
    medium = Medium()
    first = chain(cpu_tier(LAYOUT, 8), memory(medium=medium))
    first.store(prompt(1, 3))
    keys = first.sequence(prompt(1, 3)).keys()
    first.close()
    foreign = make_value(small_layout(block_tokens=8), [1, 2, 3])
    medium.values[foreign.key] = bytes(foreign.view)
    medium.values[bytes(32)] = medium.values[keys[0]]  # under a name that is not its own
    medium.values[bytes([1]) * 32] = b"short"
    torn = bytearray(medium.values[keys[2]])
    torn[LAYOUT.header_bytes + 3] ^= 1
    medium.values[keys[2]] = bytes(torn)
    world = chain(cpu_tier(LAYOUT, 8), memory(medium=medium))
    assert world.count("foreign_blocks") == 3
    assert world.hit(prompt(1, 3)) == 3 * BLOCK  # the header is whole
    assert world.load(prompt(1, 3)) == 0
    assert world.load(prompt(1, 3)) == 2 * BLOCK


def test_a_restart_with_less_room_lets_the_rest_go(chain):
    medium = Medium()
    first = chain(cpu_tier(LAYOUT, 8), memory(medium=medium))
    first.store(prompt(1, 3))
    first.store(prompt(2, 3))
    first.close()
    world = chain(cpu_tier(LAYOUT, 8), memory(4, medium=medium))
    world.settle()
    assert world.chain.index.count(1) == len(medium.values) == 4


def test_other_models_never_match(chain):
    medium = Medium()
    first = chain(cpu_tier(LAYOUT, 8), memory(medium=medium))
    first.store(prompt(1, 3))
    first.close()
    for layout in (small_layout(block_tokens=8), small_layout(block_tokens=4, num_layers=3)):
        world = chain(
            cpu_tier(layout, 8),
            MemoryTier(context_for(layout), TierCapabilities(can_list=True), medium),
            layout=layout,
        )
        assert world.hit(prompt(1, 3)) == 0
        world.close()


def test_a_thousand_lookups_of_a_waiting_prompt_hold_nothing(chain):
    shared = memory(shared=True)
    world = chain(cpu_tier(LAYOUT, 4), memory(), (shared, {}))
    world.store(prompt(1, 3))
    world.store(prompt(2, 4))
    before = world.chain.metrics.snapshot(), len(world.chain.index), world.chain.num_under_way
    for _ in range(1000):
        assert world.hit(prompt(1, 3)) == 3 * BLOCK
    assert before == (world.chain.metrics.snapshot(), len(world.chain.index), world.chain.num_under_way)
    world.assert_idle()


def test_prefetch_brings_blocks_into_host_slots(chain):
    world = chain(cpu_tier(LAYOUT, 6), memory(), manual=True)
    for seed in (1, 2):
        world.begin_store(prompt(seed, 4))
        world.transfer.run_all()
        world.settle()
    sequence = world.sequence(prompt(1, 4))
    job = world.chain.prefetch(sequence, world.chain.lookup(sequence), start=0)
    world.until(lambda: job.is_over)
    assert job.state == "done"
    assert not world.transfer.pending
    assert origin(world, prompt(1, 4)) == {"tier0": 16}
    assert world.receipts[-1].kind == "prefetch"
    cancelled = world.chain.prefetch(
        world.sequence(prompt(2, 4)), world.chain.lookup(world.sequence(prompt(2, 4))), start=0
    )
    world.chain.cancel(cancelled)
    world.settle()
    assert cancelled.is_over


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 11, 12])
def test_loads_of_a_shared_beginning_at_once(chain, start):
    world = chain(cpu_tier(LAYOUT, 8), memory(), manual=True)
    for seed in (1, 2):
        world.begin_store(prompt(seed, 4))
        world.transfer.run_all()
        world.settle()
    jobs = [world.begin_load(prompt(1, 3), start) for _ in range(3)]
    world.until(lambda: world.transfer.run_all() or not world.chain.num_under_way)
    world.settle()
    for job, slots in jobs:
        if start < 12:
            assert job.state == "done"
            world.check(prompt(1, 3), start, slots)
        else:
            assert job is None


def test_receipts_add_up_to_the_metrics(chain):
    world = chain(cpu_tier(LAYOUT, 4), memory())
    for seed in (1, 2, 1, 2):
        world.load(prompt(seed, 3))
        world.store(prompt(seed, 3))
    for kind in ("load", "store"):
        receipts = [receipt for receipt in world.receipts if receipt.kind == kind]
        assert world.count("jobs", kind=kind) == len(receipts)
        assert world.count("tokens", kind=kind) == sum(receipt.num_tokens for receipt in receipts)
        assert world.count("bytes", kind=kind) == sum(receipt.num_bytes for receipt in receipts)
    loaded = [receipt for receipt in world.receipts if receipt.kind == "load"]
    assert world.count("loaded_tokens") == sum(sum(r.tokens_by_tier.values()) for r in loaded)
    assert replace(loaded[0], status="failed").line().startswith("[FlexKV] load request='l' status=failed")
