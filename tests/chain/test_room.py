"""Room: what goes, what must stay, and that nothing is promised or held beyond it."""

from __future__ import annotations

import threading

import pytest

from flexkv_core.testing import Fault, FaultKind, FaultTier, MemoryTier, context_for, small_layout
from flexkv_core.tier import Status, TierCapabilities, failed
from tests.support.chains import World, cpu_tier
from tests.support.waiting import DEADLINE_S

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens


def prompt(seed: int, blocks: float) -> list[int]:
    return [seed * 1000 + i for i in range(int(blocks * BLOCK))]


def memory(blocks: int = 0, **capabilities) -> MemoryTier:
    can = {"can_list": True, "capacity_bytes": blocks * LAYOUT.slot_bytes} | capabilities
    return MemoryTier(context_for(LAYOUT), TierCapabilities(**can))


@pytest.fixture
def worlds():
    made: list[World] = []

    def make(*args, **kwargs) -> World:
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        for link in world.chain.links:
            if isinstance(link.raw, FaultTier):
                link.raw.release()
        world.close()


def restarted(worlds, tier: MemoryTier, host_blocks: int, **policy) -> World:
    """A new chain with a fresh host pool over what ``tier`` kept."""
    again = MemoryTier(context_for(LAYOUT), tier.capabilities, medium=tier.medium)
    return worlds([(cpu_tier(LAYOUT, host_blocks), {}), (again, policy)])


def test_lent_slots_count_when_room_is_made(worlds):
    below = FaultTier(memory())
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (below, {"promote": "never", "load_threads": 1})])
    world.store(prompt(1, 4))
    world.store(prompt(2, 4))
    world.store(prompt(3, 8))
    below.add("load", Fault(FaultKind.HANG))
    first, _ = world.begin_load(prompt(1, 4))
    below.wait_hanging()
    second, _ = world.begin_load(prompt(2, 4))
    assert first is not None
    assert second is not None
    assert second.num_tokens == 4 * BLOCK
    world.until(lambda: below.release() or not world.chain.num_under_way)
    world.settle()
    assert {first.state, second.state} == {"done"}


def test_a_promise_leaves_room_for_what_it_pins(worlds):
    tier = memory()
    world = worlds([(cpu_tier(LAYOUT, 32), {}), (tier, {})])
    tokens = prompt(1, 12)
    world.store(tokens)
    world.close()
    small = restarted(worlds, tier, 8)
    assert small.load(tokens[: 4 * BLOCK]) == 4 * BLOCK
    promised = small.hit(tokens)
    assert promised == 8 * BLOCK
    assert small.load(tokens) == promised


@pytest.mark.parametrize("extension", [3, 4, 6])
def test_a_sequence_does_not_push_out_its_own_beginning(worlds, extension):
    tier = memory(8)
    world = worlds([(cpu_tier(LAYOUT, 32), {}), (tier, {})])
    tokens = prompt(1, 6 + extension)
    world.store(tokens[: 6 * BLOCK])
    world.store(tokens)
    assert world.chain.index.count(1) == 8
    world.close()
    assert restarted(worlds, tier, 32).hit(tokens) == 8 * BLOCK


def test_other_blocks_leave_before_the_own_beginning(worlds):
    tier = memory(8)
    world = worlds([(cpu_tier(LAYOUT, 32), {}), (tier, {})])
    tokens = prompt(1, 8)
    world.store(tokens[: 4 * BLOCK])
    world.store(prompt(2, 4))
    world.store(tokens)
    world.close()
    assert restarted(worlds, tier, 32).hit(tokens) == 8 * BLOCK


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_no_call_has_more_keys_than_the_tier_takes(worlds, ratio):
    tier = FaultTier(memory(8, max_batch=2))
    world = worlds([(cpu_tier(LAYOUT, 32), {}), (tier, {"eviction": {"ratio": ratio}})])
    for seed in range(4):
        world.store(prompt(seed, 6))
    world.chain.forget_all()
    world.settle()
    assert {number for operation, number in tier.calls if operation != "list"} <= {1, 2}
    assert tier.inner.usage().num_blocks == world.chain.index.count(1) == 0


def test_index_and_tier_agree_when_batches_run_at_once(worlds):
    tier = memory(8, max_batch=1, max_concurrency=8)
    world = worlds([(cpu_tier(LAYOUT, 32), {}), (tier, {})])
    for seed in range(10):
        world.store(prompt(seed, 5))
    assert set(world.chain.index.keys(1)) == set(tier.medium.values)
    assert world.count("store_failures") == 0


def test_a_second_try_waits_for_the_room_it_asked_for(worlds):
    tier = FaultTier(memory(8, max_concurrency=8))
    world = worlds([(cpu_tier(LAYOUT, 32), {}), (tier, {})])
    world.store(prompt(1, 4))
    tier.add("store", Fault(FaultKind.FAIL_KEYS, status=Status.NO_SPACE))
    tier.add("evict", Fault(FaultKind.HANG))
    world.begin_store(prompt(2, 2))
    world.until(lambda: any(operation == "evict" for operation, _ in tier.calls))
    tier.wait_hanging()
    world.chain.wait_for_message(0.02)
    tier.release()
    world.settle()
    assert world.count("store_failures") == 0
    assert world.chain.index.count(1) == 4


def test_a_host_pool_of_one_block_still_feeds_the_tier_below(worlds):
    tier = memory()
    world = worlds([(cpu_tier(LAYOUT, 1), {}), (tier, {})])
    world.store(prompt(1, 1))
    world.store(prompt(2, 1))
    assert len(tier.medium.values) == 2
    assert world.load(prompt(1, 1)) == BLOCK


@pytest.mark.parametrize("policy", [{"write": "never"}, {"write": "around"}, {"read_only": True}])
def test_a_first_tier_that_takes_no_stores_is_passed_through(worlds, policy):
    tier = memory()
    world = worlds([(cpu_tier(LAYOUT, 8), policy), (tier, {})])
    tokens = prompt(1, 3.5)
    assert world.store(tokens).num_tokens == len(tokens)
    assert world.chain.index.count(0) == 0
    assert world.chain.index.count(1) == 4
    assert world.store(tokens) is None
    assert world.load(tokens) == len(tokens)
    assert world.chain.index.count(0) == (4 if policy == {"write": "around"} else 0)
    world.chain.index.remove(1, [world.chain.index.keys(1)[-1]])  # the tier lost one: it is stored again
    assert world.store(tokens) is not None


def test_expired_blocks_can_be_stored_again(worlds):
    world = worlds([(cpu_tier(LAYOUT, 8), {"ttl_s": 10.0}), (memory(), {"ttl_s": 10.0})])
    tokens = prompt(1, 3.5)
    world.store(tokens)
    world.clock.advance(9.0)
    assert world.hit(tokens) == len(tokens)
    world.clock.advance(2.0)
    assert world.hit(tokens) == 0
    world.store(tokens)
    assert world.hit(tokens) == len(tokens)
    assert world.load(tokens) == len(tokens)


def test_forgetting_writes_nothing_back(worlds):
    tier = memory()
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (tier, {"write": "back"})])
    world.store(prompt(1, 4))
    world.chain.forget_all()
    world.settle()
    assert world.hit(prompt(1, 4)) == 0
    assert not tier.medium.values


def test_write_back_keeps_what_the_first_tier_lets_go(worlds):
    tier = memory()
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (tier, {"write": "back"})])
    world.store(prompt(1, 6))
    assert not tier.medium.values
    for seed in range(2, 8):
        world.store(prompt(seed, 2))
        world.store(prompt(seed, 2))
    assert world.hit(prompt(1, 6)) == 6 * BLOCK
    # Slots of victims come free when these are written, so a load may first get a part only.
    assert [world.load(prompt(1, 6)) for _ in range(4)][-1] == 6 * BLOCK


def test_tiers_that_were_down_lose_no_room(worlds):
    tier = FaultTier(memory(8))
    world = worlds(
        [
            (cpu_tier(LAYOUT, 32), {}),
            (tier, {"breaker_failures": 1, "breaker_reset_s": 1.0, "store_threads": 1}),
        ]
    )
    world.store(prompt(1, 8))
    down = Fault(FaultKind.RAISE)
    for operation in ("store", "evict"):
        tier.always(operation, down)
    world.store(prompt(2, 4))
    for operation in ("store", "evict"):
        tier.always(operation, None)
    world.clock.advance(2.0)
    world.store(prompt(3, 2))
    world.store(prompt(4, 2))
    assert set(world.chain.index.keys(1)) == set(tier.inner.medium.values)


def test_stores_under_way_are_bounded(worlds):
    world = worlds([(cpu_tier(LAYOUT, 32), {})], manual=True, engine={"max_store_tokens": 3 * BLOCK})
    first, _ = world.begin_store(prompt(1, 2))
    second, _ = world.begin_store(prompt(2, 2))
    third, _ = world.begin_store(prompt(3, 2))
    assert [first.num_tokens, second.num_tokens, third] == [2 * BLOCK, BLOCK, None]
    assert world.count("store_dropped_blocks", cause="too_many_under_way") == 3
    world.transfer.run_all()
    world.settle()
    assert world.chain.stores.tokens_under_way == 0
    assert world.begin_store(prompt(3, 2))[0].num_tokens == 2 * BLOCK
    world.transfer.run_all()
    world.settle()


def test_the_longest_prefix_that_fits_is_stored(worlds):
    world = worlds([(cpu_tier(LAYOUT, 4), {})])
    tokens = prompt(1, 6)
    assert world.store(tokens).num_tokens == 4 * BLOCK
    assert world.load(tokens) == 4 * BLOCK


def test_only_the_shortage_is_evicted(worlds):
    world = worlds([(cpu_tier(LAYOUT, 8), {})])
    world.store(prompt(1, 6))
    world.store(prompt(2, 4))
    assert world.count("evicted_blocks") == 2
    assert world.hit(prompt(1, 6)) == 4 * BLOCK


def test_what_waits_for_a_slow_tier_is_fed_later(worlds):
    tier = FaultTier(memory())
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (tier, {"store_threads": 1})])
    tier.add("store", Fault(FaultKind.HANG))
    world.begin_store(prompt(1, 4))
    world.chain.poll()
    tier.wait_hanging()
    world.begin_store(prompt(2, 4))
    world.chain.poll()
    assert len(world.chain.links[1].waiting) == 4
    tier.release()
    world.settle()
    assert len(tier.inner.medium.values) == 8


def test_stores_in_flight_are_not_copied_twice_without_a_first_tier(worlds):
    tier = FaultTier(memory(shared=True, can_list=False))
    world = worlds([(tier, {})], staging=16 * LAYOUT.slot_bytes, manual=True)
    tokens = prompt(1, 6)
    first, _ = world.begin_store(tokens[: 3 * BLOCK])
    second, _ = world.begin_store(tokens)
    assert second.plan.ranges() == [(3 * BLOCK, 6 * BLOCK)]
    tier.add("store", *[Fault(FaultKind.HANG)] * 6)
    world.transfer.run_all()
    world.chain.poll()
    tier.wait_hanging()
    assert world.begin_store(tokens)[0] is None
    tier.always("store", None)
    world.until(lambda: tier.release() or not world.chain.num_under_way)
    assert first.state == second.state == "done"
    assert len(tier.inner.medium.values) == 6


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_blocks_that_vanish_behind_a_promise_shorten_the_load(worlds, host_blocks):
    tier = memory()
    rows = [(cpu_tier(LAYOUT, host_blocks), {})] if host_blocks else []
    world = worlds([*rows, (tier, {})], staging=16 * LAYOUT.slot_bytes)
    tokens = prompt(1, 4)
    world.store(tokens)
    lookup = world.chain.lookup(world.sequence(tokens))
    for key in reversed(world.sequence(tokens).keys()[2:]):
        world.chain.index.remove(0, [key])
        tier.medium.values.pop(key, None)
        if host_blocks:
            world.chain.host.direct.evict([key])
    job = world.chain.load(world.sequence(tokens), lookup, start=0)
    assert job.num_tokens == 2 * BLOCK
    assert world.count("load_shortened", cause="vanished") == 2
    world.chain.cancel(job)
    world.settle()
    world.chain.forget_all()
    assert world.chain.load(world.sequence(tokens), lookup, start=0) is None
    world.settle()


def test_blocks_before_the_start_do_not_count_against_the_room(worlds):
    tier = memory()
    world = worlds([(cpu_tier(LAYOUT, 32), {}), (tier, {})])
    tokens = prompt(1, 12)
    world.store(tokens)
    world.close()
    small = restarted(worlds, tier, 8)
    assert small.load(tokens[: 4 * BLOCK]) == 4 * BLOCK
    assert small.load(tokens, start=4 * BLOCK) == 8 * BLOCK


def test_evictions_of_a_second_try_that_is_put_off_are_carried_out(worlds):
    tier = FaultTier(memory(8))
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (tier, {"store_threads": 1})])
    world.store(prompt(1, 4))
    tier.add("store", Fault(FaultKind.FAIL_KEYS, status=Status.NO_SPACE), Fault(FaultKind.HANG))
    world.begin_store(prompt(2, 2))
    world.begin_store(prompt(3, 4))
    world.until(lambda: tier.release() or not world.chain.num_under_way)
    world.settle()
    assert set(world.chain.index.keys(1)) == set(tier.inner.medium.values)


@pytest.mark.parametrize("policy", [{"write": "never"}, {"read_only": True}])
def test_a_tail_is_not_copied_again_and_again_for_tiers_that_keep_none(worlds, policy):
    shared = memory(shared=True, can_list=False)
    world = worlds([(cpu_tier(LAYOUT, 16), policy), (memory(), {}), (shared, {})])
    tokens = prompt(1, 2.5)
    assert world.store(tokens).num_tokens == len(tokens)
    assert world.store(tokens) is None


def test_a_tail_that_no_tier_keeps_is_not_copied(worlds):
    world = worlds([(cpu_tier(LAYOUT, 16), {"read_only": True}), (memory(), {"store_tails": False})])
    assert world.store(prompt(1, 2.5)).num_tokens == 2 * BLOCK


def test_a_receipt_that_nobody_takes_costs_nothing(worlds, caplog):
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (memory(), {})])

    def fail(_receipt) -> None:
        raise RuntimeError("listener")

    world.chain._on_receipt = fail
    world.store(prompt(1, 2))
    assert world.load(prompt(1, 2)) == 2 * BLOCK
    assert len(world.chain.links[1].raw.medium.values) == 2
    assert "receipt" in caplog.text


def test_pieces_that_overtake_each_other_have_made_their_own_room(worlds):
    tier = FaultTier(memory(2, max_batch=1))
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (tier, {"store_threads": 2})])
    world.store(prompt(1, 2))
    tier.add("evict", Fault(FaultKind.HANG))
    world.begin_store(prompt(2, 2))
    world.chain.poll()
    tier.wait_hanging()
    world.until(lambda: tier.calls.count(("store", 1)) == 3)  # the other thread, which made its own room
    tier.release()
    world.settle()
    assert world.count("store_failures") == 0
    assert world.count("evicted_blocks", tier="tier1") == 2
    assert len(tier.inner.medium.values) == 2


def test_after_close_nothing_is_found_stored_or_raised(worlds):
    tier = memory()
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (tier, {})])
    tokens = prompt(1, 3)
    world.store(tokens)
    sequence = world.sequence(tokens)
    lookup = world.chain.lookup(sequence)
    planned = world.chain.store(world.sequence(prompt(2, 2)), 2 * BLOCK)
    world.close()
    assert world.hit(tokens) == 0
    assert world.chain.load(sequence, lookup, start=0) is None
    assert world.chain.prefetch(sequence, lookup, start=0) is None
    assert world.chain.store(world.sequence(prompt(3, 1)), BLOCK) is None
    world.chain.launch(planned, range(2 * BLOCK), world.transfer.fence())
    world.chain.cancel(planned)
    world.chain.probe(sequence, 0)
    world.chain.forget_all()
    world.chain.poll()
    assert world.chain.drain(1.0)
    assert planned.state == "cancelled"
    assert world.chain.index.num_pins == 0


@pytest.mark.parametrize("extension", [2, 4, 9])
def test_the_first_tier_keeps_a_sequences_beginning(worlds, extension):
    world = worlds([(cpu_tier(LAYOUT, 8), {})])
    tokens = prompt(1, 6 + extension)
    world.store(tokens[: 6 * BLOCK])
    world.store(tokens)
    assert world.load(tokens) == 8 * BLOCK


def test_values_whose_store_failed_in_doubt_do_not_stay(worlds):
    tier = FaultTier(memory(8))
    world = worlds([(cpu_tier(LAYOUT, 16), {}), (tier, {"store_threads": 1})])
    tier.add("store", Fault(FaultKind.RETURN_NONE))  # they were stored, but who knows
    world.store(prompt(1, 4))
    assert len(tier.inner.medium.values) == 4
    assert world.chain.index.count(1) == 0
    world.store(prompt(2, 2))
    assert set(tier.inner.medium.values) == set(world.chain.index.keys(1))
    assert world.chain.index.count(1) == 2


def test_nothing_leaves_a_tier_for_stores_that_it_cannot_take(worlds):
    tier = FaultTier(memory(4))
    world = worlds([(cpu_tier(LAYOUT, 16), {}), (tier, {"store_threads": 1, "breaker_failures": 0})])
    world.store(prompt(1, 4))
    tier.add("evict", Fault(FaultKind.HANG))
    world.begin_store(prompt(2, 1))
    world.chain.poll()
    tier.wait_hanging()
    world.clock.advance(31)
    world.until(lambda: not world.chain.links[1].workers.can_store)
    world.begin_store(prompt(3, 4))
    world.chain.poll()
    assert world.chain.index.count(1) == 3
    tier.release()
    world.settle()
    assert set(tier.inner.medium.values) == set(world.chain.index.keys(1))


def test_a_slot_that_gets_the_same_block_again_is_sealed_anew(worlds):
    tier = memory()
    world = worlds([(cpu_tier(LAYOUT, 1), {}), (tier, {})])
    world.store(prompt(1, 1))
    world.chain.forget_all()
    world.settle()
    world.device.weights = 1  # KV of the same tokens need not be the same bits twice
    world.store(prompt(1, 1))
    world.store(prompt(2, 1))
    assert world.load(prompt(1, 1)) == BLOCK


def test_what_waits_is_given_up_where_nothing_is_under_way_to_call_for_it(worlds):
    below = FaultTier(memory(9))
    world = worlds([(cpu_tier(LAYOUT, 16), {}), (below, {"load_threads": 1, "store_threads": 1})])
    world.store(prompt(1, 9))
    world.chain._parts.capacity.evict(world.chain.links[0], 16, is_final=True)
    below.add("load", Fault(FaultKind.HANG))
    load, _ = world.begin_load(prompt(1, 9), start=8 * BLOCK)  # the last block keeps all before it
    below.wait_hanging()
    store, _ = world.begin_store(prompt(2, 10))
    world.until(lambda: store.is_over)
    below.release()
    world.settle()
    assert load.state == "done"
    assert world.count("store_dropped_blocks", cause="no_room", tier="tier1") == 9


def test_what_comes_back_while_it_is_removed_is_not_lost_unnoticed(worlds):
    tier = FaultTier(memory(8))
    below = {"store_threads": 2, "breaker_failures": 0}
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (tier, below)])
    world.store(prompt(1, 4))
    world.store(prompt(2, 4))
    tier.add("evict", Fault(FaultKind.HANG))
    first, _ = world.begin_store(prompt(3, 1))
    world.until(lambda: first.is_over)
    tier.wait_hanging()  # one block of the first prompt is out of the index, and not removed yet
    world.chain._parts.capacity.evict(world.chain.links[0], 8, is_final=True)
    second, _ = world.begin_store(prompt(1, 4))
    world.until(lambda: second.is_over)
    assert world.count("store_dropped_blocks", cause="being_removed", tier="tier1") == 1
    tier.release()
    world.settle()
    assert set(tier.inner.medium.values) == set(world.chain.index.keys(1))
    assert not world.chain.links[1].leaving
    world.store(prompt(1, 5))  # it was owed
    assert set(world.sequence(prompt(1, 5)).keys()) <= set(tier.inner.medium.values)


class Refusing(MemoryTier):
    """Has no room for some blocks, which it says only when told to."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.refused: set[bytes] = set()
        self.told = threading.Event()

    def store(self, keys, values):
        if self.refused.isdisjoint(keys):
            return super().store(keys, values)
        assert self.told.wait(DEADLINE_S)
        return [failed(Status.NO_SPACE, "made by the test")] * len(keys)


def test_what_could_not_be_removed_is_tried_again_also_if_its_next_store_failed(worlds):
    inner = Refusing(context_for(LAYOUT), TierCapabilities(capacity_bytes=8 * LAYOUT.slot_bytes))
    tier = FaultTier(inner)
    world = worlds([(cpu_tier(LAYOUT, 8), {}), (tier, {"store_threads": 2, "breaker_failures": 0})])
    world.store(prompt(1, 1))
    tier.add("evict", Fault(FaultKind.FAIL_KEYS))
    world.chain.forget_all()
    world.settle()
    inner.refused = set(inner.medium.values)
    job, _ = world.begin_store(prompt(1, 1))
    world.until(lambda: job.is_over)
    world.begin_store(prompt(2, 1))
    world.until(lambda: world.chain.index.count(1) == 2 and world.chain.links[1].workers.num_open_stores == 1)
    world.chain.poll()
    inner.told.set()
    world.settle()
    world.store(prompt(3, 1))
    assert set(inner.medium.values) == set(world.chain.index.keys(1))
