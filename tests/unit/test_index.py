"""The index alone: matches, pins, leaving, and that its queue never outgrows it."""

from __future__ import annotations

import pytest

from flexkv_core.index import BlockIndex
from flexkv_core.index.match import Inside, Usable
from flexkv_core.index.places import TierPlaces
from flexkv_core.index.policy import Fifo, Filo, Lru, Mru
from flexkv_core.index.stretch import one_block
from flexkv_core.keys import BlockChain, encode_tokens

ROOT = bytes(32)
SIZE = 4
NEVER = float("-inf")


def chain(tokens) -> BlockChain:
    return BlockChain(ROOT, SIZE, encode_tokens(list(tokens)))


def put(index, tier, tokens, *, now=0.0, is_ready=True) -> list[bytes]:
    """Add all whole blocks of ``tokens`` and its tail that are not there; returns all keys."""
    sequence = chain(tokens)
    whole = sequence.num_full_blocks
    keys = sequence.keys()
    rows = [(key, sequence.parent(n), sequence.block(n)) for n, key in enumerate(keys)]
    if len(tokens) % SIZE:
        rows.append((sequence.tail_key(len(tokens)), sequence.parent(whole), sequence.block(whole)))
    for key, parent, encoded in rows:
        if not index.has(tier, key):
            alone = one_block(key, parent, encoded, SIZE)
            index.add(tier, alone, num_bytes=len(encoded), now=now, is_ready=is_ready)
    return [row[0] for row in rows]


def usable(*tiers, oldest=NEVER) -> Usable:
    return Usable(tiers, [oldest] * 3)


def match(index, tokens, page=1, *, tiers=(0, 1, 2), oldest=NEVER):
    return index.match(chain(tokens), len(tokens), page, usable(*tiers, oldest=oldest))


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex(SIZE, [Lru(), Lru(), Lru()])


def test_only_ready_blocks_match_and_only_up_to_a_gap(index):
    keys = put(index, 0, range(12), is_ready=False)
    assert match(index, range(12)).num_tokens == 0
    index.publish(0, [keys[0], keys[2]])
    assert match(index, range(12)).num_tokens == 4
    index.publish(0, [keys[1]])
    assert match(index, range(12)).num_tokens == 12


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("cut", range(13))
def test_a_match_ends_at_a_page(index, page, cut):
    put(index, 0, range(12))
    assert match(index, [*range(cut), 99, 98, 97], page).num_tokens == cut // page * page


def test_a_limit_cuts_inside_a_block(index):
    put(index, 0, range(12))
    assert index.match(chain(range(12)), 7, 1, usable(0)).num_tokens == 7
    assert index.match(chain(range(12)), 7, 4, usable(0)).num_tokens == 4


def test_runs_take_the_fastest_tier(index):
    put(index, 1, range(16))
    put(index, 0, range(4))
    put(index, 2, range(24))
    runs = match(index, range(24)).runs
    assert [(run.tier, run.first, run.last) for run in runs] == [(0, 0, 1), (1, 1, 4), (2, 4, 6)]
    assert match(index, range(24)).tokens_by_tier(6) == {1: 10, 2: 8}


def test_a_tie_inside_a_block_prefers_the_faster_tier(index):
    put(index, 1, [0, 1, 2])
    put(index, 0, [0, 1, 5, 6])
    put(index, 2, [0, 1, 3])
    inside = match(index, [0, 1, 9]).inside
    assert (inside.num_tokens, inside.stored_tokens, inside.tier) == (2, 4, 0)
    assert isinstance(inside, Inside)
    assert match(index, [0, 1, 2, 9], tiers=(0, 1)).inside.tier == 1


def test_an_unready_neighbour_does_not_hide_a_farther_one(index):
    put(index, 0, [0, 1, 2, 3], is_ready=False)
    put(index, 0, [0, 1, 2, 0])
    assert match(index, [0, 1, 2, 4]).num_tokens == 3


def test_expired_blocks_do_not_match(index):
    put(index, 0, range(8), now=10.0)
    put(index, 1, range(8), now=20.0)
    assert match(index, range(8), oldest=15.0).runs[0].tier == 1
    assert match(index, range(8), oldest=25.0).num_tokens == 0
    keys = put(index, 0, range(8))
    index.renew(0, keys, 25.0, 30.0)
    assert match(index, range(8), oldest=25.0).runs[0].tier == 0


def test_blocks_of_another_size_are_refused(index):
    with pytest.raises(ValueError, match="tokens"):
        index.match(BlockChain(ROOT, 8, encode_tokens(range(64))), 64, 1, usable(0))


def leave(index, tier, count) -> list[bytes]:
    return [key for stretch in index.evict(tier, count) for key in reversed(stretch.keys)]


@pytest.mark.parametrize("order", [Lru(), Fifo(), Mru(), Filo()])
def test_leaves_go_first_and_pins_protect_all_before_them(order):
    index = BlockIndex(SIZE, [order])
    keys = put(index, 0, range(16))
    other = put(index, 0, [*range(8), 77, 78, 79, 80])
    index.pin(0, keys[2])
    gone = leave(index, 0, 99)
    assert set(gone) == {keys[3], other[2]}
    index.unpin(0, keys[2])
    assert leave(index, 0, 99) == [keys[2], keys[1], keys[0]]
    assert len(index) == index.num_bytes(0) == index.num_pins == 0
    assert not index._tiers[0]._heads


def test_unready_blocks_never_leave(index):
    put(index, 0, range(8), is_ready=False)
    assert leave(index, 0, 9) == []


def test_a_removed_inner_block_leaves_countable_children(index):
    keys = put(index, 0, range(12))
    index.remove(0, [keys[1]])
    assert match(index, range(12)).num_tokens == 4
    put(index, 0, range(12))
    assert match(index, range(12)).num_tokens == 12
    assert leave(index, 0, 9) == keys[::-1]


def test_pins_are_counted_exactly(index):
    (key,) = put(index, 0, range(4))
    index.pin(0, key)
    index.pin(0, key)
    with pytest.raises(ValueError, match="pinned"):
        index.remove(0, [key])
    index.unpin(0, key)
    index.unpin(0, key)
    for call in (index.unpin, index.pin):
        with pytest.raises(ValueError):
            call(0, key if call == index.unpin else bytes(32))
    with pytest.raises(ValueError):
        index.add(0, one_block(key, ROOT, b"", SIZE), num_bytes=0, now=0.0)


def test_superseded_tails_are_found_unless_they_are_needed(index):
    tails = [put(index, 0, range(n))[0] for n in (1, 2, 3)]
    index.pin(0, tails[1])
    other = put(index, 0, [0, 9])[0]
    whole = put(index, 0, range(4))[0]
    assert set(index.superseded(0, [whole])) == {tails[0], tails[2]}
    assert index.superseded(0, [other]) == [tails[0]]
    assert index.superseded(1, [whole]) == []


@pytest.mark.parametrize("order", [Lru(), Mru()])
def test_the_queue_stays_as_small_as_the_tier(order):
    index = BlockIndex(SIZE, [order])
    keys = put(index, 0, range(40))
    for now in range(5000):
        index.touch(0, keys, float(now))
        tail = put(index, 0, [*range(40), now + 100], now=float(now))[-1]
        index.remove(0, [tail])
    assert len(index._tiers[0].queue) < 1100
    assert leave(index, 0, 99) == keys[::-1]


def test_a_tie_looks_past_a_slower_neighbour(index):
    put(index, 1, [0, 1, 3])
    put(index, 0, [0, 1, 7, 8])
    assert match(index, [0, 1, 2]).inside.tier == 0


def looks(monkeypatch, run) -> int:
    """How often ``run`` looks whether a block can be read, or where some lie."""
    count = 0
    readable, segments = TierPlaces._is_readable, TierPlaces.segments

    def counted_readable(self, *args):
        nonlocal count
        count += 1
        return readable(self, *args)

    def counted_segments(self, *args):
        nonlocal count
        for found in segments(self, *args):
            count += 1
            yield found

    monkeypatch.setattr(TierPlaces, "_is_readable", counted_readable)
    monkeypatch.setattr(TierPlaces, "segments", counted_segments)
    run()
    return count


def test_tiers_that_have_blocks_in_turns_are_read_once(index, monkeypatch):
    keys = put(index, 1, range(1000 * SIZE))
    put(index, 0, range(1000 * SIZE))
    for key in keys[1::2]:
        index.remove(0, [key])
    assert len(match(index, range(1000 * SIZE)).runs) == 1000
    assert looks(monkeypatch, lambda: match(index, range(1000 * SIZE), tiers=(0, 1))) < 5 * 1000


def test_a_crowd_of_expired_neighbours_is_not_looked_through(index, monkeypatch):
    for first in range(2000):
        put(index, 0, [first, 0, 0, 0])
    lookup = looks(monkeypatch, lambda: match(index, [1000, 1, 1, 1], tiers=(0,), oldest=1.0))
    assert lookup < 1000
