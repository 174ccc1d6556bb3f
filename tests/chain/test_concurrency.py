"""A driver is never called more often at once than it says, whatever the chain has to do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flexkv_core.errors import TierTimeoutError
from flexkv_core.metrics import Metrics
from flexkv_core.testing import Fault, FaultKind, FaultTier, MemoryTier, context_for, small_layout
from flexkv_core.tier import Status, TierCapabilities
from flexkv_core.wrappers.deadline import within
from flexkv_core.wrappers.guard import GuardedTier
from flexkv_core.wrappers.turns import Turns
from tests.support.chains import World, cpu_tier

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


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("holder", OPERATIONS)
def test_the_deadline_ends_a_wait_for_a_turn(holder, operation):
    """Whatever the call is, and whatever it waits for."""
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
                assert OPERATIONS[operation](guard)[0].status is Status.TIMEOUT
        assert len(tier.calls) == calls
        tier.release()
        first.result(30)
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
        wait_for(lambda: len(guard._turns._free._waiters) == 2)
        last = threads.submit(OPERATIONS[reader], guard)
        wait_for(lambda: guard._turns._num_readers == 1)
        tier.release()
        for one in (held, last, *writers):
            one.result(30)
    assert [operation for operation, _ in tier.calls] == ["store", reader, writer, writer]
