"""Tiers that other processes fill too: what is there must be asked, and is believed for a while only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.testing import Fault, FaultKind, FaultTier, Medium, MemoryTier, context_for, small_layout
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
SHARED = TierCapabilities(shared=True, persistent=True, max_batch=2, max_lookup=100)


def prompt(seed: int, length: int) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


def shared_world(medium: Medium, tier=None) -> World:
    far = tier or MemoryTier(context_for(LAYOUT), SHARED, medium)
    return World([(cpu_tier(LAYOUT, 16), {}), (far, {})])


def ask(world: World, tokens) -> None:
    lookup = world.chain.lookup(world.sequence(tokens))
    assert lookup.wants_probe
    assert world.chain.probe(world.sequence(tokens), lookup.num_tokens // BLOCK) == 1
    world.settle()
    assert world.chain.num_probes == 0


@pytest.fixture
def medium():
    return Medium()


def test_what_one_stored_the_other_serves(medium):
    first, second = shared_world(medium), shared_world(medium)
    tokens = prompt(1, 3 * BLOCK + 5)
    first.store(tokens)
    assert len(medium.values) == 3, "a shared tier keeps whole blocks only"
    assert second.hit(tokens) == 0
    ask(second, tokens)
    assert second.hit(tokens) == 3 * BLOCK
    assert second.load(tokens) == 3 * BLOCK
    first.close()
    second.close()


def test_a_known_miss_is_not_asked_again_at_once(medium):
    world = shared_world(medium)
    tokens = prompt(1, 2 * BLOCK)
    ask(world, tokens)
    assert not world.chain.lookup(world.sequence(tokens)).wants_probe
    world.clock.advance(3600)
    assert world.chain.lookup(world.sequence(tokens)).wants_probe
    world.close()


def test_a_broken_promise_is_a_miss_and_is_forgotten(medium):
    world = shared_world(medium)
    tokens = prompt(1, 2 * BLOCK)
    other = shared_world(medium)
    other.store(tokens)
    ask(world, tokens)
    medium.values.clear()
    assert world.load(tokens) == 0
    assert world.count("load_failures", tier="tier1", cause="miss") == 2
    assert world.hit(tokens) == 0
    world.close()
    other.close()


def test_a_tier_that_cannot_answer_is_a_miss(medium):
    far = FaultTier(MemoryTier(context_for(LAYOUT), SHARED, medium))
    far.always("lookup", Fault(FaultKind.RETURN_NONE))
    world = shared_world(medium, far)
    ask(world, prompt(1, 2 * BLOCK))
    assert world.hit(prompt(1, 2 * BLOCK)) == 0
    assert world.count("lookup_failures", tier="tier1") == 2
    world.close()


def test_a_tier_whose_lookups_hang_is_told_to_be_down_and_comes_back(medium):
    """Only the first question hangs in it; those that find no thread say the same of it."""
    far = FaultTier(MemoryTier(context_for(LAYOUT), SHARED, medium))
    far.add("lookup", Fault(FaultKind.HANG))
    world = World([(cpu_tier(LAYOUT, 16), {}), (far, {"breaker_failures": 3, "breaker_reset_s": 5})])
    link, tokens = world.chain.links[1], prompt(1, 2 * BLOCK)

    def probe() -> None:
        world.chain.probe(world.sequence(tokens), 0)

    probe()
    far.wait_hanging()
    world.clock.advance(1.5)
    world.until(lambda: not world.chain.num_probes)
    assert link.is_up, "one question is no outage"
    for _ in range(2):
        world.clock.advance(3)  # the answer "not there" is believed for two seconds
        probe()
        world.until(lambda: not world.chain.num_probes)
    assert not link.is_up
    assert link.fault == "is down: no thread has come back from the tier"
    far.release()
    world.until(lambda: not link.workers.num_open)
    world.clock.advance(10)
    probe()
    world.until(lambda: not world.chain.num_probes)
    assert link.is_up
    world.close()


def test_questions_that_only_wait_say_nothing_of_a_tier(medium):
    """Whatever they wait behind is counted; a long prompt's questions must not end a tier that answers."""
    far = FaultTier(MemoryTier(context_for(LAYOUT), replace(SHARED, max_lookup=1, max_batch=1), medium))
    far.add("lookup", Fault(FaultKind.HANG))
    world = World([(cpu_tier(LAYOUT, 16), {}), (far, {"breaker_failures": 2})])
    world.chain.probe(world.sequence(prompt(1, 6 * BLOCK)), 0)
    far.wait_hanging()
    world.clock.advance(1.5)
    world.until(lambda: not world.chain.num_probes)
    assert world.count("lookup_failures", tier="tier1", cause="timeout") == 6
    assert world.chain.links[1].is_up
    far.release()
    world.until(lambda: not world.chain.links[1].workers.num_open)
    world.close()


def test_two_shared_tiers_take_turns_and_a_miss_hashes_little(medium):
    rows = [(MemoryTier(context_for(LAYOUT), SHARED, Medium()), {}) for _ in range(2)]
    world = World([(cpu_tier(LAYOUT, 300), {}), *rows])
    sequence = world.sequence(prompt(1, 200 * BLOCK))
    assert world.chain.lookup(sequence).wants_probe
    assert len(sequence._keys) <= 16
    now = world.clock()
    for number, key in enumerate(sequence.keys(160)):
        world.chain.links[1].known.note(key, now, is_there=number not in (0, 7, 8, 100))
        world.chain.links[2].known.note(key, now, is_there=number in (0, 7, 8, 20, 100))
    runs = world.chain.lookup(sequence).match.runs
    assert [(run.tier, run.first, run.last) for run in runs] == [
        (2, 0, 1),
        (1, 1, 7),
        (2, 7, 9),
        (1, 9, 100),
        (2, 100, 101),
        (1, 101, 160),
    ]
    world.close()
