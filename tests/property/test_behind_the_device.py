"""What the engine has need not lie in any tier: a hit begins at ``start``, whatever is missing before it.

The model is a set for each tier.  A hit goes on from the block of ``start`` for as long as some tier has the
next block, and ends inside a block if one of this process's own tiers has one that begins like the prompt's.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv_core.testing import Medium, MemoryTier, context_for, small_layout
from flexkv_core.tier import TierCapabilities
from tests.support.chains import World, cpu_tier

SIZE = 4
BLOCKS = 8
PROMPT = list(range(BLOCKS * SIZE + 3))
HOST, OWN, SHARED = range(3)
CHAINS = {"host": [HOST], "own": [OWN], "shared": [SHARED], "host, own, shared": [HOST, OWN, SHARED]}


def common(a, b) -> int:
    """How many leading tokens two lists share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def blocks_of(tokens) -> list[tuple[int, ...]]:
    """Each block as all tokens to its end, which is what its key names."""
    return [tuple(tokens[: min(at + SIZE, len(tokens))]) for at in range(0, len(tokens), SIZE)]


def expected(prompt, start, page, own, shared) -> int:
    """Tokens that can be restored, by the model: sets of blocks in own and in shared tiers."""
    block = start // SIZE
    while tuple(prompt[: (block + 1) * SIZE]) in own | shared and (block + 1) * SIZE <= len(prompt):
        block += 1
    siblings = [other for other in own if block * SIZE < len(other) <= (block + 1) * SIZE]
    end = max([block * SIZE, *(common(prompt, other) for other in siblings)])
    return max(start, block * SIZE + (end - block * SIZE) // page * page)


class Holes:
    """A chain of some kinds of tiers that has stored prompts, and then lost blocks."""

    def __init__(self, kinds, page: int) -> None:
        self.kinds = kinds
        self.layout = small_layout(block_tokens=SIZE, page_tokens=page)
        context, self.medium = context_for(self.layout), Medium()
        tiers = {
            HOST: lambda: cpu_tier(self.layout, 64),
            OWN: lambda: MemoryTier(context),
            SHARED: lambda: MemoryTier(context, TierCapabilities(shared=True), self.medium),
        }
        rows = [(tiers[kind](), {}) for kind in kinds]
        self.world = World(rows, layout=self.layout, staging=64 * self.layout.slot_bytes, num_slots=256)
        self.has = {kind: set() for kind in kinds}

    def store(self, tokens) -> None:
        self.world.store(tokens)
        for kind in self.kinds:
            self.has[kind] |= {b for b in blocks_of(tokens) if kind != SHARED or not len(b) % SIZE}

    def lose(self, kind, tokens) -> None:
        """One block leaves one tier, wherever it stands in it."""
        number, chain, sequence = self.kinds.index(kind), self.world.chain, self.world.sequence(tokens)
        key = sequence.tail_key(len(tokens))
        self.has[kind].discard(tuple(tokens))
        if kind == SHARED:
            self.medium.values.pop(key, None)
            chain.links[number].known.clear()
        elif chain.index.has(number, key):
            chain.index.remove(number, [key])
            if kind == HOST:
                chain.host.direct.evict([key])

    def hit(self, tokens, start: int) -> int:
        """What is promised once shared tiers were asked, which they are once."""
        chain, sequence = self.world.chain, self.world.sequence(tokens)
        found = chain.lookup(sequence, start=start)
        if found.wants_probe:
            chain.probe(sequence, found.num_tokens // SIZE)
            self.world.settle()
            found = chain.lookup(sequence, start=start)
        assert not found.wants_probe, "it was answered"
        assert sum(found.tokens_by_tier.values()) == found.num_tokens - start
        return found.num_tokens


@pytest.mark.parametrize("kinds", CHAINS.values(), ids=CHAINS.keys())
@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2 * BLOCKS)), max_size=20),
    st.integers(1, len(PROMPT) - 1),
    st.integers(0, len(PROMPT)),
    st.sampled_from([1, 2, 4]),
)
def test_a_hit_goes_on_from_what_the_engine_has(kinds, lost, branch, start, page):
    holes = Holes(kinds, page)
    try:
        stored = [
            prompt[: len(prompt) // page * page] for prompt in (PROMPT, [*PROMPT[:branch], 900, 901, 902])
        ]
        for tokens in stored:
            holes.store(tokens)
        blocks = sorted({block for tokens in stored for block in blocks_of(tokens)})
        for kind, at in lost:
            holes.lose(kinds[kind % len(kinds)], list(blocks[at % len(blocks)]))
        own = set().union(*(holes.has[kind] for kind in kinds if kind != SHARED))
        start = start // page * page
        promised = holes.hit(PROMPT, start)
        assert promised == expected(PROMPT, start, page, own, holes.has.get(SHARED, set()))
        assert holes.world.load(PROMPT, start) == promised - start
    finally:
        holes.world.close()


@settings(max_examples=60)
@given(
    st.integers(2, 7),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, len(PROMPT)), st.integers(1, len(PROMPT)))),
)
def test_what_is_promised_fits_into_the_host_slots(slots, loads):
    """What stands before ``start`` in the first tier is pinned with what stands behind it."""
    layout = small_layout(block_tokens=SIZE)
    context, medium = context_for(layout), Medium()
    can = TierCapabilities(can_list=True, persistent=True)
    prompts = [PROMPT, [*PROMPT[:14], *range(100, 120)], list(range(200, 230))]
    full = World([(cpu_tier(layout, 64), {}), (MemoryTier(context, can, medium), {})], layout=layout)
    for tokens in prompts:
        full.store(tokens)
    full.close()
    world = World([(cpu_tier(layout, slots), {}), (MemoryTier(context, can, medium), {})], layout=layout)
    try:
        for which, start, length in loads:
            tokens = prompts[which][:length]
            start = min(start, len(tokens))
            promised = world.hit(tokens, start) - start
            assert world.load(tokens, start) == promised
    finally:
        world.close()
