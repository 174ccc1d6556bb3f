"""A manager over a host pool, an own tier and a shared one: what its calls take, and from where on."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator

import pytest

from flexkv_core import ChainConfig, Namespace, TierCapabilities
from flexkv_core.chain import TierChain
from flexkv_core.chain.lookup import Lookup
from flexkv_core.keys import BlockChain, encode_tokens
from flexkv_core.manager import NO_TASK, KVManager, KVResponseStatus, Scope
from flexkv_core.manager.sequences import NO_SCOPE
from flexkv_core.testing import (
    FakeClock,
    FakeDevice,
    FakeTransfer,
    Medium,
    MemoryTier,
    context_for,
    small_layout,
)
from tests.support.chains import cpu_tier
from tests.support.waiting import DEADLINE_S

LAYOUT = small_layout()
BLOCK = LAYOUT.block_tokens
TIERS = ["host", "disk", "far"]


def prompt(seed: int, blocks: int) -> list[int]:
    return [seed * 1000 + i for i in range(blocks * BLOCK)]


class Engine:
    """A manager, and what an engine does with it."""

    def __init__(self, far: Medium | None = None) -> None:
        self.device = FakeDevice(LAYOUT, 4096)
        self.transfer = FakeTransfer(self.device)
        rows = [{"name": name, "driver": "test", "retries": 0} for name in TIERS]
        config = ChainConfig.model_validate({"block_tokens": BLOCK, "tiers": rows})
        clock = FakeClock()
        namespace = Namespace(model="test")
        self.manager = KVManager(
            config, layout=LAYOUT, namespace=namespace, transfer=self.transfer, clock=clock
        )
        context, self.far = context_for(LAYOUT), far or Medium()
        shared = MemoryTier(context, TierCapabilities(shared=True), self.far)
        self.manager._chain = TierChain(
            config=config,
            layout=LAYOUT,
            tiers=[cpu_tier(LAYOUT, 64), MemoryTier(context), shared],
            transfer=self.transfer,
            metrics=self.manager.metrics,
            clock=clock,
        )

    def settle(self) -> None:
        assert self.manager.drain(DEADLINE_S)

    def store(self, tokens, count: int, **kwargs) -> int:
        """Store all ``count`` tokens of a prompt; returns how many were copied."""
        task, mask = self.manager.put_match(tokens, **kwargs)
        slots = self.device.allocate(count)
        self.device.forward(slots, list(range(count)))
        if mask.any():
            self.manager.launch([task], [array("q", [slots[i] for i in mask.nonzero()[0]])])
        assert self.manager.wait([task])[task].status is KVResponseStatus.SUCCESS
        self.settle()
        self.device.free(slots)
        return int(mask.sum())

    def leave(self, *tiers: str) -> None:
        """Blocks leave these tiers."""
        chain = self.manager.chain
        for name in tiers:
            number = TIERS.index(name)
            gone = chain._parts.capacity.evict(chain.links[number], 10_000, is_final=True)
            if number:
                chain.links[number].evict(gone, 0.0)
        self.settle()

    def in_host(self, tokens) -> list[int]:
        """Numbers of the blocks of a prompt that lie in the first tier."""
        keys = self.manager.sequence(tokens).keys()
        missing = set(self.manager.chain.index.missing(0, keys))
        return [i for i in range(len(keys)) if i not in missing]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.manager.shutdown()


@pytest.mark.parametrize("below", ["disk", "far"])
@pytest.mark.parametrize("start", [0, 1, 5 * BLOCK, 5 * BLOCK + 3, 12 * BLOCK])
def test_a_prefetch_brings_what_the_engine_lacks(engine, below, start):
    tokens = prompt(1, 12)
    engine.store(tokens, len(tokens))
    engine.leave("host", *({"disk"} - {below}))
    engine.manager.chain.links[2].known.clear()
    engine.manager.ask_shared(tokens, engine.manager.lookup(tokens, start=start), DEADLINE_S)
    task = engine.manager.prefetch_async(tokens, start=start)
    engine.settle()
    assert engine.in_host(tokens) == list(range(start // BLOCK, 12))
    assert (task == NO_TASK) == (start == len(tokens))
    if task != NO_TASK:
        assert engine.manager.wait([task])[task].return_mask.nonzero()[0].tolist() == list(
            range(start, 12 * BLOCK)
        )


CALLS = {
    "lookup": lambda m, tokens, **how: m.lookup(tokens, **how),
    "ask_shared": lambda m, tokens, **how: m.ask_shared(
        tokens, Lookup(0, None, wants_probe=True), 0.0, **how
    ),
    "get_match": lambda m, tokens, **how: m.cancel([m.get_match(tokens, **how)[0]]),
    "put_match": lambda m, tokens, **how: m.cancel([m.put_match(tokens, **how)[0]]),
    "prefetch_async": lambda m, tokens, **how: m.prefetch_async(tokens, **how),
    "sequence": lambda m, tokens, **how: m.sequence(tokens, **how),
}
"""Every call of the manager that takes a prompt."""


def test_every_call_that_takes_tokens_is_looked_at():
    public = inspect.getmembers(KVManager, inspect.isfunction)
    takes = {
        name for name, call in public if {"tokens", "token_ids"} & set(inspect.signature(call).parameters)
    }
    assert takes == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scope", [NO_SCOPE, Scope(adapter="a"), Scope(cache_salt="s")])
def test_a_kept_sequence_is_of_the_weights_of_now(engine, name, scope):
    """Whatever is asked first after the weights changed, nothing of the old ones is found or written."""
    tokens, manager = prompt(1, 4), engine.manager
    kept = manager.sequence(tokens, scope)
    engine.store(kept, len(tokens), scope=scope)
    old = kept.keys()
    manager.invalidate()
    assert set(old) <= engine.far.values.keys(), "another process may still serve them"
    CALLS[name](manager, kept, scope=scope)
    engine.settle()
    assert kept.keys() == manager.sequence(tokens, scope).keys()
    assert set(old).isdisjoint(kept.keys())
    assert manager.lookup(kept, scope=scope).num_tokens == 0
    manager.ask_shared(kept, manager.lookup(kept, scope=scope), DEADLINE_S, scope=scope)
    assert manager.lookup(kept, scope=scope).num_tokens == 0


def test_what_is_stored_after_the_weights_changed_has_new_keys(engine):
    kept = engine.manager.sequence(prompt(1, 4))
    engine.manager.invalidate()
    engine.store(kept, 4 * BLOCK)
    assert engine.far.values.keys() == set(engine.manager.sequence(prompt(1, 4)).keys())


@pytest.mark.parametrize("name", CALLS)
def test_a_sequence_of_another_scope_is_refused(engine, name):
    tokens, manager = prompt(1, 4), engine.manager
    for made, given in [(Scope(cache_salt="s"), NO_SCOPE), (NO_SCOPE, Scope(adapter="a"))]:
        kept = manager.sequence(tokens, made)
        with pytest.raises(ValueError, match="another scope"):
            CALLS[name](manager, kept, scope=given)
    with pytest.raises(ValueError, match="another scope"):
        CALLS[name](manager, BlockChain(bytes(32), BLOCK, encode_tokens(tokens)), scope=NO_SCOPE)
    with pytest.raises(ValueError, match="blocks of"):
        CALLS[name](manager, BlockChain(bytes(32), 2 * BLOCK, encode_tokens(tokens)), scope=NO_SCOPE)
    assert not engine.far.values
