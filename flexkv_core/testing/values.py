"""Valid values for tests: a small layout, KV whose bytes follow from its tokens, aligned memory.

The KV row of a token depends on *all tokens before it*, as in a real model, so a block that is
served in another's place is found by its content and not only by its header.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from flexkv_core.envelope import BadValueError, Header, parse, seal, verify, write_header
from flexkv_core.keys import BlockKey, Namespace, block_key, encode_tokens
from flexkv_core.layout import BlockLayout, kv_layout, round_up
from flexkv_core.tier import TierContext

_ODD = 0x9E3779B97F4A7C15
"""Spreads plane numbers over 64 bits (2^64 divided by the golden ratio)."""


def small_layout(
    *,
    num_layers: int = 2,
    row_bytes: Sequence[int] | int = (48, 32),
    block_tokens: int = 16,
    page_tokens: int = 1,
) -> BlockLayout:
    """A layout small enough for thousands of blocks; K and V rows differ in length on purpose."""
    return kv_layout(
        num_layers=num_layers, row_bytes=row_bytes, block_tokens=block_tokens, page_tokens=page_tokens
    )


def context_for(layout: BlockLayout, name: str = "tier") -> TierContext:
    """What a driver is told when a tier for ``layout`` is opened."""
    return TierContext(
        name=name,
        value_bytes=layout.slot_bytes,
        head_bytes=layout.header_bytes,
        fingerprint=layout.fingerprint,
        identity='{"model": "kit"}',
    )


def kv_sums(tokens: Iterable[int], seed: int = 0) -> list[int]:
    """Per token 64 bits that depend on it, on all tokens before it, and on ``seed`` (the weights)."""
    sums = []
    state = seed & 0xFFFFFFFFFFFFFFFF
    for token in tokens:
        packed = state.to_bytes(8, "little") + token.to_bytes(8, "little", signed=True)
        state = xxhash.xxh3_64_intdigest(packed)
        sums.append(state)
    return sums


def kv_row(row_sum: int, plane: int, row_bytes: int) -> bytes:
    """The row of one token (see ``kv_sums``) in plane number ``plane``."""
    word = (row_sum ^ ((plane + 1) * _ODD & 0xFFFFFFFFFFFFFFFF)).to_bytes(8, "little")
    return (word * (row_bytes // 8 + 1))[:row_bytes]


def kv_payload(layout: BlockLayout, sums: Sequence[int]) -> bytes:
    """The payload of a block whose tokens have these ``sums``: plane after plane."""
    return b"".join(
        kv_row(row_sum, number, plane.row_bytes)
        for number, plane in enumerate(layout.planes)
        for row_sum in sums
    )


def aligned_buffer(num_bytes: int, fill: int = 0) -> memoryview:
    """Page-aligned memory of exactly ``num_bytes`` (at least 1), filled with one byte value."""
    view = memoryview(mmap.mmap(-1, round_up(num_bytes, mmap.PAGESIZE)))[:num_bytes]
    if fill:
        view[:] = bytes([fill]) * num_bytes
    return view


@dataclass(frozen=True)
class Value:
    """One block as the core hands it to a tier.

    Attributes:
        key: What it is stored under.
        view: Header and payload, padded to the alignment that was asked for.
        layout: What its bytes mean.
        num_bytes: Bytes without padding.
    """

    key: BlockKey
    view: memoryview
    layout: BlockLayout
    num_bytes: int

    def accepts(self, got: memoryview) -> Header | None:
        """The header of ``got`` if the core would serve it under this key, else None."""
        try:
            return verify(got, self.layout, self.key)
        except BadValueError:
            return None

    def equals(self, got: memoryview) -> bool:
        """Whether ``got`` begins with exactly this value, to the byte."""
        return got[: self.num_bytes] == self.view[: self.num_bytes]

    def means(self, got: memoryview) -> bool:
        """Whether ``got`` is this block with this payload; bytes that carry nothing may differ."""
        at = self.layout.header_bytes
        is_payload_equal = got[at : self.num_bytes] == self.view[at : self.num_bytes]
        return is_payload_equal and self.accepts(got) == parse(self.view, self.layout)


def make_value(
    layout: BlockLayout,
    tokens: Sequence[int],
    seed: int = 0,
    *,
    parent: bytes | None = None,
    alignment_bytes: int = 1,
) -> Value:
    """A valid, sealed value.

    Args:
        layout: The layout; ``1 <= len(tokens) <= layout.block_tokens``.
        tokens: The block's token ids.  They and ``parent`` decide the key.
        seed: Decides the payload: equal keys with different seeds differ in content.
        parent: The parent's key; default: a namespace's digest.
        alignment_bytes: The view's length is a multiple of this.
    """
    parent = Namespace(model="kit").digest() if parent is None else parent
    encoded = encode_tokens(tokens)
    slot = aligned_buffer(layout.slot_bytes)
    key = block_key(parent, encoded)
    write_header(slot, layout, key, parent, encoded)
    payload = kv_payload(layout, kv_sums(tokens, seed))
    slot[layout.header_bytes : layout.header_bytes + len(payload)] = payload
    num_bytes = seal(slot, layout)
    return Value(key, slot[: round_up(num_bytes, alignment_bytes)], layout, num_bytes)


def make_values(
    layout: BlockLayout, count: int, seed: int = 0, *, first: int = 0, alignment_bytes: int = 1
) -> list[Value]:
    """``count`` values with distinct keys and every fill from one token to a full block.

    The same ``first`` gives the same keys; ``seed`` changes the payloads only.
    """
    size = layout.block_tokens
    return [
        make_value(
            layout,
            [number * 1000 + i for i in range(size - number % size)],
            seed,
            alignment_bytes=alignment_bytes,
        )
        for number in range(first, first + count)
    ]
