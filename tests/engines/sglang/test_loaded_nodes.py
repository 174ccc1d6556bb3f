"""What a load leaves in SGLang's tree is what the computed prompt had left there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from flexkv_sglang import compat
from tests.support.sglang_world import Job, SglangWorld, world

PAGES = [1, 16]


class WorldWithEvents(SglangWorld):
    """SGLang tells others of what its tree gains and loses."""

    def _context(self) -> Any:
        ctx = super()._context()
        ctx.params.enable_kv_cache_events = True
        return ctx


def nodes(w: SglangWorld, job: Job, num_tokens: int) -> list[tuple[int, int, int]]:
    """Length, priority and uses of the nodes of a request's first tokens: what eviction goes by."""
    key = compat.prompt_key(job.req, num_tokens)
    types = compat.types()
    node = types.RadixCache.match_prefix(w.cache, types.MatchPrefixParams(key=key)).last_device_node
    found = []
    while node is not w.cache.root_node:
        found.append((len(node.key), node.priority, node.hit_count))
        node = node.parent
    return found[::-1]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("priority", [None, -5, 0, 7])
def test_eviction_by_priority_and_by_use(tmp_path: Path, page: int, priority: int | None) -> None:
    with world(tmp_path, page=page) as w:
        computed = w.ask(range(81), outputs=1, priority=priority)
        as_computed = nodes(w, computed, 80)
        assert w.flush()
        loaded = w.ask(range(81), outputs=1, priority=priority)
        assert (computed.cached, loaded.cached) == ((0, 0, 0), (0, 80, 0))
        assert nodes(w, loaded, 80) == as_computed


@pytest.mark.parametrize("page", PAGES)
def test_what_others_are_told_of_the_tree(tmp_path: Path, page: int) -> None:
    """A router that sends prompts to where their KV is counts on it."""
    w = WorldWithEvents(tmp_path, page=page)

    def told(kind: str) -> list[int]:
        events = w.cache.take_events()
        assert {type(one).__name__ for one in events} == {kind}
        return [number for one in events for number in getattr(one, "block_hashes", ())]

    try:
        told("AllBlocksCleared")
        assert w.ask(range(64), outputs=1).cached == (0, 0, 0)
        computed = told("BlockStored")
        assert len(computed) == 64 // page
        assert w.flush()
        told("AllBlocksCleared")
        assert sum(w.ask(range(64), outputs=1).cached or ()) == 63 // page * page
        assert told("BlockStored") == computed
        w.cache.evict(compat.types().EvictParams(num_tokens=64))
        assert sorted(told("BlockRemoved")) == sorted(computed)
        w.assert_nothing_left()
    finally:
        w.close()
