"""The header that every stored value begins with: no value is believed for where it lies.

A header carries magic and version, the layout's fingerprint, the block's own key and its
parent's, lengths, the ids of its tokens, and two checksums (xxh3-64): one over the header,
one over the payload.  A value that was cut, flipped, swapped with another, written by an
older schema or for another model fails ``parse`` or ``verify`` and becomes a miss with a
reason.  There is no pickle and no length that is trusted before it was checked.

Layout, little-endian: ``magic 8s | version I | header_bytes I | fingerprint 16s | key 32s |
parent 32s | num_tokens I | flags I | payload_bytes Q | payload_xxh3 Q | header_xxh3 Q |
tokens num_tokens*q``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from .keys import TOKEN_BYTES, BlockKey, block_key
from .layout import HEADER_FIXED_BYTES, PAGE_BYTES, BlockLayout, round_up

MAGIC = b"FLEXKVB\x01"
VERSION = 1
_FIXED = struct.Struct("<8sII16s32s32sIIQQ")
_SUM = struct.Struct("<Q")
_TOKENS_AT = _FIXED.size + _SUM.size
_SEALED = 1

if _TOKENS_AT > HEADER_FIXED_BYTES:  # pragma: no cover - a programming error, found at import
    raise AssertionError("the fixed header outgrew its room")


@dataclass(frozen=True, slots=True)
class Header:
    """What a stored value says of itself.

    Attributes:
        key: The block's key.
        parent: The key that it was derived from.
        tokens: Encoded token ids (see ``keys.encode_tokens``).
        payload_bytes: Bytes after the header that count.
        payload_sum: xxh3-64 over them; meaningless unless ``is_sealed``.
        is_sealed: Whether the payload's checksum was computed.
    """

    key: BlockKey
    parent: bytes
    tokens: bytes
    payload_bytes: int
    payload_sum: int
    is_sealed: bool

    @property
    def num_tokens(self) -> int:
        """Tokens in the block."""
        return len(self.tokens) // TOKEN_BYTES


class BadValueError(ValueError):
    """These bytes are not a block that can be served; the text says why in a few words."""


def write_header(slot: memoryview, layout: BlockLayout, key: bytes, parent: bytes, tokens: bytes) -> None:
    """Write an unsealed header at the front of ``slot`` (at least ``layout.header_bytes`` long).

    The header's room is cleared, so that no token of the slot's former block leaves with this one.
    """
    payload = len(tokens) // TOKEN_BYTES * layout.token_bytes
    _write(slot, layout, Header(key, parent, tokens, payload, 0, is_sealed=False))
    used = _TOKENS_AT + len(tokens)
    slot[used : layout.header_bytes] = bytes(layout.header_bytes - used)


def seal(slot: memoryview, layout: BlockLayout) -> int:
    """Checksum the payload behind an unsealed header, once; returns the value's length in bytes.

    The padding behind the payload is cleared, so nothing of the slot's former content leaves.

    Raises:
        BadValueError: there is no header in the slot.
    """
    header = parse(slot, layout)
    stop = layout.header_bytes + header.payload_bytes
    if not header.is_sealed:
        total = xxhash.xxh3_64_intdigest(slot[layout.header_bytes : stop])
        _write(
            slot,
            layout,
            Header(header.key, header.parent, header.tokens, header.payload_bytes, total, is_sealed=True),
        )
        padded = min(round_up(stop, PAGE_BYTES), len(slot))
        slot[stop:padded] = bytes(padded - stop)
    return stop


def parse(value: memoryview | bytes, layout: BlockLayout) -> Header:
    """Read and check a header; the payload is not looked at.

    Args:
        value: At least the value's first ``layout.header_bytes`` bytes.
        layout: The layout that the value must have.

    Raises:
        BadValueError: too short, foreign, of another schema or layout, or damaged.
    """
    view = memoryview(value)
    if len(view) < layout.header_bytes:
        raise BadValueError("truncated header")
    magic, version, size, fingerprint, key, parent, num_tokens, flags, payload, total = _FIXED.unpack_from(
        view
    )
    if magic != MAGIC:
        raise BadValueError("not a block")
    if version != VERSION:
        raise BadValueError(f"schema {version}")
    if fingerprint != layout.fingerprint or size != layout.header_bytes:
        raise BadValueError("foreign layout")
    if not 0 < num_tokens <= layout.block_tokens or payload != num_tokens * layout.token_bytes:
        raise BadValueError("impossible length")
    tokens = bytes(view[_TOKENS_AT : _TOKENS_AT + num_tokens * TOKEN_BYTES])
    (header_sum,) = _SUM.unpack_from(view, _FIXED.size)
    if header_sum != _header_sum(bytes(view[: _FIXED.size]), tokens):
        raise BadValueError("damaged header")
    return Header(key, parent, tokens, payload, total, is_sealed=bool(flags & _SEALED))


def verify(value: memoryview, layout: BlockLayout, key: BlockKey, *, payload: bool = True) -> Header:
    """Check that ``value`` is the whole, undamaged block of ``key``.

    Args:
        value: The value as read; may be longer than the block (padding).
        layout: The layout that it must have.
        key: The key that was asked for.
        payload: Whether the payload's checksum is checked too.

    Raises:
        BadValueError: with the reason, in a few words.
    """
    header = parse(value, layout)
    if header.key != key:
        raise BadValueError("another block's value")
    if block_key(header.parent, header.tokens) != key:
        raise BadValueError("key does not follow from its tokens")
    stop = layout.header_bytes + header.payload_bytes
    if len(value) < stop:
        raise BadValueError("truncated value")
    if payload:
        if not header.is_sealed:
            raise BadValueError("no checksum")
        if xxhash.xxh3_64_intdigest(value[layout.header_bytes : stop]) != header.payload_sum:
            raise BadValueError("checksum differs")
    return header


def _write(slot: memoryview, layout: BlockLayout, header: Header) -> None:
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        layout.header_bytes,
        layout.fingerprint,
        header.key,
        header.parent,
        header.num_tokens,
        _SEALED if header.is_sealed else 0,
        header.payload_bytes,
        header.payload_sum,
    )
    tokens = header.tokens
    slot[: _TOKENS_AT + len(tokens)] = fixed + _SUM.pack(_header_sum(fixed, tokens)) + tokens


def _header_sum(fixed: bytes, tokens: bytes) -> int:
    return xxhash.xxh3_64_intdigest(fixed + tokens)
