"""One tier's tree of stretches against a plain table with one record for each block.

Whatever is added, published, pinned, loaded, removed and evicted, both say the same; what leaves was a
leaf that nothing kept, of the lowest rank.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexkv_core.index.places as places_module
from flexkv_core.index.places import TierPlaces
from flexkv_core.index.policy import Fifo, Filo, Lfu, Lru, Mru, Slru
from flexkv_core.index.stretch import in_a_row, tail_block, whole_blocks
from flexkv_core.keys import BlockChain, encode_tokens
from tests.support.places import check_places

ROOT = bytes(32)
SIZE = 2
ORDERS = [Lru, Lfu, Slru, Fifo, Mru, Filo]
MOVES = ["add", "publish", "remove", "evict", "pin", "unpin", "touch", "renew"]

PROMPTS = [
    [*range(12)],
    [*range(20)],
    [*range(6), 90, 91, 92, 93, 94, 95],
    [*range(8), 80, 81, 82, 83],
    [50, 51, 52, 53],
    [*range(5)],
    [*range(4), 7],
]


@dataclass
class Block:
    """One block as the table knows it."""

    parent: bytes
    tokens: bytes
    num_bytes: int
    created: float
    last_used: float
    is_ready: bool
    hits: int = 0
    pins: int = 0


class Table:
    """The plain form."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}

    def may_leave(self, key) -> bool:
        block = self.blocks[key]
        return block.is_ready and not block.pins and all(b.parent != key for b in self.blocks.values())

    def check_evicted(self, order, keys) -> None:
        for key in keys:
            free = [k for k in self.blocks if self.may_leave(k)]
            assert key in free
            assert order.rank(self.blocks[key]) == min(order.rank(self.blocks[k]) for k in free)
            del self.blocks[key]


def compare(places: TierPlaces, table: Table, sequence: BlockChain) -> None:
    check_places(places)
    assert set(places) == set(table.blocks)
    for key, block in table.blocks.items():
        place = places.get(key)
        facts = (place.created, place.last_used, place.hits, place.is_ready, place.num_bytes)
        assert facts == (block.created, block.last_used, block.hits, block.is_ready, block.num_bytes)
        assert places.num_pins_of(key) == block.pins
        alone = places.block(key)
        assert (alone.parent, alone.tokens(0)) == (block.parent, block.tokens)
    keys = sequence.keys()
    assert list(places.missing(keys)) == [i for i, key in enumerate(keys) if key not in table.blocks]
    unready = [i for i, k in enumerate(keys) if k not in table.blocks or not table.blocks[k].is_ready]
    assert places.unready(keys) == unready
    for start in range(len(keys)):
        end = next((i for i in unready if i >= start), len(keys))
        assert places.ready_until(keys, start, len(keys), float("-inf")) == end
    for parent in (ROOT, *keys):
        below = sorted((b.tokens, k) for k, b in table.blocks.items() if b.parent == parent)
        assert list(places.followers(parent)) == below


@given(
    order=st.sampled_from(ORDERS),
    moves=st.lists(
        st.tuples(
            st.sampled_from(MOVES),
            st.sampled_from(PROMPTS),
            st.integers(0, 9),
            st.integers(0, 9),
            st.booleans(),
        ),
        min_size=12,
        max_size=40,
    ),
)
@settings(max_examples=300, deadline=None)
def test_a_tree_of_stretches_is_a_table_of_blocks(order, moves):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places_module, "_LONGEST", 3)
        ranks = order()
        places, table = TierPlaces(ranks), Table()
        for now, (move, tokens, first, last, flag) in enumerate(moves):
            sequence = BlockChain(ROOT, SIZE, encode_tokens(tokens))
            apply(places, table, ranks, float(now), move, sequence, *sorted((first, last)), flag)
            compare(places, table, sequence)


def apply(places, table, ranks, now, move, sequence, first, last, flag) -> None:
    keys = sequence.keys()[first:last]
    here = [key for key in keys if key in table.blocks]
    if move == "add":
        numbers = range(first, min(last, sequence.num_full_blocks))
        lacking = [i for i in numbers if sequence.key(i) not in table.blocks]
        stretches = [whole_blocks(sequence, *run) for run in in_a_row(lacking)]
        if sequence.num_tokens % SIZE and sequence.tail_key(sequence.num_tokens) not in table.blocks:
            stretches.append(tail_block(sequence, sequence.num_tokens))
        for stretch in stretches:
            places.add(stretch, num_bytes=10 + len(stretch), now=now, is_ready=flag)
            for key, parent, ids in stretch.rows():
                table.blocks[key] = Block(parent, ids, 10 + len(stretch), now, now, flag)
    elif move == "publish":
        places.publish(here)
        for key in here:
            table.blocks[key].is_ready = True
    elif move == "remove":
        if any(table.blocks[key].pins for key in here):
            with pytest.raises(ValueError, match="pinned"):
                places.remove(here)
        else:
            places.remove(here)
            for key in here:
                del table.blocks[key]
    elif move == "evict":
        gone = [key for stretch in places.evict(last) for key in reversed(stretch.keys)]
        table.check_evicted(ranks, gone)
        assert len(gone) == last or not any(map(table.may_leave, table.blocks))
    elif move == "pin":
        for key in places.pin_ends(keys) if flag else here[-1:]:
            if not flag:
                places.pin(key)
            table.blocks[key].pins += 1
    elif move == "unpin":
        for key in [key for key in here if table.blocks[key].pins]:
            places.unpin(key)
            table.blocks[key].pins -= 1
    elif move == "touch":
        places.touch(keys, now)
        for key in here:
            table.blocks[key].last_used = now
            table.blocks[key].hits += 1
    else:
        places.renew(keys, now - 3, now)
        for key in here:
            block = table.blocks[key]
            if block.is_ready and block.created < now - 3:
                block.created = block.last_used = now


def test_a_short_rest_keeps_no_long_sequence_alive():
    tokens = encode_tokens(range(4000))
    sequence = BlockChain(ROOT, SIZE, tokens)
    places = TierPlaces(Lru())
    places.add(whole_blocks(sequence, 0, 2), num_bytes=1, now=0.0, is_ready=True)
    places.add(whole_blocks(sequence, 2, 200), num_bytes=1, now=1.0, is_ready=True)
    places.evict(190)
    kept = {id(place): place for place in map(places.get, places)}.values()
    assert len(places) == 10
    assert all(len(place.ids) <= 8 * len(place.keys) * SIZE * 4 for place in kept)


@pytest.mark.parametrize("keys", [[], [ROOT]])
def test_what_is_not_there_is_an_error_or_nothing(keys):
    places = TierPlaces(Lru())
    assert list(places.missing(keys)) == list(places.unready(keys)) == list(range(len(keys)))
    assert places.pin_ends(keys) == places.superseded(keys) == []
    for call in (places.publish, places.remove):
        if keys:
            with pytest.raises(ValueError, match="no place"):
                call(keys)


def test_siblings_are_found_by_their_tokens():
    places = TierPlaces(Lru())
    for last in (9, 3, 7, 5):
        sequence = BlockChain(ROOT, SIZE, encode_tokens([0, last]))
        places.add(whole_blocks(sequence, 0, 1), num_bytes=1, now=0.0, is_ready=last != 7)
    rows = [ids for ids, _ in places.followers(ROOT)]
    assert rows == sorted(rows)
    wanted = encode_tokens([0, 6])
    behind, before = ([ids for ids, _ in some] for some in places.nearest(ROOT, wanted, float("-inf")))
    assert behind == [encode_tokens([0, 9])]
    assert before == [encode_tokens([0, 5]), encode_tokens([0, 3])]
    assert bisect_left(rows, wanted) == 2
