"""With room for all, a hit is the longest prefix that any stored prompt shares, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv_core.testing import MemoryTier, context_for, small_layout
from flexkv_core.testing.strategies import prompts
from tests.support.chains import World, cpu_tier


def best(tokens, stored) -> int:
    """How many leading tokens some stored prompt shares."""
    shared = [0]
    for other in stored:
        pairs = zip(tokens, other, strict=False)
        shared.append(next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other))))
    return max(shared)


@pytest.mark.parametrize("chain", ["host", "host over memory", "memory"])
@settings(max_examples=25)
@given(prompts(), st.sampled_from([(4, 1), (4, 4), (8, 2), (16, 16)]), st.integers(0, 20))
def test_hits_are_longest_common_prefixes(chain, made, sizes, start):
    block_tokens, page = sizes
    layout = small_layout(block_tokens=block_tokens, page_tokens=page)
    memory = (MemoryTier(context_for(layout)), {})
    tiers = {"host": [(cpu_tier(layout, 64), {})], "memory": [memory]}.get(
        chain, [(cpu_tier(layout, 64), {}), memory]
    )
    world = World(tiers, layout=layout, staging=64 * layout.slot_bytes, num_slots=256)
    try:
        stored: list[list[int]] = []
        for tokens in made:
            expected = max(best(tokens, stored) // page * page, 0)
            assert world.hit(tokens) == expected
            assert world.load(tokens) == expected
            if start < expected:
                assert world.load(tokens, start) == expected - start
            world.store(tokens)
            stored.append(tokens[: len(tokens) // page * page])
            assert world.hit(tokens) == len(stored[-1])
    finally:
        world.close()
