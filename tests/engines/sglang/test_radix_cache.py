"""FlexKVRadixCache over SGLang's real classes: what is promised, loaded and stored, and the books.

Each step of the scheduler model checks owners of slots, locks, and SGLang's sums; each forward pass
checks every byte that it builds on; the end checks that nothing is held (``sglang_world``).
"""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from flexkv_sglang import compat
from flexkv_sglang.touched import MEDIA
from tests.support.sglang_world import SglangWorld, cpu, ssd, world

PAGES = [1, 16]
HUGE = (1 << 62) - 1


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("pool", ["mha", "mla"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_comes_back_after_a_flush(tmp_path: Path, page: int, pool: str, overlap: bool) -> None:
    """R61, R63, HS-11: a flush keeps the tiers, and what they give back is bit-identical."""
    with world(tmp_path, page=page, pool=pool, overlap=overlap) as w:
        first = w.ask(range(50), outputs=4)
        assert first.cached == (0, 0, 0)
        assert w.flush()
        again = w.ask(range(50), outputs=4)
        assert again.cached == (0, 49 // page * page, 0)
        assert again.req.output_ids == first.req.output_ids
        w.check_tree(again, 48)


@pytest.mark.parametrize("page", [32, 64, 128])
def test_other_page_sizes(tmp_path: Path, page: int) -> None:
    """R64."""
    with world(tmp_path, page=page, block=128, size=1024, overlap=True, chunk=page) as w:
        w.ask(range(300), outputs=4)
        assert w.flush()
        assert w.ask(range(300), outputs=4).cached == (0, 299 // page * page, 0)


@pytest.mark.parametrize("page", PAGES)
def test_lengths_at_the_edges(tmp_path: Path, page: int) -> None:
    """R48, R67: prompts of page and block size -1, +0, +1; empty and one-token prompts."""
    lengths = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65]
    with world(tmp_path, page=page, block=32) as w:
        for length in lengths:
            start = 1000 * length
            w.ask(range(start, start + length), outputs=1) if length else _match_nothing(w)
        assert w.flush()
        for length in lengths[1:]:
            start = 1000 * length
            again = w.ask(range(start, start + length), outputs=1)
            assert again.cached == (0, (length - 1) // page * page, 0), length


def _match_nothing(w: SglangWorld) -> None:
    job = w.submit(array("q"), outputs=1)
    assert w.match(job) == 0
    w.abort(job)


@pytest.mark.parametrize("page", PAGES)
def test_any_token_id_is_only_a_number(tmp_path: Path, page: int) -> None:
    tokens = [-1, -HUGE, HUGE, 0, -5] * 10
    with world(tmp_path, page=page) as w:
        w.ask(tokens)
        assert w.flush()
        assert w.ask(tokens).cached == (0, 49 // page * page, 0)
        assert w.ask([-2, *tokens[1:]]).cached == (0, 0, 0)


@pytest.mark.parametrize("page", PAGES)
def test_the_answer_is_kept_too(tmp_path: Path, page: int) -> None:
    """R67: a finished request is stored to its last committed token, in whole pages."""
    with world(tmp_path, page=page, overlap=True) as w:
        first = w.ask(range(40), outputs=20)
        assert w.flush()
        turn = list(first.tokens) + [7, 8, 9]
        again = w.ask(turn)
        # The last token's KV is never computed by a request that ends by length.
        assert again.cached == (0, 59 // page * page, 0)


def test_a_match_is_a_query(tmp_path: Path) -> None:
    """R47, HS-32, HS-33: a thousand matches of a waiting request hold nothing and start nothing."""
    with world(tmp_path, tiers=[cpu(), ssd(tmp_path / "disk")]) as w:
        w.ask(range(100))
        assert w.flush()
        job = w.submit(range(100))
        assert w.match(job) == 99
        before = _held(w)
        for _ in range(1000):
            assert w.match(job) == 99
        assert _held(w) == before
        assert before[:4] == (512, 0, 0, 0)
        w.abort(job)


def _held(w: SglangWorld) -> tuple[int, ...]:
    chain = w.chain
    return (
        w.allocator.available_size(),
        w.cache.protected_size(),
        chain.index.num_pins,
        chain.num_under_way,
        len(w.manager._tasks),
        w.cache.connector.num_seen,
        len(w.cache._seam_handles),
    )


def test_probes_start_nothing(tmp_path: Path) -> None:
    """R49, HS-43: a query without a request is answered by the tree alone."""
    with world(tmp_path) as w:
        w.ask(range(64))
        assert w.flush()
        found = w.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", range(64)))))
        assert (compat.match_device_len(found), found.host_hit_length) == (0, 0)


def test_a_live_prompt_may_grow_after_a_match(tmp_path: Path) -> None:
    """HS-63: no view of the prompt's own array is kept, which would forbid to append to it."""
    with world(tmp_path) as w:
        job = w.submit(range(33))
        w.match(job)
        job.req.full_untruncated_fill_ids.append(5)
        job.req.origin_input_ids.append(5)
        job.req.origin_input_ids.pop()
        w.abort(job)


@pytest.mark.parametrize("page", PAGES)
def test_hits_are_counted_by_the_tier_that_gave_them(tmp_path: Path, page: int) -> None:
    """R62, HS-66: device, host and storage as they were, and only what was really loaded."""
    disk = ssd(tmp_path / "disk")
    with world(tmp_path, page=page, tiers=[cpu(), disk]) as w:
        w.ask(range(100))
        w.flush()
        assert w.ask(range(100)).cached == (0, 99 // page * page, 0)
        assert w.ask(range(100)).cached == (99 // page * page, 0, 0)
        mixed = w.submit([*range(100), *range(500, 550)])
        w.run(mixed)
        assert mixed.cached == (100 // page * page, 0, 0)
        w.settle()
    with world(tmp_path, page=page, tiers=[cpu(), disk]) as w:  # warm after a restart
        assert w.ask(range(100)).cached == (0, 0, 99 // page * page)
        w.flush()
        assert w.ask(range(100)).cached == (0, 99 // page * page, 0)  # it was promoted


@pytest.mark.parametrize("page", PAGES)
def test_a_disk_without_host_memory(tmp_path: Path, page: int) -> None:
    with world(tmp_path, page=page, tiers=[ssd(tmp_path / "disk")], staging="1MiB") as w:
        first = w.ask(range(70), outputs=3)
        assert w.flush()
        again = w.ask(range(70), outputs=3)
        assert sum(again.cached or ()) == 69 // page * page
        assert again.req.output_ids == first.req.output_ids


@pytest.mark.parametrize("page", PAGES)
def test_what_separates_requests(tmp_path: Path, page: int) -> None:
    """R65, HS-12: adapter, extra key and salt each separate; swapping their texts does too."""
    fields = [
        {},
        {"extra_key": "a"},
        {"cache_salt": "a"},
        {"lora_id": "a"},
        {"extra_key": "a", "cache_salt": "b"},
        {"extra_key": "b", "cache_salt": "a"},
        {"extra_key": "a", "lora_id": "bc"},
        {"extra_key": "ab", "lora_id": "c"},
    ]
    if not compat.seam().has_salt:
        fields = [own for own in fields if "cache_salt" not in own]
    with world(tmp_path, page=page, size=1024) as w:
        for own in fields:
            assert w.ask(range(48), **own).cached == (0, 0, 0), own
            assert w.flush()  # SGLang's own tree does not tell an extra key "a" from an adapter "a"
        for own in fields:
            assert w.ask(range(48), **own).cached == (0, 47 // page * page, 0), own
            assert w.flush()


@pytest.mark.skipif(not compat.seam().has_salt, reason="this SGLang has no salt")
def test_a_salt_may_be_required(tmp_path: Path) -> None:
    with world(tmp_path, namespace={"require_salt": True}) as w:
        for salt, hit in ((None, 0), ("tenant", 47)):
            w.ask(range(48), cache_salt=salt)
            assert w.flush()
            assert w.ask(range(48), cache_salt=salt).cached == (0, hit, 0)
            assert w.flush()


@pytest.mark.parametrize("name", MEDIA)
def test_media_is_neither_served_nor_stored(tmp_path: Path, name: str) -> None:
    """HS-18: placeholders in the token ids do not say what they stand for."""
    with world(tmp_path) as w:
        w.ask(range(48))
        assert w.flush()
        job = w.submit(range(48))
        setattr(job.req, name, object())
        assert w.match(job) == 0
        w.abort(job)
        stored = w.count("jobs", kind="store")
        other = w.submit(range(100, 148))
        setattr(other.req, name, object())
        w.run(other)
        w.settle()
        assert w.count("jobs", kind="store") == stored


@pytest.mark.parametrize("name", MEDIA)
def test_media_that_was_taken_off_or_cannot_be_seen_is_refused(tmp_path: Path, name: str) -> None:
    """SGLang takes media off a request that ends; a field of another name may hold anything."""
    with world(tmp_path) as w:
        job = w.submit(range(48))
        setattr(job.req, name, object())
        assert not compat.is_cacheable(job.req)
        setattr(job.req, name, None)
        assert not compat.is_cacheable(job.req)
        w.abort(job)
        other = w.submit(range(48))
        assert compat.is_cacheable(other.req)
        delattr(other.req, name)
        assert not compat.is_cacheable(other.req)
        w.abort(other)


def test_sglangs_own_health_checks_are_left_out(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        w.ask(range(48), rid="HEALTH_CHECK_1700000000.0")
        assert not w.count("jobs", kind="store")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_larger_than_pages(tmp_path: Path, page: int) -> None:
    """HS-67, R29: the unit of storage is the block, that of a hit the page, also inside a shared block."""
    with world(tmp_path, page=page, block=64) as w:
        w.ask(range(100))
        assert w.chain.index.count(0) == 2
        assert w.flush()
        assert w.ask([*range(40), *range(900, 930)]).cached == (0, 40 // page * page, 0)
        assert w.ask([*range(80), *range(900, 930)]).cached == (
            40 // page * page,
            (80 // page - 40 // page) * page,
            0,
        )
