"""A driver is never called more often at once than it says, whatever the chain has to do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from flexkv_core.errors import TierTimeoutError
from flexkv_core.metrics import Metrics
from flexkv_core.testing import (
    FakeClock,
    Fault,
    FaultKind,
    FaultTier,
    MemoryTier,
    context_for,
    small_layout,
)
from flexkv_core.tier import Status, TierCapabilities
from flexkv_core.wrappers import turns
from flexkv_core.wrappers.deadline import within
from flexkv_core.wrappers.guard import GuardedTier
from flexkv_core.wrappers.turns import Turns
from tests.support.chains import World, cpu_tier
from tests.support.waiting import DEADLINE_S, wait_until

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
KEY = [bytes([7]) * 32]
OPERATIONS = {
    "lookup": lambda tier: tier.lookup(KEY),
    "load": lambda tier: tier.load(KEY, [memoryview(bytearray(LAYOUT.slot_bytes))]),
    "store": lambda tier: tier.store(KEY, [memoryview(bytes(8))]),
    "evict": lambda tier: tier.evict(KEY),
    "check_health": lambda tier: tier.check_health(),
}


def prompt(seed: int, blocks: int) -> list[int]:
    return [seed * 1000 + i for i in range(blocks * BLOCK)]


class Counting(MemoryTier):
    """Knows how many calls are inside it; each stays until others have had time to come."""

    def __init__(self, capabilities: TierCapabilities) -> None:
        super().__init__(context_for(LAYOUT), capabilities)
        self.inside = self.most = 0
        self.seen: set[str] = set()
        self.lock = threading.Lock()

    def _counted(self, name, call):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.seen.add(name)
        time.sleep(0.002)
        try:
            return call()
        finally:
            with self.lock:
                self.inside -= 1

    def lookup(self, keys):
        return self._counted("lookup", lambda: super(Counting, self).lookup(keys))

    def load(self, keys, into):
        return self._counted("load", lambda: super(Counting, self).load(keys, into))

    def store(self, keys, values):
        return self._counted("store", lambda: super(Counting, self).store(keys, values))

    def evict(self, keys):
        return self._counted("evict", lambda: super(Counting, self).evict(keys))


@pytest.mark.parametrize(
    "policy", [{}, {"load_threads": 4, "store_threads": 4}, {"store_threads": 3}], ids=str
)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 8])
def test_no_more_calls_at_once_than_the_driver_takes(most, shared, policy):
    room = 0 if shared else 16 * LAYOUT.slot_bytes
    can = TierCapabilities(shared=shared, max_concurrency=most, max_batch=1, capacity_bytes=room)
    tier = Counting(can)
    world = World([(cpu_tier(LAYOUT, 12), {}), (tier, policy)])
    lanes = world.chain.links[1].workers._lanes
    threads = [len(lane.threads) for lane in lanes]
    assert min(threads) >= 1
    assert sum(threads) <= max(most, len(lanes))
    assert sum(threads) == max(most, len(lanes)) or policy
    for seed in range(3):
        world.store(prompt(seed, 6))
    job, _ = world.begin_load(prompt(0, 6))
    for seed in range(3, 5):
        world.begin_store(prompt(seed, 6))
    if shared:
        world.chain.probe(world.sequence(prompt(9, 3)), 0)
    world.settle()
    assert job.state == "done"
    assert tier.most <= most
    assert tier.seen == ({"lookup", "load", "store"} if shared else {"load", "store", "evict"})
    world.close()


def guarded(most: int = 1) -> tuple[GuardedTier, FaultTier]:
    tier = FaultTier(MemoryTier(context_for(LAYOUT)))
    return GuardedTier(tier, "t", Metrics(), Turns(most)), tier


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("holder", OPERATIONS)
def test_the_deadline_ends_a_wait_for_a_turn(holder, operation):
    """Whatever the call is, and whatever it waits for; that others are first says nothing of the tier."""
    guard, tier = guarded()
    tier.add("lookup" if holder == "check_health" else holder, Fault(FaultKind.HANG))
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(OPERATIONS[holder], guard)
        tier.wait_hanging()
        calls, began = len(tier.calls), time.monotonic()
        with within(began + 0.02, time.monotonic):
            if operation == "check_health":
                with pytest.raises(TierTimeoutError, match="no more calls"):
                    guard.check_health()
            else:
                assert OPERATIONS[operation](guard)[0].status is Status.LIMITED
        assert len(tier.calls) == calls
        tier.release()
        first.result(DEADLINE_S)
    OPERATIONS[operation](guard)
    assert len(tier.calls) == calls + 1


@pytest.mark.parametrize("writer", ["store", "evict"])
@pytest.mark.parametrize("reader", ["load", "lookup"])
def test_who_reads_goes_before_who_writes(reader, writer):
    guard, tier = guarded()
    tier.add("store", Fault(FaultKind.HANG))
    with ThreadPoolExecutor(4) as threads:
        held = threads.submit(OPERATIONS["store"], guard)
        tier.wait_hanging()
        writers = [threads.submit(OPERATIONS[writer], guard) for _ in range(2)]
        wait_until(lambda: len(guard._turns._free._waiters) == 2)
        last = threads.submit(OPERATIONS[reader], guard)
        wait_until(lambda: guard._turns._num_readers == 1)
        tier.release()
        for one in (held, last, *writers):
            one.result(DEADLINE_S)
    assert [operation for operation, _ in tier.calls] == ["store", reader, writer, writer]


@pytest.mark.parametrize("operation", ["lookup", "load", "store", "evict"])
def test_a_wait_for_what_does_not_come_back_says_something_of_the_tier(operation):
    """The call that has the only turn is past its deadline itself."""
    guard, tier = guarded()
    clock = FakeClock()
    tier.add("store", Fault(FaultKind.HANG))

    def hang():
        with within(clock() + 1, clock):
            return OPERATIONS["store"](guard)

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(hang)
        tier.wait_hanging()
        clock.advance(2)
        with within(clock(), clock):
            assert OPERATIONS[operation](guard)[0].status is Status.TIMEOUT
        tier.release()
        first.result(DEADLINE_S)


@pytest.mark.parametrize("writer", ["store", "evict"])
def test_a_writer_waits_for_so_many_readers_and_no_more(writer):
    guard, tier = guarded()
    tier.add("load", Fault(FaultKind.HANG))
    most = turns._MOST_BEFORE
    with ThreadPoolExecutor(most + 6) as threads:
        calls = [threads.submit(OPERATIONS["load"], guard)]
        tier.wait_hanging()
        calls += [threads.submit(OPERATIONS[writer], guard) for _ in range(2)]
        wait_until(lambda: guard._turns._num_writers == 2)
        calls += [threads.submit(OPERATIONS["load"], guard) for _ in range(most + 1)]
        wait_until(lambda: guard._turns._num_readers == most + 1)
        tier.release()
        for call in calls:
            call.result(DEADLINE_S)
    assert [operation for operation, _ in tier.calls] == [
        *["load"] * (most + 1),
        writer,
        "load",
        writer,
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_stores_that_have_no_turn_for_loads_say_nothing_of_their_tier(shared):
    """A block waits for its turn, two behind it for theirs; the deadline ends all of them from outside."""
    most = 2 if shared else 1
    room = 0 if shared else 64 * LAYOUT.slot_bytes
    can = TierCapabilities(shared=shared, max_concurrency=most, max_batch=1, capacity_bytes=room)
    below = FaultTier(MemoryTier(context_for(LAYOUT), can))
    policy = {"breaker_failures": 1, "load_deadline_s": 60.0, "store_deadline_s": 1.0, "promote": "never"}
    world = World([(cpu_tier(LAYOUT, 12), {}), (below, policy)])
    link = world.chain.links[1]
    inner = link.wrapped.tier
    while not isinstance(inner, GuardedTier):
        inner = inner.inner
    with ExitStack() as loads:
        for _ in range(most):
            loads.enter_context(inner._turns.turn(reads=True))
        job, slots = world.begin_store(prompt(9, 3))
        world.until(lambda: inner._turns._num_writers == 1)
        world.clock.advance(2.0)
        world.until(lambda: world.count("store_failures", tier=link.name) == 3)
        assert world.count("store_failures", tier=link.name, cause="limited") >= 1
        assert link.is_up
    world.settle()
    world.device.free(slots)
    assert job.is_over
    assert link.is_up
    world.store(prompt(10, 3))
    assert [operation for operation, _ in below.calls].count("store") == 3
    world.close()
