"""Load or recompute, by a clock that only the tiers move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.testing import (
    FakeClock,
    Fault,
    FaultKind,
    FaultTier,
    Medium,
    MemoryTier,
    context_for,
    small_layout,
)
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
OWN = TierCapabilities(max_batch=4, max_concurrency=2)
SHARED = TierCapabilities(shared=True, persistent=True, max_batch=4, max_lookup=100, max_concurrency=3)
ONE_THREAD = {"load_threads": 1, "store_threads": 1}
PREFILL = 1000.0
"""Tokens a second: a block of 16 takes 16 ms."""


def prompt(seed: int, blocks: int) -> list[int]:
    return [seed * 1000 + i for i in range(blocks * BLOCK)]


class TimedTier(MemoryTier):
    """Loads take ``call_s`` and ``block_s`` a block, on the test's clock."""

    def __init__(
        self, clock: FakeClock, call_s: float, block_s: float, capabilities=OWN, medium=None
    ) -> None:
        super().__init__(context_for(LAYOUT), capabilities, medium)
        self.clock, self.call_s, self.block_s = clock, call_s, block_s
        self.loaded: list[int] = []

    def load(self, keys, into):
        self.clock.advance(self.call_s + self.block_s * len(keys))
        self.loaded.append(len(keys))
        return super().load(keys, into)


class Auto(World):
    """A host pool over one timed tier, with some prompts in the latter only."""

    def __init__(self, call_s=0.0, block_s=0.001, *, capabilities=OWN, policy="auto", **engine) -> None:
        clock = FakeClock()
        self.far = TimedTier(clock, call_s, block_s, capabilities)
        super().__init__(
            [(cpu_tier(LAYOUT, 64), {}), (self.far, {"load_or_recompute": policy, **ONE_THREAD})],
            clock=clock,
            engine={"prefill_tokens_per_s": PREFILL, **engine},
        )

    def put_away(self, *prompts) -> None:
        for tokens in prompts:
            self.store(tokens)
        self.chain._parts.capacity.evict(self.chain.links[0], 64, is_final=True)
        self.settle()

    def choice(self, tokens, start=0):
        return self.chain.lookup(self.sequence(tokens), start=start).choice


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def opened(worlds: list[World], *args, **kwargs) -> Auto:
    worlds.append(Auto(*args, **kwargs))
    return worlds[-1]


def test_fast_tier_is_loaded(worlds):
    w = opened(worlds, 0.001, 0.001)
    w.put_away(prompt(1, 4), prompt(2, 20))
    assert w.load(prompt(1, 4)) == 4 * BLOCK, "nothing is known: a little is tried"
    assert w.receipts[-1].choice.why == "no_estimate"
    assert w.load(prompt(2, 20)) == 20 * BLOCK
    choice = w.receipts[-1].choice
    assert (choice.action, choice.why, choice.num_loaded) == ("load", "sooner", 20 * BLOCK)
    assert choice.recompute_s == pytest.approx(20 * BLOCK / PREFILL)
    assert choice.load_s < choice.recompute_s
    assert "choice=load:tier1(tokens=320,loaded=320,load=" in w.receipts[-1].line()


def test_slow_tier_is_recomputed_and_said_so(worlds):
    w = opened(worlds, 0.0, 0.1)
    w.put_away(prompt(1, 4), prompt(2, 20))
    w.load(prompt(1, 4))
    found = w.chain.lookup(w.sequence(prompt(2, 20)))
    assert (found.num_tokens, found.why, found.match) == (0, "recompute", None)
    assert (found.choice.action, found.choice.why) == ("recompute", "slower")
    assert found.choice.load_s == pytest.approx(2.0)
    assert w.load(prompt(2, 20)) == 0
    w.chain.not_loaded(found.choice, "r")
    assert w.receipts[-1].line().split(" choice=")[1].startswith("recompute:tier1(tokens=320,loaded=0,")
    assert w.count("jobs", kind="load", status="recompute") == 1


def test_asking_changes_nothing(worlds):
    w = opened(worlds, 0.0, 0.1)
    w.put_away(prompt(1, 20))
    answers = [w.chain.lookup(w.sequence(prompt(1, 20))) for _ in range(5)]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].num_tokens == 16 * BLOCK, "at most so much is tried"


def test_unknown_tiers_are_tried_one_load_at_a_time(worlds):
    w = opened(worlds, 0.0, 0.001)
    w.put_away(prompt(1, 30), prompt(2, 30))
    job, slots = w.begin_load(prompt(1, 30))
    assert job.num_tokens == 16 * BLOCK
    assert w.choice(prompt(2, 30)).action in ("recompute", "load"), "measured already, or being measured"
    w.settle()
    w.device.free(slots)
    assert w.choice(prompt(2, 30)).why == "sooner"


def test_a_try_is_as_long_as_a_hit_must_be(worlds):
    w = opened(worlds, min_hit_tokens=20 * BLOCK)
    w.put_away(prompt(1, 40))
    assert w.load(prompt(1, 40)) == 21 * BLOCK
    assert w.load(prompt(1, 40)) == 40 * BLOCK, "its speed is known by now"


@pytest.mark.parametrize(("policy", "tokens", "kept"), [("load", 20 * BLOCK, None), ("recompute", 0, None)])
def test_forced_either_way(worlds, policy, tokens, kept):
    w = opened(worlds, 0.0, 10.0 if policy == "load" else 0.0, policy=policy, load_deadline_s=1e6)
    w.far.block_s = 0.4 if policy == "load" else 0.0
    w.put_away(prompt(1, 20))
    for _ in range(2):
        found = w.chain.lookup(w.sequence(prompt(1, 20)))
        assert (found.num_tokens, found.choice) == (tokens, kept)
    assert w.load(prompt(1, 20)) == tokens


def test_an_estimate_recovers_by_probes(worlds):
    w = opened(worlds, 0.0, 0.1)
    prompts = [prompt(seed, 20) for seed in range(1, 7)]
    w.put_away(*prompts)
    w.load(prompts[0])
    assert w.choice(prompts[1]).action == "recompute"
    w.far.block_s = 0.0005
    assert w.choice(prompts[1]).action == "recompute", "nobody has looked yet"
    probes = 0
    while w.choice(prompts[1]).action != "load":
        w.clock.advance(11.0)
        if w.choice(prompts[2 + probes]).action == "load":
            break
        assert w.choice(prompts[2 + probes]).why == "probe"
        assert w.load(prompts[2 + probes]) == 16 * BLOCK
        probes += 1
        assert w.choice(prompts[1]).action in ("recompute", "load")
    assert 1 <= probes <= 2
    assert w.load(prompts[1]) == 20 * BLOCK


def test_a_probe_that_finds_it_slow_still_leaves_it_alone_for_a_while(worlds):
    w = opened(worlds, 0.0, 0.1)
    w.put_away(prompt(1, 20), prompt(2, 20), prompt(3, 20))
    w.load(prompt(1, 20))
    w.clock.advance(11.0)
    before = sum(w.far.loaded)
    w.load(prompt(2, 20))
    assert sum(w.far.loaded) - before == 16
    assert w.load(prompt(3, 20)) == 0
    assert sum(w.far.loaded) - before == 16


def test_a_deadline_that_passed_is_a_measurement(worlds):
    clock, medium = FakeClock(), Medium()
    far = FaultTier(TimedTier(clock, 0.0, 0.0, OWN, medium))
    w = World(
        [
            (cpu_tier(LAYOUT, 64), {}),
            (far, {"load_or_recompute": "auto", "load_deadline_s": 2.0, **ONE_THREAD}),
        ],
        clock=clock,
        engine={"prefill_tokens_per_s": PREFILL},
    )
    worlds.append(w)
    w.store(prompt(1, 4))
    w.chain._parts.capacity.evict(w.chain.links[0], 64, is_final=True)
    far.add("load", Fault(FaultKind.HANG))
    job, slots = w.begin_load(prompt(1, 4))
    far.wait_hanging()
    clock.advance(3.0)
    w.until(lambda: job.is_over)
    far.release()
    w.settle()
    w.device.free(slots)
    assert w.chain.links[1].speed.is_known
    assert w.chain.lookup(w.sequence(prompt(1, 4))).choice.action == "recompute"


def test_what_is_in_the_host_or_on_its_way_is_not_weighed(worlds):
    w = opened(worlds, 0.0, 0.1)
    w.put_away(prompt(1, 30))
    w.load(prompt(1, 4))
    found = w.chain.lookup(w.sequence(prompt(1, 30)))
    assert (found.num_tokens, found.choice.action, found.tokens_by_tier) == (
        4 * BLOCK,
        "recompute",
        {"tier0": 4 * BLOCK},
    )
    assert w.hit(prompt(1, 30), start=4 * BLOCK) == 4 * BLOCK


def test_a_promise_is_kept_whatever_is_found_out_since(worlds):
    w = opened(worlds, 0.0, 0.1)
    w.put_away(prompt(1, 20), prompt(2, 20))
    sequence = w.sequence(prompt(2, 20))
    promised = w.chain.lookup(sequence)
    assert promised.choice.action == "try"
    w.load(prompt(1, 20))
    assert w.hit(prompt(2, 20)) == 0
    again = w.chain.lookup(sequence, max_tokens=promised.num_tokens, is_promised=True)
    assert again.num_tokens == promised.num_tokens


def test_the_engines_speed_is_measured(worlds):
    w = opened(worlds, 0.0, 0.1, prefill_tokens_per_s=0)
    w.put_away(prompt(1, 20), prompt(2, 20))
    assert w.choice(prompt(2, 20)).why == "no_prefill_rate"
    assert w.load(prompt(1, 20)) == 20 * BLOCK, "without it all is loaded"
    for tokens in (100, 2000, 500):
        w.chain.note_prefill(tokens, 0.02 + tokens / 500.0)
    assert w.chain.weighing.tokens_per_s == pytest.approx(500.0)
    choice = w.choice(prompt(2, 20))
    assert (choice.action, choice.recompute_s) == ("recompute", pytest.approx(20 * BLOCK / 500.0))
    for _ in range(40):
        w.chain.note_prefill(500, 0.02 + 500 / 50.0)
        w.chain.note_prefill(100, 0.02 + 100 / 50.0)
    assert w.choice(prompt(2, 20)).action == "load", "a slow engine waits for a slow tier"


def test_a_limit_is_part_of_a_tiers_speed(worlds):
    clock = FakeClock()
    far = TimedTier(clock, 0.0, 0.0001)
    policy = {"limits": {"load": {"operations_per_s": 0.5}}, "load_deadline_s": 1.0, "load_threads": 1}
    w = World(
        [(cpu_tier(LAYOUT, 64), {}), (far, {"load_or_recompute": "auto", "store_threads": 1, **policy})],
        clock=clock,
        engine={"prefill_tokens_per_s": PREFILL},
    )
    worlds.append(w)
    for seed in (1, 2, 3):
        w.store(prompt(seed, 8))
    w.chain._parts.capacity.evict(w.chain.links[0], 64, is_final=True)
    assert w.load(prompt(1, 4)) == 4 * BLOCK, "out of the burst"
    assert w.load(prompt(2, 8)) == 0, "no turn before the deadline"
    assert w.receipts[-1].cause == "tier1:limited"
    found = w.chain.lookup(w.sequence(prompt(3, 8)))
    assert (found.num_tokens, found.choice.action) == (0, "recompute")


def test_shared_tiers_and_partly_filled_blocks(worlds):
    w = opened(worlds, 0.0, 0.0001, capabilities=SHARED)
    tokens = prompt(1, 5)
    w.put_away(tokens)
    assert w.choice(tokens).why == "no_estimate"
    assert w.load(tokens) == 5 * BLOCK
    own = opened(worlds, 0.0, 0.0001)
    odd = [*prompt(1, 2), 7, 7, 7]
    own.put_away(odd)
    assert own.load(odd) == 2 * BLOCK, "tried"
    own.chain._parts.capacity.evict(own.chain.links[0], 64, is_final=True)
    assert own.choice(odd).num_loaded == 2 * BLOCK + 3
    assert own.load(odd, start=BLOCK + 3) == BLOCK
