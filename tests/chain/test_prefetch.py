"""Prefetches: they are behind everything, bounded, told of, and given up without a trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.testing import Fault, FaultKind, FaultTier, MemoryTier, context_for, small_layout
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
CAN = TierCapabilities(max_batch=64, max_concurrency=3)


def prompt(seed: int, blocks: int) -> list[int]:
    return [seed * 1000 + i for i in range(blocks * BLOCK)]


class Below(World):
    """A host pool over a tier whose loads hang on demand, with prompts in the latter only."""

    def __init__(self, *prompts, blocks: int = 64, policy=None, threads: int = 1, **engine) -> None:
        self.far = FaultTier(MemoryTier(context_for(LAYOUT), CAN))
        policy = {"load_threads": threads, "store_threads": 1} | (policy or {})
        super().__init__([(cpu_tier(LAYOUT, blocks), {}), (self.far, policy)], engine=engine)
        for tokens in prompts:
            self.store(tokens)
        self.chain._parts.capacity.evict(self.chain.links[0], blocks, is_final=True)
        self.settle()
        self.far.calls.clear()
        self.receipts.clear()

    def prefetch(self, tokens):
        sequence = self.sequence(tokens)
        return self.chain.prefetch(sequence, self.chain.lookup(sequence), start=0, label="p")

    def origin(self, tokens):
        return self.chain.lookup(self.sequence(tokens)).tokens_by_tier

    def used(self, end: str) -> int:
        return self.count("prefetched_tokens", end=end)

    @property
    def loads(self) -> list[int]:
        return [count for operation, count in self.far.calls if operation == "load"]


@pytest.fixture
def below() -> Iterator[object]:
    made: list[Below] = []

    def make(*args, **kwargs) -> Below:
        made.append(Below(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_progress_is_told(below):
    w = below(prompt(1, 12))
    w.far.always("load", Fault(FaultKind.HANG))
    job = w.prefetch(prompt(1, 12))
    assert (job.num_tokens, job.num_ready_tokens) == (12 * BLOCK, 0)
    w.far.wait_hanging()
    w.far.release()
    w.until(lambda: job.num_ready_tokens)
    assert job.num_ready_tokens == 8 * BLOCK, "calls of at most eight blocks"
    assert not job.is_over
    w.far.wait_hanging()
    w.far.always("load", None)
    w.far.release()
    w.settle()
    assert (job.num_ready_tokens, job.state) == (12 * BLOCK, "done")
    receipt = w.receipts[-1]
    assert (receipt.kind, receipt.num_tokens, receipt.tokens_by_tier) == (
        "prefetch",
        12 * BLOCK,
        {"tier1": 12 * BLOCK},
    )


def test_what_was_in_the_first_tier_already_is_not_counted_as_prefetched(below):
    w = below(prompt(1, 12))
    w.load(prompt(1, 4))
    w.prefetch(prompt(1, 12))
    w.settle()
    assert w.receipts[-1].num_tokens == 8 * BLOCK
    assert w.prefetch(prompt(1, 12)) is None, "nothing is left to bring"


def test_cancelling_takes_back_what_was_not_begun_and_keeps_what_came(below):
    w = below(prompt(1, 20))
    w.far.add("load", Fault(FaultKind.HANG))
    job = w.prefetch(prompt(1, 20))
    w.far.wait_hanging()
    w.chain.cancel(job)
    assert job.is_over
    w.far.release()
    w.settle()
    assert w.loads == [8], "one call had begun"
    assert w.origin(prompt(1, 20)) == {"tier0": 8 * BLOCK, "tier1": 12 * BLOCK}
    assert w.receipts[-1].status == "cancelled"
    assert w.count("load_failures") == 0
    assert w.used("failed") == 12 * BLOCK
    assert w.load(prompt(1, 20)) == 20 * BLOCK


def test_a_load_that_waits_too_keeps_a_cancelled_prefetch_going(below):
    w = below(prompt(1, 20))
    w.far.add("load", Fault(FaultKind.HANG))
    job = w.prefetch(prompt(1, 20))
    w.far.wait_hanging()
    load, slots = w.begin_load(prompt(1, 20))
    w.chain.cancel(job)
    w.far.release()
    w.settle()
    assert load.state == "done"
    w.check(prompt(1, 20), 0, slots)
    w.device.free(slots)


def test_a_failed_prefetch_tells_what_has_come_all_the_same(below):
    w = below(prompt(1, 20))
    w.far.add("load", Fault(FaultKind.FAIL_KEYS, at=()))
    w.far.add("load", Fault(FaultKind.FAIL_KEYS))
    w.prefetch(prompt(1, 20))
    w.settle()
    receipt = w.receipts[-1]
    assert (receipt.status, receipt.num_tokens) == ("failed", 8 * BLOCK)
    assert w.count("tokens", kind="prefetch") == 8 * BLOCK
    assert w.count("loaded_tokens", tier="tier1") == 8 * BLOCK


# ---- nobody is delayed -----------------------------------------------------------------------------


def test_a_load_goes_before_every_prefetch_that_waits(below):
    w = below(prompt(1, 32), prompt(2, 3))
    w.far.add("load", Fault(FaultKind.HANG))
    ahead = w.prefetch(prompt(1, 32))
    w.far.wait_hanging()
    load, slots = w.begin_load(prompt(2, 3))
    w.far.add("load", Fault(FaultKind.FAIL_KEYS, at=()))
    w.far.add("load", Fault(FaultKind.HANG))
    w.far.release()
    w.until(lambda: load.is_over)
    assert load.state == "done"
    assert w.loads[:2] == [8, 3], "one call of the prefetch, then the load"
    assert not ahead.is_over
    w.far.wait_hanging()
    w.far.release()
    w.settle()
    assert ahead.state == "done"
    w.device.free(slots)


def test_where_there_are_threads_one_is_never_taken(below):
    w = below(prompt(1, 32), prompt(2, 3), threads=2)
    w.far.add("load", Fault(FaultKind.HANG))
    ahead = w.prefetch(prompt(1, 32))
    w.far.wait_hanging()
    load, slots = w.begin_load(prompt(2, 3))
    w.until(lambda: load.is_over)
    assert load.state == "done", "while the prefetch hangs"
    assert (w.loads[0], sum(w.loads)) == (8, 11)
    w.far.release()
    w.settle()
    assert ahead.state == "done"
    w.device.free(slots)


def test_a_prefetch_that_is_needed_now_waits_no_longer(below):
    w = below(prompt(1, 8), prompt(2, 16))
    w.far.add("load", Fault(FaultKind.HANG))
    first, second = w.prefetch(prompt(1, 8)), w.prefetch(prompt(2, 16))
    w.far.wait_hanging()
    other = w.prefetch(prompt(2, 16))
    load, slots = w.begin_load(prompt(2, 16))
    assert w.used("used") == 16 * BLOCK, "it came just in time"
    w.far.release()
    w.settle()
    assert [job.state for job in (first, second, other, load)] == ["done"] * 4
    w.device.free(slots)


def test_a_prefetch_that_never_had_its_turn_is_no_fault_of_the_tier(below):
    w = below(prompt(1, 16), policy={"breaker_failures": 1, "load_deadline_s": 5.0})
    w.far.add("load", Fault(FaultKind.HANG))
    load, slots = w.begin_load(prompt(1, 1))
    w.far.wait_hanging()
    w.chain.links[1].config = w.chain.links[1].config.model_copy(update={"load_deadline_s": 1.0})
    ahead = w.prefetch(prompt(1, 16))
    w.clock.advance(2.0)
    w.until(lambda: ahead.is_over)
    assert w.chain.links[1].is_up
    w.far.release()
    w.settle()
    assert load.state == "done"
    w.device.free(slots)


def test_a_load_that_comes_for_what_was_just_withdrawn_gets_it(below):
    w = below(prompt(1, 20))
    w.far.add("load", Fault(FaultKind.HANG))
    job = w.prefetch(prompt(1, 20))
    w.far.wait_hanging()
    w.chain.cancel(job)
    load, slots = w.begin_load(prompt(1, 12))
    w.far.release()
    w.settle()
    assert (load.state, load.cause) == ("done", "")
    assert w.loads == [8, 4], "what nobody wants is not read"
    w.check(prompt(1, 12), 0, slots)
    w.device.free(slots)


def test_what_is_needed_now_has_a_loads_time_however_long_it_has_waited(below):
    w = below(prompt(1, 16), prompt(2, 1), policy={"load_deadline_s": 100.0})
    w.far.add("load", Fault(FaultKind.HANG))
    w.prefetch(prompt(2, 1))
    w.far.wait_hanging()
    w.chain.links[1].config = w.chain.links[1].config.model_copy(update={"load_deadline_s": 5.0})
    w.prefetch(prompt(1, 16))
    w.clock.advance(4.0)
    load, slots = w.begin_load(prompt(1, 16))
    w.clock.advance(3.0)
    w.chain.poll()
    w.chain.poll()
    assert not load.is_over
    assert w.chain.links[1].is_up
    w.far.release()
    w.settle()
    assert load.state == "done"
    w.device.free(slots)


# ---- the share of the host slots -------------------------------------------------------------------


def test_a_share_of_the_host_slots_and_no_more(below):
    w = below(prompt(1, 20), prompt(2, 20), blocks=32, prefetch_host_share=0.5)
    job = w.prefetch(prompt(1, 20))
    assert job.num_tokens == 16 * BLOCK, "the beginning is worth more than nothing"
    w.settle()
    assert w.count("prefetch_shortened", cause="host_share") == 4
    assert w.prefetch(prompt(2, 20)) is None
    assert w.chain.host.num_lent == 0
    assert w.load(prompt(1, 20)) == 20 * BLOCK
    assert w.used("used") == 16 * BLOCK
    assert w.prefetch(prompt(2, 20)).num_tokens == 16 * BLOCK, "used ones no longer count"
    w.settle()


def test_what_nobody_uses_becomes_a_block_like_any_other(below):
    w = below(prompt(1, 16), prompt(2, 16), blocks=32, prefetch_host_share=0.5)
    w.prefetch(prompt(1, 16))
    w.settle()
    assert w.prefetch(prompt(2, 4)) is None
    w.clock.advance(31.0)
    assert w.prefetch(prompt(2, 4)) is not None
    w.settle()
    assert w.used("unused") == 16 * BLOCK


def test_what_is_evicted_before_its_use_counts_no_longer(below):
    w = below(prompt(1, 16), prompt(2, 16), blocks=32, prefetch_host_share=0.5)
    w.prefetch(prompt(1, 16))
    w.settle()
    w.chain._parts.capacity.evict(w.chain.links[0], 32, is_final=True)
    assert w.prefetch(prompt(2, 16)).num_tokens == 16 * BLOCK
    w.settle()
    assert w.used("evicted") == 16 * BLOCK


def test_room_is_known_without_looking_at_what_lies_there(below, monkeypatch):
    w = below(prompt(1, 16), prompt(2, 16), blocks=32, prefetch_host_share=0.5)
    w.prefetch(prompt(1, 16))
    w.settle()
    index = w.chain.fills.prefetched._index
    monkeypatch.setattr(type(index), "has", lambda *_: pytest.fail("a block is looked at"))
    assert w.chain.fills.prefetched.room(w.clock()) == 0


def test_what_is_brought_twice_ends_twice(below):
    w = below(prompt(1, 4))
    for _ in range(2):
        w.chain._parts.capacity.evict(w.chain.links[0], 64, is_final=True)
        w.prefetch(prompt(1, 4))
        w.settle()
    w.load(prompt(1, 4))
    assert (w.used("evicted"), w.used("used")) == (4 * BLOCK, 4 * BLOCK)


def test_blocks_that_would_not_stay_are_not_prefetched(below):
    w = below(prompt(1, 4), policy={"promote": "never"})
    assert w.prefetch(prompt(1, 4)) is None
    assert w.loads == []


def test_a_tier_that_is_slower_than_the_engine_is_not_prefetched_from(below):
    w = below(
        prompt(1, 20), policy={"load_or_recompute": "auto"}, prefetch_host_share=1.0, prefill_tokens_per_s=1e6
    )
    w.chain.links[1].speed.observe(1, 5.0, w.clock())
    w.chain.links[1].next_try = w.clock() + 100
    assert w.prefetch(prompt(1, 20)) is None
