"""Codecs and rate limits in a chain: round trips, restarts, other keys, and a scheduler that never waits."""

from __future__ import annotations

import time

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.errors import ConfigError
from flexkv_core.testing import (
    FaultKind,
    FaultTier,
    Medium,
    MemoryTier,
    SeededFaults,
    context_for,
    small_layout,
)
from flexkv_core.wrappers.encoding import is_encoded
from tests.support.chains import World, cpu_tier

pytest.importorskip("zstandard", reason="the extra zstd is not installed")
pytest.importorskip("cryptography", reason="the extra crypto is not installed")

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
OWN = TierCapabilities(persistent=True, can_list=True, max_batch=4, alignment_bytes=512)
SHARED = TierCapabilities(shared=True, persistent=True, max_batch=2, max_lookup=100)
BOTH = {"compress": "zstd", "encrypt": {"key": "11" * 32}}


def prompt(seed: int, length: int) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


def world(medium: Medium, capabilities=OWN, blocks: int = 4, **policy) -> World:
    far = MemoryTier(context_for(LAYOUT), capabilities, medium)
    return World([(cpu_tier(LAYOUT, blocks), {}), (far, policy)])


@pytest.fixture
def medium():
    return Medium()


def test_what_was_encoded_comes_back_from_below_and_after_a_restart(medium):
    first = world(medium, codec=BOTH)
    tokens = prompt(1, 2 * BLOCK + 5)
    first.store(tokens)
    assert len(medium.values) == 3
    assert all(is_encoded(memoryview(value)) for value in medium.values.values())
    first.close()
    second = world(medium, codec=BOTH)
    assert second.chain.index.count(1) == 3
    assert second.load(tokens) == 2 * BLOCK + 5
    assert second.count("codec_bytes", operation="load", form="encoded") < second.count(
        "codec_bytes", operation="load", form="plain"
    )
    second.close()


@pytest.mark.parametrize("codec", [None, {"encrypt": {"key": "22" * 32}}, {"compress": "zstd"}])
def test_after_a_restart_with_another_codec_nothing_is_served_and_room_is_made(medium, codec):
    first = world(medium, codec=BOTH)
    first.store(prompt(1, 2 * BLOCK))
    first.close()
    second = world(medium, **({"codec": codec} if codec else {}))
    assert second.hit(prompt(1, 2 * BLOCK)) == 0
    second.settle()
    assert second.count("foreign_blocks") == 2
    assert not medium.values, "what can never be served takes no room"
    second.close()


def test_instances_with_other_keys_leave_each_other_alone(medium):
    mine = world(medium, SHARED, codec=BOTH)
    other = world(medium, SHARED, codec={"encrypt": {"key": "22" * 32, "key_id": "2"}})
    plain = world(medium, SHARED)
    tokens = prompt(1, 2 * BLOCK)
    mine.store(tokens)
    for stranger in (other, plain):
        stranger.chain.probe(stranger.sequence(tokens), 0)
        stranger.settle()
        assert stranger.hit(tokens) == 2 * BLOCK
        assert stranger.load(tokens) == 0
        assert stranger.count("load_failures", cause="miss") == 2
        stranger.close()
    assert len(medium.values) == 2, "they are still there"
    mine.close()


@pytest.mark.parametrize("field", [{"codec": {"compress": "zstd"}}, {"limits": {"load": {"bytes_per_s": 1}}}])
def test_addressable_memory_has_neither(field):
    with pytest.raises(ConfigError, match=f"{next(iter(field))}: its memory"):
        World([(cpu_tier(LAYOUT, 4), field)])


def test_a_block_counts_with_the_codecs_room():
    size = LAYOUT.slot_bytes + 4096
    bounded = TierCapabilities(capacity_bytes=3 * size - 1)
    w = World([(cpu_tier(LAYOUT, 4), {}), (MemoryTier(context_for(LAYOUT), bounded), {"codec": BOTH})])
    assert w.chain.links[1].capacity_blocks == 2
    w.close()


# ---- limits ----------------------------------------------------------------------------------------

SLOW = {"limits": {"load": {"operations_per_s": 0.01}, "store": {"operations_per_s": 0.01}}}


def test_a_limit_holds_nobody_up_but_its_worker(medium):
    tier = FaultTier(MemoryTier(context_for(LAYOUT), OWN, medium))
    w = World([(cpu_tier(LAYOUT, 8), {}), (tier, {**SLOW, "store_threads": 1, "load_threads": 1})])
    w.store(prompt(1, BLOCK))
    assert len(medium.values) == 1, "the burst"
    began = time.monotonic()
    job, slots = w.begin_store(prompt(2, BLOCK))
    w.until(lambda: job.is_over)
    w.device.free(slots)
    assert w.hit(prompt(2, BLOCK)) == BLOCK, "it is in the first tier, whatever the second one does"
    w.close()
    assert time.monotonic() - began < 90.0, "the turn comes in a hundred seconds; closing ends what waits"
    assert len(medium.values) == 1


def test_stores_without_a_turn_are_dropped_and_counted(medium):
    w = world(medium, blocks=8, store_deadline_s=1.0, breaker_failures=1, **SLOW)
    w.store(prompt(1, BLOCK))
    w.store(prompt(2, BLOCK))
    assert w.count("store_failures", tier="tier1", cause="limited") == 1
    assert w.count("limited_blocks", tier="tier1", operation="store") == 1
    assert w.chain.links[1].is_up, "a limit is no fault of the tier"
    assert w.hit(prompt(2, BLOCK)) == BLOCK
    w.close()


def test_loads_without_a_turn_are_computed_and_the_block_stays_known(medium):
    w = world(medium, blocks=8, load_deadline_s=1.0, limits={"load": {"operations_per_s": 0.01}})
    for seed in (1, 2):
        w.store(prompt(seed, BLOCK))
    w.chain._parts.capacity.evict(w.chain.links[0], 8, is_final=True)
    assert w.load(prompt(1, BLOCK)) == BLOCK
    assert w.load(prompt(2, BLOCK)) == 0
    assert w.count("load_failures", tier="tier1", cause="limited") == 1
    assert w.receipts[-1].cause == "tier1:limited"
    w.clock.advance(1000)
    assert w.load(prompt(2, BLOCK)) == BLOCK
    w.close()


def test_calls_that_queue_behind_a_limit_open_no_breaker(medium):
    limits = {"store": {"operations_per_s": 0.05}}
    w = world(medium, blocks=16, store_deadline_s=5.0, store_threads=1, breaker_failures=1, limits=limits)
    tokens = prompt(1, BLOCK)
    w.store(tokens)
    _, slots = w.begin_store(prompt(2, 8 * BLOCK))
    w.until(lambda: w.chain.links[1].workers.num_open_stores)
    w.clock.advance(6.0)
    w.settle()
    w.device.free(slots)
    assert w.chain.links[1].is_up
    w.close()


def test_a_value_that_no_codec_knows_any_more_takes_no_room(medium):
    w = world(medium, codec={"compress": "zstd"})
    w.store(prompt(1, BLOCK))
    w.chain._parts.capacity.evict(w.chain.links[0], 4, is_final=True)
    for key, value in medium.values.items():
        medium.values[key] = b"X" + bytes(value[1:])
    assert w.load(prompt(1, BLOCK)) == 0
    w.settle()
    assert not medium.values
    w.close()


@pytest.mark.parametrize("seed", range(8))
def test_no_fault_below_a_codec_serves_a_wrong_token(seed):
    """``World.load`` checks every byte; a load that fails costs nothing but itself."""
    print(f"seed {seed}")
    faults = SeededFaults(
        seed, rate=0.5, kinds=[FaultKind.FLIP, FaultKind.TRUNCATE, FaultKind.SWAP, FaultKind.LIE]
    )
    tier = FaultTier(MemoryTier(context_for(LAYOUT), OWN), schedule=faults)
    w = World([(cpu_tier(LAYOUT, 8), {}), (tier, {"codec": BOTH, "breaker_failures": 0})])
    for round_ in range(12):
        tokens = prompt(round_ % 4, 5 * BLOCK + 3)
        w.load(tokens)
        w.store(tokens)
    assert w.count("codec_failures", cause="damaged") > 0
    w.close()
