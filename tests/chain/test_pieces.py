"""Calls that workers cut into pieces: what one piece learns, holds or breaks is its own affair."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.chain.calls import Call, Completions, Piece, Verb
from flexkv_core.chain.cascade import _may_be_there
from flexkv_core.chain.executor import TierWorkers
from flexkv_core.chain.speed import SpeedEstimate
from flexkv_core.testing import FakeClock, Fault, FaultKind, FaultTier, MemoryTier, context_for, small_layout
from flexkv_core.tier import Outcome, Status, failed
from flexkv_core.wrappers.breaker import BreakerTier
from flexkv_core.wrappers.deadline import within
from tests.support.chains import World, cpu_tier
from tests.support.waiting import DEADLINE_S, wait_until

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
ONE = {"load_threads": 1, "store_threads": 1}


def prompt(seed: int, blocks: int) -> list[int]:
    return [seed * 1000 + i for i in range(blocks * BLOCK)]


@contextmanager
def opened(tier: MemoryTier | FaultTier, **policy: object) -> Iterator[World]:
    """A host pool over a tier; what the tests store goes into both."""
    world = World([(cpu_tier(LAYOUT, 64), {}), (tier, ONE | policy)])
    try:
        yield world
    finally:
        if isinstance(tier, FaultTier):
            tier.release()
        world.settle()
        world.close()


def only_below(world: World, *prompts: Sequence[int]) -> None:
    for tokens in prompts:
        world.store(tokens)
    world.chain._parts.capacity.evict(world.chain.links[0], 64, is_final=True)
    world.settle()


class Slow(MemoryTier):
    """Each call takes ten milliseconds of a clock."""

    clock: FakeClock

    def load(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self.clock.advance(0.01)
        return super().load(keys, into)


def test_a_load_that_is_limited_in_part_says_that_the_tier_is_slow() -> None:
    tier = Slow(context_for(LAYOUT), TierCapabilities(max_batch=2, max_concurrency=2))
    limits = {"load": {"operations_per_s": 0.1, "burst_s": 20}}
    with opened(tier, load_deadline_s=5.0, limits=limits) as world:
        tier.clock = world.clock
        only_below(world, prompt(1, 8))
        job, _ = world.begin_load(prompt(1, 8))
        world.until(lambda: job.is_over and not world.chain.fills.num_open)
        assert (job.state, job.cause) == ("failed", "tier1:limited")
        assert world.chain.links[1].speed.seconds_for(8 * LAYOUT.slot_bytes) > 5.0


@pytest.mark.parametrize("times", [1, 2, 7, 32])
def test_a_call_teaches_as_much_as_its_pieces(times: int) -> None:
    one, many = SpeedEstimate(), SpeedEstimate()
    for amount, seconds, now in [(100, 1.0, 0.0), (300, 2.0, 1.0), (100, 5.0, 9.0)]:
        one.observe(amount, seconds, now, times)
        for _ in range(times):
            many.observe(amount, seconds, now)
        assert one.seconds_for(200) == pytest.approx(many.seconds_for(200))


def test_of_a_store_that_hangs_only_the_slots_inside_stay_lent() -> None:
    """Blocks that leave the first tier, with ``write: back``: four are inside, twelve nobody has begun."""
    tier = FaultTier(MemoryTier(context_for(LAYOUT), TierCapabilities(max_batch=2, max_concurrency=4)))
    with opened(tier, store_threads=2, store_deadline_s=5.0, write="back") as world:
        world.store(prompt(1, 16))
        tier.always("store", Fault(FaultKind.HANG))
        world.chain._parts.capacity.evict(world.chain.links[0], 64)
        tier.wait_hanging(2)
        world.clock.advance(6)
        world.until(lambda: world.count("store_failures", tier="tier1", cause="timeout") == 16)
        assert world.chain.host.num_lent == 2 * 2
        tier.always("store", None)
        tier.release()
        world.settle()
        assert world.chain.host.num_lent == 0


def test_a_value_that_may_be_there_is_known_although_its_call_was_late() -> None:
    """The deadline comes between two pieces: one may have stored its value, the other has not begun."""

    class Late(MemoryTier):
        def store(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> list[Outcome]:
            return [failed(Status.TIMEOUT, "the driver has waited in vain")] * len(values)

    clock, completions = FakeClock(), Completions()
    tier = Late(context_for(LAYOUT))
    workers = TierWorkers(
        "t", tier, load_threads=1, store_threads=1, completions=completions, clock=clock
    )  # not started: the test is its thread
    keys = [bytes([number]) * 32 for number in range(2)]
    value = memoryview(bytearray(8))
    workers.submit(Call(Verb.STORE, keys, lambda *_: [value], piece=1, deadline=clock() + 10))
    lane = workers._stores
    piece = lane._next()
    assert piece is not None
    lane._take_in(piece, lane._run(piece), 0.1)
    clock.advance(20)
    workers.expire(clock())
    (end,) = completions.drain()
    assert not end.is_adrift
    assert [_may_be_there(end, number) for number in range(2)] == [True, False]
    tier.close()


@pytest.mark.parametrize("wanted", [2, 4])
def test_a_prefetch_that_is_asked_for_again_is_told_once(wanted: int) -> None:
    """Whether all of a withdrawn prefetch is wanted or a part: observers hear of blocks, never of none."""
    tier = FaultTier(MemoryTier(context_for(LAYOUT), TierCapabilities(max_concurrency=3)))
    told: list[tuple[str, int]] = []
    with opened(tier) as world:
        only_below(world, prompt(1, 4), prompt(9, 1))
        observers = world.chain.observers
        observers.stored = lambda _tier, keys, _size: told.append(("stored", len(keys)))  # type: ignore[method-assign]  # heard
        observers.loaded = lambda _tier, keys, _size: told.append(("loaded", len(keys)))  # type: ignore[method-assign]  # heard
        tier.add("load", Fault(FaultKind.HANG))
        world.begin_load(prompt(9, 1))
        tier.wait_hanging()
        sequence = world.sequence(prompt(1, 4))
        prefetch = world.chain.prefetch(sequence, world.chain.lookup(sequence), start=0)
        assert prefetch is not None
        world.chain.cancel(prefetch)
        job, _ = world.begin_load(prompt(1, wanted))
        tier.release()
        world.settle()
        assert job.state == "done"
    assert sorted(told) == sorted([("loaded", 1), ("stored", 1), ("loaded", wanted), ("stored", wanted)])


def test_what_a_load_needed_of_a_prefetch_goes_on_when_both_are_gone() -> None:
    tier = FaultTier(MemoryTier(context_for(LAYOUT), TierCapabilities(max_concurrency=3)))
    with opened(tier) as world:
        only_below(world, prompt(1, 8), prompt(9, 1))
        tier.add("load", Fault(FaultKind.HANG))
        world.begin_load(prompt(9, 1))
        tier.wait_hanging()
        sequence = world.sequence(prompt(1, 8))
        prefetch = world.chain.prefetch(sequence, world.chain.lookup(sequence), start=0)
        job, _ = world.begin_load(prompt(1, 4))
        assert prefetch is not None
        world.chain.cancel(prefetch)
        world.chain.cancel(job)
        tier.release()
        world.settle()
        assert world.count("load_failures") == 0
        assert world.chain.lookup(sequence).tokens_by_tier == {"tier0": 8 * BLOCK}


def test_an_older_piece_that_fails_does_not_end_its_siblings_probe() -> None:
    inside = [threading.Event(), threading.Event()]
    gates = [threading.Event(), threading.Event()]

    class Gated(MemoryTier):
        def load(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
            number = keys[0][0]
            inside[number].set()
            assert gates[number].wait(DEADLINE_S)
            return [failed(Status.UNAVAILABLE, "gone")] if number == 0 else super().load(keys, into)

    clock, tier = FakeClock(), Gated(context_for(LAYOUT))
    breaker = BreakerTier(tier, failures=1, reset_s=2.0, clock=clock)
    call = Call(Verb.LOAD, [bytes([number]) * 32 for number in range(2)], piece=1)

    def load(number: int) -> None:
        with within(float("inf"), clock, Piece(call, number, number + 1)):
            breaker.load([call.keys[number]], [memoryview(bytearray(8))])

    threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
    threads[0].start()
    wait_until(inside[0].is_set)
    breaker.report(Status.UNAVAILABLE, "down", "load")
    clock.advance(3)
    threads[1].start()
    wait_until(inside[1].is_set)
    gates[0].set()
    threads[0].join(DEADLINE_S)
    clock.advance(3)
    assert not breaker.wants_probe, "one probe at a time"
    breaker.report(Status.TIMEOUT, "late", "load", call=call)
    clock.advance(3)
    assert breaker.wants_probe, "it was given up with its call"
    gates[1].set()
    threads[1].join(DEADLINE_S)
    assert breaker.is_up
    tier.close()
