"""A manager over a host pool, an own tier and a shared one: what its calls take, and from where on."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from flexkv_core import ChainConfig, Namespace, TierCapabilities
from flexkv_core.chain import TierChain
from flexkv_core.manager import NO_TASK, KVManager, KVResponseStatus
from flexkv_core.testing import FakeDevice, FakeTransfer, Medium, MemoryTier, context_for, small_layout
from tests.support.chains import DEADLINE_S, cpu_tier

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
        self.manager = KVManager(
            config, layout=LAYOUT, namespace=Namespace(model="test"), transfer=self.transfer
        )
        context, self.far = context_for(LAYOUT), far or Medium()
        shared = MemoryTier(context, TierCapabilities(shared=True), self.far)
        self.manager._chain = TierChain(
            config=config,
            layout=LAYOUT,
            tiers=[cpu_tier(LAYOUT, 64), MemoryTier(context), shared],
            transfer=self.transfer,
            metrics=self.manager.metrics,
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
