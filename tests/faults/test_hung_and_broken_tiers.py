"""What tiers and copies do wrong, one by one: a miss with a cause, never wrong KV, never a hang."""

from __future__ import annotations

import threading
import time

import pytest

from flexkv_core import hookimpl
from flexkv_core.chain.executor import run_bounded
from flexkv_core.drivers import Observers
from flexkv_core.errors import TierAccessError, TierClosedError, TierFullError, TierTimeoutError
from flexkv_core.testing import (
    Fault,
    FaultKind,
    FaultTier,
    MemoryTier,
    SeededFaults,
    context_for,
    make_value,
    small_layout,
)
from flexkv_core.tier import Status, TierCapabilities
from tests.support.chains import World, cpu_tier
from tests.support.waiting import DEADLINE_S, wait_until

LAYOUT = small_layout(block_tokens=4)
BLOCK = LAYOUT.block_tokens
ONE = {"load_threads": 1, "store_threads": 1}


def prompt(seed: int, blocks: float) -> list[int]:
    return [seed * 1000 + i for i in range(int(blocks * BLOCK))]


class Broken:
    """A world of a host pool over a faulty tier that alone holds ``tokens``."""

    def __init__(
        self, *, manual: bool = False, below: dict | None = None, max_batch: int = 64, **config
    ) -> None:
        can = TierCapabilities(can_list=True, max_batch=max_batch)
        self.tier = FaultTier(MemoryTier(context_for(LAYOUT), can))
        rows = [(cpu_tier(LAYOUT, 8), {}), (self.tier, ONE | (below or {}))]
        self.world = World(rows, layout=LAYOUT, manual=manual, **config)
        self.tokens = prompt(1, 4)
        self.store(self.tokens)
        self.store(prompt(2, 8))
        assert self.world.chain.lookup(self.world.sequence(self.tokens)).tokens_by_tier == {"tier1": 16}

    def store(self, tokens) -> None:
        self.world.begin_store(tokens)
        self.world.transfer.run_all()
        self.world.settle()

    def load(self):
        job, _ = self.world.begin_load(self.tokens)
        self.world.until(lambda: job.is_over)
        return job


@pytest.fixture
def broken():
    made = []

    def make(**kwargs) -> Broken:
        made.append(Broken(**kwargs))
        return made[-1]

    yield make
    for one in made:
        one.tier.release()
        one.world.close()


def foreign() -> bytes:
    return bytes(make_value(small_layout(block_tokens=8), [1, 2, 3]).view)


SPOILT = [
    (Fault(FaultKind.FLIP, bit=1), "corrupt"),
    (Fault(FaultKind.FLIP, bit=8 * 4096 + 3), "corrupt"),
    (Fault(FaultKind.FLIP, at=(3,), bit=8 * 4200), "corrupt"),
    (Fault(FaultKind.TRUNCATE), "corrupt"),
    (Fault(FaultKind.SWAP), "corrupt"),
    (Fault(FaultKind.REPLACE, value=foreign()), "corrupt"),
    (Fault(FaultKind.LIE), "corrupt"),
    (Fault(FaultKind.RETURN_NONE), "invalid"),
    (Fault(FaultKind.RETURN_SHORT), "invalid"),
    (Fault(FaultKind.RETURN_LONG), "invalid"),
    (Fault(FaultKind.RETURN_JUNK), "invalid"),
    (Fault(FaultKind.RAISE), "unavailable"),
    (Fault(FaultKind.RAISE, error=ValueError("bug")), "unavailable"),
    (Fault(FaultKind.RAISE, error=TierTimeoutError("slow")), "timeout"),
    (Fault(FaultKind.RAISE, error=TierAccessError("no")), "denied"),
    (Fault(FaultKind.RAISE, error=TierClosedError("gone")), "cancelled"),
    (Fault(FaultKind.FAIL_KEYS, at=(1,), status=Status.MISS), "miss"),
    (Fault(FaultKind.FAIL_KEYS, at=(0,), status=Status.CORRUPT), "corrupt"),
    (Fault(FaultKind.FAIL_KEYS, at=(2,), status=Status.UNAVAILABLE), "unavailable"),
]


@pytest.mark.parametrize(("fault", "cause"), SPOILT, ids=lambda x: getattr(getattr(x, "kind", x), "value", x))
def test_a_bad_load_is_a_miss_with_its_cause(broken, fault, cause):
    one = broken()
    one.tier.add("load", fault)
    job = one.load()
    assert job.state == "failed"
    assert job.cause == f"tier1:{cause}"
    assert one.world.count("load_failures", tier="tier1", cause=cause) > 0
    assert one.world.receipts[-1].num_tokens == 0
    one.world.settle()
    one.store(one.tokens)  # the engine computes it again and stores it
    assert one.world.load(one.tokens) == len(one.tokens)


def test_a_damaged_value_is_removed_and_not_promised_again(broken):
    one = broken()
    one.tier.add("load", Fault(FaultKind.FLIP, at=(2,), bit=8 * 4100))
    one.load()
    one.world.settle()
    assert one.world.hit(one.tokens) == 2 * BLOCK
    assert len(one.tier.inner.medium.values) == 4 + 8 - 1


def test_a_hung_load_is_given_up_and_its_slots_wait_for_the_worker(broken):
    one = broken()
    world, tier = one.world, one.tier
    tier.add("load", Fault(FaultKind.HANG))
    job, slots = world.begin_load(one.tokens)
    tier.wait_hanging()
    world.clock.advance(9.9)
    world.chain.poll()
    assert not job.is_over
    world.clock.advance(0.2)
    world.until(lambda: job.is_over)
    assert (job.state, job.cause) == ("failed", "tier1:timeout")
    assert world.chain.host.num_quarantined == 4
    assert world.chain.index.num_pins == 0
    world.device.free(slots)
    world.begin_store(prompt(3, 8))  # takes what room there is, and none of those slots
    world.chain.poll()
    kept = world.chain.host
    assert kept._quarantined.isdisjoint(kept.direct._published)
    tier.release()  # the late write goes into slots that are nobody's
    world.settle()
    assert world.chain.host.num_quarantined == 0
    assert world.load(prompt(3, 4)) == 4 * BLOCK


def test_a_tier_whose_threads_all_hang_promises_nothing_until_one_is_back(broken):
    one = broken(below={"breaker_failures": 0})
    world, tier = one.world, one.tier
    tier.add("load", Fault(FaultKind.HANG))
    job, _ = world.begin_load(one.tokens)
    tier.wait_hanging()
    world.clock.advance(11)
    world.until(lambda: job.is_over)
    assert world.hit(one.tokens) == 0
    tier.release()
    world.settle()
    assert world.load(one.tokens) == len(one.tokens)


def test_a_load_that_fails_in_one_piece_and_hangs_in_the_next_is_told_as_late(broken):
    """The breaker hears of the time-out, whatever went wrong before it; only what hangs is kept back."""
    one = broken(below={"breaker_failures": 9}, max_batch=1)
    world, tier = one.world, one.tier
    tier.add("load", Fault(FaultKind.FAIL_KEYS, at=(0,), status=Status.MISS), Fault(FaultKind.HANG))
    job, _ = world.begin_load(one.tokens)
    world.until(lambda: job.is_over)  # what does not come at all is not waited for
    assert (job.state, job.cause) == ("failed", "tier1:miss")
    assert world.count("load_failures", cause="miss") == 1
    tier.wait_hanging()
    world.clock.advance(11)
    world.until(lambda: not world.chain.links[1].is_up)
    assert world.count("load_failures", cause="miss") == 1
    assert world.count("load_failures", cause="timeout") == 3
    assert world.chain.host.num_quarantined == 1
    tier.release()
    world.settle()
    assert world.chain.host.num_quarantined == 0


def test_loads_that_expire_in_the_queue_open_the_breaker(broken):
    one = broken(below={"breaker_failures": 2, "breaker_reset_s": 5.0})
    world, tier = one.world, one.tier
    tier.add("load", Fault(FaultKind.HANG))
    jobs = [world.begin_load(one.tokens[: n * BLOCK])[0] for n in (2, 4)]
    tier.wait_hanging()
    world.clock.advance(11)
    world.until(lambda: all(job.is_over for job in jobs))
    assert not world.chain.links[1].is_up
    tier.release()
    world.settle()
    assert world.chain.links[1].is_up  # the late answer was a good one
    assert world.load(one.tokens) == len(one.tokens)


def test_the_breaker_opens_probes_and_closes(broken):
    one = broken(below={"breaker_failures": 2, "breaker_reset_s": 5.0})
    world, tier = one.world, one.tier
    tier.always("load", Fault(FaultKind.RAISE))
    assert [one.load().state for _ in range(2)] == ["failed", "failed"]
    world.chain.poll()
    assert world.chain.lookup(world.sequence(one.tokens)).why == "tier_down"
    assert world.hit(one.tokens) == 0
    calls = len(tier.calls)
    assert one.world.begin_load(one.tokens)[0] is None
    assert len(tier.calls) == calls
    world.clock.advance(5.1)
    assert one.load().state == "failed"  # the probe
    assert world.hit(one.tokens) == 0
    tier.always("load", None)
    world.clock.advance(5.1)
    assert world.load(one.tokens) == len(one.tokens)
    assert world.chain.links[1].is_up
    assert world.count("tier_state_changes", state="down") == 1
    assert world.count("tier_state_changes", state="up") == 1


@pytest.mark.parametrize("work", ["store", "load"])
def test_the_first_work_after_a_recovery_is_whole(work):
    """Of whatever is cut for several threads one call probes; the others are not refused meanwhile."""
    tier = FaultTier(MemoryTier(context_for(LAYOUT), TierCapabilities(max_batch=2, max_concurrency=8)))
    policy = {"breaker_failures": 1, "breaker_reset_s": 5.0, "promote": "never"}
    world = World([(cpu_tier(LAYOUT, 32), {}), (tier, policy)], layout=LAYOUT)
    for seed in range(3):
        world.store(prompt(seed, 16))
    tier.always(work, Fault(FaultKind.RAISE))
    if work == "store":
        world.store(prompt(5, 2))
    else:
        assert world.load(prompt(0, 2)) == 0
    link = world.chain.links[1]
    assert not link.is_up
    world.clock.advance(6.0)
    tier.always(work, None)
    tier.add(work, Fault(FaultKind.HANG))
    if work == "store":
        world.begin_store(prompt(6, 16))
    else:
        job, _ = world.begin_load(prompt(0, 16))
    world.chain.poll()
    tier.wait_hanging()
    tier.release()
    world.settle()
    assert link.is_up
    if work == "store":
        assert world.chain.index.missing(1, world.sequence(prompt(6, 16)).keys()) == []
    else:
        assert job.num_tokens == 16 * BLOCK
        assert job.state == "done"
    world.close()


def test_a_tier_that_goes_down_takes_no_stores_and_loses_none_later(broken):
    one = broken(below={"breaker_failures": 1})
    one.tier.always("store", Fault(FaultKind.RAISE))
    one.store(prompt(3, 2))
    assert one.world.count("store_failures", tier="tier1", cause="unavailable") == 2
    one.store(prompt(4, 2))
    assert one.world.load(prompt(4, 2)) == 2 * BLOCK  # the host pool serves on
    one.tier.always("store", None)
    one.world.clock.advance(6)
    one.store(prompt(5, 2))
    assert one.world.chain.links[1].is_up


def test_a_removal_that_hangs_as_a_probe_does_not_keep_the_tier_down(broken):
    one = broken(below={"breaker_failures": 1, "breaker_reset_s": 5.0, "store_threads": 2})
    world, tier = one.world, one.tier
    tier.add("load", Fault(FaultKind.RAISE))
    assert one.load().state == "failed"
    world.clock.advance(5.1)
    tier.add("evict", Fault(FaultKind.HANG))
    world.chain.forget_all()
    tier.wait_hanging()
    world.clock.advance(31)
    world.until(lambda: not world.chain.links[1].wrapped.breaker._prober)
    world.clock.advance(5.1)
    one.world.begin_store(prompt(3, 2))
    world.until(lambda: world.chain.links[1].is_up)
    tier.release()
    world.settle()


@pytest.mark.parametrize("error", [TierFullError("full"), OSError(28, "no space"), None])
def test_a_full_tier_is_asked_once_more_and_then_passed_over(broken, error):
    one = broken()
    fault = (
        Fault(FaultKind.RAISE, error=error) if error else Fault(FaultKind.FAIL_KEYS, status=Status.NO_SPACE)
    )
    one.tier.always("store", fault)
    one.store(prompt(3, 2))
    stores = sum(operation == "store" for operation, _ in one.tier.calls)
    assert one.world.count("store_failures", tier="tier1") == 2
    one.tier.always("store", None)
    assert sum(operation == "store" for operation, _ in one.tier.calls) == stores
    assert one.world.load(prompt(3, 2)) == 2 * BLOCK


@pytest.mark.parametrize("phase", ["load", "store"])
@pytest.mark.parametrize("way", ["refuse", "raise", "fail", "fail_late"])
def test_a_copy_that_fails_is_no_hit_and_leaves_nothing(broken, phase, way, monkeypatch, caplog):
    one = broken(manual=True)
    world = one.world

    def broken_transfer(_job):
        monkeypatch.undo()
        raise RuntimeError("a fault of the transfer")

    if way == "refuse":
        world.transfer.refuse_next()
    elif way == "raise":
        monkeypatch.setattr(world.transfer, phase, broken_transfer)
    else:
        world.transfer.fail_next(after_layers=int(way == "fail_late"))
    if phase == "store":
        job, _ = world.begin_store(prompt(3, 2))
    else:
        job, _ = world.begin_load(one.tokens)
        world.until(lambda: job.state != "staging")
    world.transfer.run_all()
    world.settle()
    assert job.state == "failed"
    assert job.cause.startswith("transfer")
    assert world.count(f"{phase}_failures", tier="device", cause="transfer") == 1
    assert caplog.text.count("a fault of the transfer: ") == (way == "raise")
    assert world.hit(prompt(3, 2)) == 0
    if phase == "store":
        one.store(prompt(3, 2))
        assert world.hit(prompt(3, 2)) == 2 * BLOCK


def test_a_failed_store_does_not_stand_in_the_way_of_its_children(broken):
    one = broken(manual=True)
    world = one.world
    longer = prompt(3, 4)
    first, _ = world.begin_store(longer[: 2 * BLOCK])
    second, _ = world.begin_store(longer)
    world.transfer.fail_next()
    world.transfer.run_all()
    world.settle()
    assert (first.state, second.state) == ("failed", "done")
    assert world.hit(longer) == 0
    one.store(longer[: 2 * BLOCK])
    assert world.hit(longer) == 4 * BLOCK


def test_cancelling_a_load_while_it_copies_waits_for_the_copy(broken):
    one = broken(manual=True)
    world = one.world
    job, slots = world.begin_load(one.tokens)
    world.until(lambda: job.state == "copying")
    world.transfer.step(1)
    world.chain.cancel(job)
    world.chain.poll()
    assert not job.is_over
    assert world.chain.index.num_pins
    world.transfer.run_all()
    world.settle()
    assert job.state == "cancelled"
    world.device.free(slots)
    world.device.assert_clean()


def test_a_late_copy_ends_its_load_as_failed_and_not_before(broken):
    one = broken(manual=True)
    world = one.world
    job, _ = world.begin_load(one.tokens)
    world.until(lambda: job.state == "copying")
    world.clock.advance(31)
    world.chain.poll()
    assert not job.is_over
    world.transfer.run_all()
    world.settle()
    assert (job.state, job.cause) == ("failed", "timeout")


def test_two_loads_of_one_prefix_share_its_blocks(broken):
    one = broken(manual=True)
    world, tier = one.world, one.tier
    tier.add("load", Fault(FaultKind.HANG))
    first, _ = world.begin_load(one.tokens)
    tier.wait_hanging()
    second, slots = world.begin_load(one.tokens)
    world.chain.cancel(first)
    tier.release()
    world.until(lambda: second.state == "copying")
    world.transfer.run_all()
    world.settle()
    assert (first.state, second.state) == ("cancelled", "done")
    world.check(one.tokens, 0, slots)
    assert sum(op == "load" for op, _ in tier.calls) == 1
    assert world.chain.index.count(0) == 8


def test_observers_that_raise_hurt_nobody():
    class Bad:
        @hookimpl
        def flexkv_blocks_stored(self, tier):
            raise ValueError(tier)

        @hookimpl
        def flexkv_blocks_loaded(self, tier):
            raise ValueError(tier)

    world = World([(cpu_tier(LAYOUT, 4), {}), (MemoryTier(context_for(LAYOUT)), {})], layout=LAYOUT)
    world.chain.observers.add(Bad())
    assert isinstance(world.chain.observers, Observers)
    world.store(prompt(1, 2))
    world.store(prompt(2, 4))
    assert world.load(prompt(1, 2)) == 2 * BLOCK
    world.close()


def test_closing_is_bounded_when_a_driver_hangs(caplog):
    gate = threading.Event()

    class Stubborn(FaultTier):
        is_closed = False

        def close(self):
            gate.wait(DEADLINE_S)
            super().close()
            self.is_closed = True

    tier = Stubborn(MemoryTier(context_for(LAYOUT)))
    world = World(
        [(cpu_tier(LAYOUT, 8), {}), (tier, ONE)], layout=LAYOUT, engine={"shutdown_deadline_s": 0.2}
    )
    world.store(prompt(1, 2))
    tier.add("store", Fault(FaultKind.HANG))
    world.begin_store(prompt(2, 2))
    world.chain.poll()
    tier.wait_hanging()
    world.close()
    world.close()
    assert not tier.is_closed, "it was waited for"
    assert "hang in a driver" in caplog.text
    assert "has not closed" in caplog.text
    gate.set()
    tier.release()


def test_closing_ends_every_job_once():
    tier = FaultTier(MemoryTier(context_for(LAYOUT)))
    engine = {"shutdown_deadline_s": 120}
    world = World([(cpu_tier(LAYOUT, 8), {}), (tier, ONE)], layout=LAYOUT, manual=True, engine=engine)
    for seed in range(2):
        world.begin_store(prompt(seed, 2))
        world.transfer.run_all()
        world.settle()
    planned = world.chain.store(world.sequence(prompt(5, 2)), 2 * BLOCK)
    staged = world.chain.load(
        world.sequence(prompt(1, 2)), world.chain.lookup(world.sequence(prompt(1, 2))), start=0
    )
    copying, _ = world.begin_store(prompt(6, 2))
    world.transfer.run_all()
    started = time.monotonic()
    world.close()
    assert time.monotonic() - started < world.config.engine.shutdown_deadline_s / 2, "it waited for a job"
    assert [planned.state, staged.state, copying.state] == ["cancelled", "cancelled", "cancelled"]
    assert len(world.receipts) == 5
    assert world.chain.index.num_pins == world.chain.host.num_lent == 0


def test_run_bounded_tells_what_ended():
    gate = threading.Event()
    assert run_bounded("quick", lambda: None, DEADLINE_S)
    assert run_bounded("raises", lambda: 1 / 0, DEADLINE_S)
    assert not run_bounded("slow", lambda: gate.wait(DEADLINE_S) and None, 0.01)
    gate.set()


@pytest.mark.parametrize("seed", range(12))
def test_seeded_schedules_never_give_wrong_bytes(seed):
    """Stores and loads of prompts that share beginnings, over two tiers that fail every third call."""
    print(f"seed {seed}")
    context = context_for(LAYOUT)
    near = FaultTier(
        MemoryTier(context, TierCapabilities(can_list=True, capacity_bytes=10 * LAYOUT.slot_bytes)),
        SeededFaults(seed, rate=0.3),
    )
    far = FaultTier(MemoryTier(context, TierCapabilities(shared=True)), SeededFaults(seed + 1, rate=0.3))
    policy = ONE | {"breaker_failures": 3, "breaker_reset_s": 1.0}
    world = World([(cpu_tier(LAYOUT, 6), {}), (near, policy), (far, policy)], layout=LAYOUT)
    loaded = 0
    for round_ in range(30):
        tokens = prompt(round_ % 5, 2) + prompt(10 + round_ % 3, 1.5)
        world.chain.probe(world.sequence(tokens), 0)
        world.settle()
        job, slots = world.begin_load(tokens)
        world.settle()
        if job is not None:
            assert job.state in ("done", "failed")
            assert bool(job.cause) == (job.state == "failed")
            if job.state == "done":
                loaded += job.num_tokens
                world.check(tokens[: job.num_tokens], 0, slots)
            world.device.free(slots)
        world.store(tokens)
        world.clock.advance(0.4)
    assert loaded > 0
    world.close()


@pytest.mark.parametrize("part", ["fills.filled", "cascade.stored", "_probes.answered", "_state_changed"])
def test_a_message_that_cannot_be_taken_in_takes_no_other_with_it(part, monkeypatch, caplog):
    """Of whatever kind it is: a fault of the core is counted, and what came behind it is taken in."""
    shared = FaultTier(MemoryTier(context_for(LAYOUT), TierCapabilities(shared=True)))
    own = FaultTier(MemoryTier(context_for(LAYOUT), TierCapabilities(can_list=True)))
    policy = ONE | {"breaker_failures": 1}
    world = World([(cpu_tier(LAYOUT, 32), {}), (own, policy), (shared, policy)], layout=LAYOUT)
    chain, where = world.chain, part.split(".")
    owner = getattr(chain, where[0]) if len(where) > 1 else chain
    handler, told = getattr(owner, where[-1]), []

    def fail_once(*args):
        handler(*args)
        told.append(args)
        if len(told) == 1:
            raise ValueError("made by the test")

    monkeypatch.setattr(owner, where[-1], fail_once)
    world.begin_store(prompt(1, 4))
    assert chain.drain(DEADLINE_S)
    chain._parts.capacity.evict(chain.links[0], 32, is_final=True)
    for tier in (own, shared):
        tier.add("load", Fault(FaultKind.RAISE))
    chain.probe(world.sequence(prompt(2, 2)), 0)
    world.begin_load(prompt(1, 4))
    world.begin_store(prompt(3, 4))
    wait_until(lambda: chain.drain(0.01) and told)
    assert world.count("core_faults") == 1
    assert caplog.text.count("could not be taken in") == 1
    assert chain.index.num_pins == 0
    assert chain.host.num_lent == 0
    world.close()
