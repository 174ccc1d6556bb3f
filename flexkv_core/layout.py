"""What one block's bytes mean, and the fingerprint that names this meaning.

A block is a *group of named parts* (today one part, the main KV; later sliding-window,
state or indexer buffers beside it): a block is visible only when all its parts are there.
A part is a list of *planes*: one plane is one layer's K, or V, or latent rows.  Inside a
block the planes follow one another, layer by layer, and each plane holds its tokens' rows
without a gap, so the bytes of layers ``i..j`` are one run and a partly filled block is
simply shorter:

    payload of n tokens = part 0 [plane 0: n rows][plane 1: n rows]... part 1 ...

A host slot holds one stored value: a header (see ``envelope``), then the payload, padded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256

from .errors import LayoutError

PAGE_BYTES = 4096
"""Headers, payloads and slots are multiples of this, as direct I/O wants them."""

HEADER_FIXED_BYTES = 192
LAYOUT_SCHEMA = 1


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Plane:
    """One layer's rows of one kind.

    Attributes:
        layer: Number of the layer inside this rank's stage, from 0.
        kind: ``k``, ``v`` or ``latent`` (other parts add their own).
        row_bytes: Bytes of one token's row.
    """

    layer: int
    kind: str
    row_bytes: int


@dataclass(frozen=True)
class PartLayout:
    """One named buffer group of a block.

    Attributes:
        name: ``kv`` for the main cache.
        dtype: Element type, as torch names it without the prefix (``bfloat16``).
        planes: In storage order, which is by layer.
    """

    name: str
    dtype: str
    planes: tuple[Plane, ...]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all planes of this part."""
        return sum(plane.row_bytes for plane in self.planes)


@dataclass(frozen=True)
class BlockLayout:
    """How a block of tokens lies in a host slot.

    Attributes:
        block_tokens: Tokens in a full block.
        page_tokens: The engine's page: a hit is a multiple of it; divides ``block_tokens``.
        parts: The named buffer groups.
    """

    block_tokens: int
    page_tokens: int
    parts: tuple[PartLayout, ...]

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.page_tokens < 1:
            raise LayoutError("block_tokens and page_tokens must be at least 1")
        if self.block_tokens % self.page_tokens:
            raise LayoutError(
                f"block_tokens ({self.block_tokens}) must be a multiple of the engine's "
                f"page size ({self.page_tokens})"
            )
        if not self.parts or not all(part.planes for part in self.parts):
            raise LayoutError("a layout needs at least one part, and a part at least one plane")
        for plane in (plane for part in self.parts for plane in part.planes):
            if plane.layer < 0 or plane.row_bytes < 1:
                raise LayoutError(f"a plane needs a layer from 0 and rows of at least one byte: {plane}")
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise LayoutError(f"parts need names of their own: {', '.join(names)}")

    @cached_property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return sum(part.token_bytes for part in self.parts)

    @cached_property
    def block_bytes(self) -> int:
        """KV bytes of a full block."""
        return self.token_bytes * self.block_tokens

    @cached_property
    def header_bytes(self) -> int:
        """Room before the payload."""
        return round_up(HEADER_FIXED_BYTES + 8 * self.block_tokens, PAGE_BYTES)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a host slot: header and full payload, padded."""
        return self.header_bytes + round_up(self.block_bytes, PAGE_BYTES)

    def value_bytes(self, num_tokens: int) -> int:
        """Bytes of the stored value of a block with ``num_tokens`` tokens."""
        return self.header_bytes + num_tokens * self.token_bytes

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """All planes of all parts, in storage order."""
        return tuple(plane for part in self.parts for plane in part.planes)

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """Per plane the bytes *per token* before it: times n gives its place in a block of n."""
        offsets, at = [], 0
        for plane in self.planes:
            offsets.append(at)
            at += plane.row_bytes
        return tuple(offsets)

    @cached_property
    def num_layers(self) -> int:
        """Layers that the parts speak of."""
        return 1 + max(plane.layer for plane in self.planes)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that name this layout; equal fingerprints mean interchangeable bytes.

        The engine's page size is left out: it does not change a block's bytes.
        """
        meaning = {
            "schema": LAYOUT_SCHEMA,
            "block_tokens": self.block_tokens,
            "parts": [asdict(part) for part in self.parts],
        }
        return sha256(json.dumps(meaning, sort_keys=True).encode()).digest()[:16]

    def describe(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{part.name}: {len(part.planes)} planes of {part.dtype}" for part in self.parts)
        return (
            f"{self.block_tokens} tokens a block, {self.token_bytes} B a token, "
            f"{self.slot_bytes} B a slot ({parts}), fingerprint {self.fingerprint.hex()[:12]}"
        )


def kv_layout(
    *,
    num_layers: int,
    row_bytes: Sequence[int] | int,
    block_tokens: int = 64,
    page_tokens: int = 1,
    dtype: str = "bfloat16",
) -> BlockLayout:
    """A layout with one part of ``num_layers`` equal layers.

    Args:
        num_layers: Layers of this rank's stage.
        row_bytes: Bytes of one token's K and V row, or of its one latent row.
        block_tokens: Tokens in a block.
        page_tokens: The engine's page size.
        dtype: Element type.
    """
    rows = (row_bytes, row_bytes) if isinstance(row_bytes, int) else tuple(row_bytes)
    if len(rows) not in (1, 2):
        raise LayoutError(f"row_bytes must give a K and a V row or one latent row, got {len(rows)} rows")
    kinds = ("k", "v") if len(rows) == 2 else ("latent",)
    planes = tuple(
        Plane(layer, kind, size)
        for layer in range(num_layers)
        for kind, size in zip(kinds, rows, strict=True)
    )
    return BlockLayout(block_tokens, page_tokens, (PartLayout("kv", dtype, planes),))
