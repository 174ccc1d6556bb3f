"""The header: whatever is cut, flipped, swapped, foreign or old is refused with a reason."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv_core import kv_layout
from flexkv_core.envelope import BadValueError, parse, seal, verify, write_header
from flexkv_core.keys import block_key, decode_tokens, encode_tokens
from flexkv_core.testing import aligned_buffer, make_value, small_layout
from flexkv_core.testing.strategies import batches, layouts

LAYOUT = small_layout()
VALUE = make_value(LAYOUT, [3, 1, 4, 1, 5], parent=bytes(range(32)))
USED = 128 + 8 * 5
"""Bytes of the header that say something; the rest of its room is zeros."""


def copy(value=VALUE):
    buffer = aligned_buffer(LAYOUT.slot_bytes)
    buffer[: value.num_bytes] = value.view[: value.num_bytes]
    return buffer


def test_golden_header():
    """Stored values begin like this: it changes only with VERSION."""
    assert bytes(VALUE.view[:USED]).hex() == (
        "464c45584b5642010100000000100000247bf15953257813f075f34f2837e6761c4f00dff5fe29af6b30175a245eb77f"
        "07f6a2b6234a4eebf9eb024c770c80b0000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "050000000100000020030000000000001e53798a2c4bf793f481faec3334bc1803000000000000000100000000000000"
        "040000000000000001000000000000000500000000000000"
    )


@given(st.data())
def test_whole_values_verify(data):
    layout = data.draw(layouts())
    for value in data.draw(batches(layout)):
        header = verify(value.view, layout, value.key)
        assert header.is_sealed
        assert block_key(header.parent, header.tokens) == value.key
        assert header.payload_bytes == header.num_tokens * layout.token_bytes
        assert layout.header_bytes + header.payload_bytes == value.num_bytes


def test_header_tells_the_tokens():
    header = parse(VALUE.view, LAYOUT)
    assert decode_tokens(header.tokens) == [3, 1, 4, 1, 5]
    assert header.parent == bytes(range(32))


@pytest.mark.parametrize("at", range(USED))
def test_every_byte_of_the_header_counts(at):
    for bit in (1, 0x80):
        value = copy()
        value[at] ^= bit
        with pytest.raises(BadValueError):
            verify(value, LAYOUT, VALUE.key)


@given(st.integers(LAYOUT.header_bytes, VALUE.num_bytes - 1), st.integers(0, 7))
def test_every_bit_of_the_payload_counts(at, bit):
    value = copy()
    value[at] ^= 1 << bit
    with pytest.raises(BadValueError, match="checksum differs"):
        verify(value, LAYOUT, VALUE.key)
    verify(value, LAYOUT, VALUE.key, payload=False)


@given(st.integers(0, VALUE.num_bytes - 1))
def test_every_truncation_is_seen(length):
    with pytest.raises(BadValueError, match="truncated"):
        verify(VALUE.view[:length], LAYOUT, VALUE.key)


@given(st.binary(max_size=LAYOUT.slot_bytes))
def test_any_bytes_are_refused_in_words(data):
    with pytest.raises(BadValueError):
        verify(memoryview(data), LAYOUT, VALUE.key)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_lengths_are_not_trusted(num_tokens, payload, size):
    value = copy()
    struct.pack_into("<I", value, 12, size)
    struct.pack_into("<I", value, 96, num_tokens)
    struct.pack_into("<Q", value, 104, payload)
    if (size, num_tokens, payload) != (LAYOUT.header_bytes, 5, 5 * LAYOUT.token_bytes):
        with pytest.raises(BadValueError):
            verify(value, LAYOUT, VALUE.key)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (small_layout(num_layers=3), "foreign layout"),
        (small_layout(row_bytes=(32, 48)), "foreign layout"),
        (kv_layout(num_layers=2, row_bytes=(48, 32), block_tokens=16, dtype="float16"), "foreign layout"),
    ],
)
def test_other_layouts_are_foreign(layout, why):
    with pytest.raises(BadValueError, match=why):
        parse(make_value(layout, [1]).view, LAYOUT)


def test_reasons():
    other = make_value(LAYOUT, [9])
    with pytest.raises(BadValueError, match="another block's value"):
        verify(other.view, LAYOUT, VALUE.key)
    with pytest.raises(BadValueError, match="not a block"):
        parse(bytes(LAYOUT.header_bytes), LAYOUT)
    newer = copy()
    struct.pack_into("<I", newer, 8, 2)
    with pytest.raises(BadValueError, match="schema 2"):
        parse(newer, LAYOUT)


def test_key_must_follow_from_the_tokens():
    """A header that is whole, and lies: its key was not made from its tokens."""
    slot = aligned_buffer(LAYOUT.slot_bytes)
    tokens = encode_tokens([1, 2])
    write_header(slot, LAYOUT, VALUE.key, bytes(32), tokens)
    seal(slot, LAYOUT)
    with pytest.raises(BadValueError, match="does not follow"):
        verify(slot, LAYOUT, VALUE.key)


def test_unsealed_values_are_not_served():
    slot = aligned_buffer(LAYOUT.slot_bytes)
    tokens = encode_tokens([1, 2])
    key = block_key(bytes(32), tokens)
    write_header(slot, LAYOUT, key, bytes(32), tokens)
    with pytest.raises(BadValueError, match="no checksum"):
        verify(slot, LAYOUT, key)
    assert not verify(slot, LAYOUT, key, payload=False).is_sealed


def test_sealing_nothing_is_refused():
    with pytest.raises(BadValueError, match="not a block"):
        seal(aligned_buffer(LAYOUT.slot_bytes), LAYOUT)


def test_sealing_twice_changes_nothing():
    value = copy()
    assert seal(value, LAYOUT) == VALUE.num_bytes
    assert value[: VALUE.num_bytes] == VALUE.view[: VALUE.num_bytes]


def test_nothing_of_a_slots_former_block_leaves_with_the_next():
    """Neither former tokens behind the new ones, nor former KV in the padding."""
    slot = aligned_buffer(LAYOUT.slot_bytes, fill=0xEE)
    tokens = encode_tokens([1, 2])
    write_header(slot, LAYOUT, block_key(bytes(32), tokens), bytes(32), tokens)
    slot[LAYOUT.header_bytes :][: 2 * LAYOUT.token_bytes] = bytes(2 * LAYOUT.token_bytes)
    stop = seal(slot, LAYOUT)
    padded = -(-stop // 4096) * 4096
    assert b"\xee" * 4 not in bytes(slot[:padded])


def test_padding_behind_the_value_is_nobodys():
    value = copy()
    value[VALUE.num_bytes :] = b"\xee" * (len(value) - VALUE.num_bytes)
    assert verify(value, LAYOUT, VALUE.key).num_tokens == 5
