"""How a job is cut into pieces, and by which way each piece goes.  Pure: arrays in, arrays out.

Two ways lead between pages and host slots.  *Direct*: one kernel reads and writes pinned host
memory itself; best for small jobs and for runs of a block's tokens.  *Staged*: the copy engine
moves whole runs of bytes between host slots and a ring on the device, and a kernel moves rows
between ring and pages; best for large jobs.

In the ring a piece holds its blocks one behind another, each with the planes of the piece only:
for block b of n_b tokens, planes ``first_plane`` and following,
``ring + tokens_before_b * group_bytes + n_b * (offset[p] - offset[first_plane]) + token * row_bytes[p]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layout import BlockLayout
from .regions import Int64
from .rows import SpanTable

SPAN_FIELDS = 6
"""Of one span in ``JobTable.spans``: payload, num_tokens, first, length, slots before it, and tokens
of whole blocks before it."""


@dataclass(frozen=True)
class CopyLimits:
    """What decides about pieces.

    Attributes:
        staged_bytes: Jobs of at least this many bytes are staged.
        part_bytes: Room of one ring part.
        batch_bytes: Most bytes of one launch.
        run_bytes: In layerwise loads, layers are grouped until a block's run has so many bytes:
            shorter runs do not fill the link.
        launch_bytes: ... and until a launch moves so many.
    """

    staged_bytes: int
    part_bytes: int
    batch_bytes: int = 64 << 20
    run_bytes: int = 1 << 20
    launch_bytes: int = 4 << 20


@dataclass(frozen=True)
class Piece:
    """What is submitted at once.

    Attributes:
        first_span: First span, in the order of the job's table.
        last_span: One behind the last.
        first_plane: First plane, in the layout's order.
        last_plane: One behind the last.
        is_staged: Through the ring, or directly.
        ends_layer: The layer up to which all is in place after this piece; -1 for none.
    """

    first_span: int
    last_span: int
    first_plane: int
    last_plane: int
    is_staged: bool
    ends_layer: int = -1


@dataclass(frozen=True, eq=False)
class JobTable:
    """A job's spans as the kernel reads them: whole blocks first.

    Attributes:
        spans: int64 ``[spans, SPAN_FIELDS]``.
        device_slots: int64, in the order in which the job gave them; an array, or a tensor on the device.
        num_whole: How many of the spans are whole blocks.
    """

    spans: Int64
    device_slots: Any
    num_whole: int

    @property
    def slots_at(self) -> int:
        """Where the device slots begin when they stand behind the spans."""
        return self.spans.size

    @property
    def fault_at(self) -> int:
        """Where the word is that tells of a bad device slot: behind them."""
        return self.spans.size + len(self.device_slots)

    def tokens(self, first_span: int, last_span: int) -> int:
        """Tokens that these spans move."""
        return int(self.spans[first_span:last_span, 3].sum())


def job_table(spans: SpanTable, device_slots: Any) -> JobTable:
    """Put whole blocks first, drop empty spans, and count what stands before each."""
    length = spans.last - spans.first
    before = np.cumsum(length) - length
    is_whole = (length == spans.num_tokens) & (length > 0)
    order = np.concatenate([np.flatnonzero(is_whole), np.flatnonzero(~is_whole & (length > 0))])
    num_tokens = spans.num_tokens[order]
    columns = [
        spans.payload[order],
        num_tokens,
        spans.first[order],
        length[order],
        before[order],
        np.cumsum(num_tokens) - num_tokens,
    ]
    return JobTable(np.stack(columns, axis=1), device_slots, int(is_whole.sum()))


def plane_runs(layout: BlockLayout, layers: range, most_bytes: int) -> list[tuple[int, int]]:
    """The planes of some layers as runs in storage order, each of at most ``most_bytes`` a token.

    A single plane is never cut, whatever its size.
    """
    runs: list[tuple[int, int]] = []
    for number, plane in enumerate(layout.planes):
        if plane.layer not in layers:
            continue
        first, last = runs[-1] if runs else (number, -1)
        if last == number and run_bytes(layout, first, number + 1) <= most_bytes:
            runs[-1] = (first, number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def run_bytes(layout: BlockLayout, first_plane: int, last_plane: int) -> int:
    """Bytes of one token in a run of planes."""
    last = layout.planes[last_plane - 1].row_bytes
    return layout.plane_offsets[last_plane - 1] + last - layout.plane_offsets[first_plane]


def layer_groups(layout: BlockLayout, num_tokens: int, limits: CopyLimits) -> list[range]:
    """Layers that become ready together in a layerwise load of ``num_tokens``.

    The first groups are small, so that the forward pass can begin; so are the last, so that
    little is left to compute when the last byte has come.  Those between are as large as the
    link likes.
    """
    num_layers = layout.num_layers
    layer_bytes = max(1, layout.token_bytes // num_layers)
    smallest = -(-limits.launch_bytes // (layer_bytes * max(1, num_tokens)))
    largest = max(smallest, -(-limits.run_bytes // (layer_bytes * layout.block_tokens)))
    groups, at, size = [], 0, smallest
    while at < num_layers:
        left = num_layers - at
        size = min(left, max(smallest, min(size, left // 2)))
        groups.append(range(at, at + size))
        at += size
        size = min(2 * size, largest)
    return groups


def cut(
    layout: BlockLayout, table: JobTable, limits: CopyLimits, *, layerwise: bool, can_be_direct: bool
) -> list[Piece]:
    """A job's pieces in the order of submission.

    Args:
        layout: The blocks' layout.
        table: The job.
        limits: Sizes.
        layerwise: Layers one after another, instead of blocks.
        can_be_direct: Whether a kernel can reach the host slots (they are pinned).
    """
    num_tokens = int(table.spans[:, 3].sum())
    is_large = num_tokens * layout.token_bytes >= limits.staged_bytes
    groups = layer_groups(layout, num_tokens, limits) if layerwise else [range(layout.num_layers)]
    pieces: list[Piece] = []
    for layers in groups:
        group_bytes = len(layers) * layout.token_bytes // layout.num_layers
        long_runs = not layerwise or 2 * group_bytes * layout.block_tokens >= limits.run_bytes
        staged = len(table.spans) if not can_be_direct else table.num_whole if is_large and long_runs else 0
        found = [
            *_staged_pieces(layout, table, layers, limits, staged),
            *_direct_pieces(layout, table, layers, limits, staged),
        ]
        if found:
            found[-1] = _ending(found[-1], layers[-1])
        pieces.extend(found)
    return pieces


def _ending(piece: Piece, layer: int) -> Piece:
    return Piece(
        piece.first_span, piece.last_span, piece.first_plane, piece.last_plane, piece.is_staged, layer
    )


def _staged_pieces(
    layout: BlockLayout, table: JobTable, layers: range, limits: CopyLimits, count: int
) -> Iterator[Piece]:
    """The first ``count`` spans, each piece small enough for a ring part."""
    for first_plane, last_plane in plane_runs(layout, layers, limits.part_bytes // layout.block_tokens):
        most_tokens = limits.part_bytes // run_bytes(layout, first_plane, last_plane)
        for first, last in _fill(table.spans[:count, 1], most_tokens):
            yield Piece(first, last, first_plane, last_plane, is_staged=True)


def _direct_pieces(
    layout: BlockLayout, table: JobTable, layers: range, limits: CopyLimits, begin: int
) -> Iterator[Piece]:
    """The spans from ``begin`` on, each piece of about ``batch_bytes``."""
    for first_plane, last_plane in plane_runs(layout, layers, layout.token_bytes):
        most_tokens = max(1, limits.batch_bytes // run_bytes(layout, first_plane, last_plane))
        for first, last in _fill(table.spans[begin:, 3], most_tokens):
            yield Piece(begin + first, begin + last, first_plane, last_plane, is_staged=False)


def _fill(tokens: Int64, most_tokens: int) -> Iterator[tuple[int, int]]:
    """Consecutive runs of spans that hold at most ``most_tokens``, or one span that holds more."""
    total = np.cumsum(tokens)
    first, count = 0, len(tokens)
    while first < count:
        before = int(total[first] - tokens[first])
        last = int(np.searchsorted(total, before + most_tokens, side="right"))
        last = max(last, first + 1)
        yield first, last
        first = last


@dataclass(frozen=True, eq=False)
class EngineCopies:
    """Runs of bytes for the copy engine, between a ring part and host memory.

    Attributes:
        ring: Offset in the part.
        host: Address.
        num_bytes: Length.
    """

    ring: Int64
    host: Int64
    num_bytes: Int64


def engine_copies(layout: BlockLayout, table: JobTable, piece: Piece) -> EngineCopies:
    """What the copy engine moves for a staged piece: a run for a whole block, plane by plane for a part.

    A store thereby writes nothing of a slot but what was asked for.
    """
    spans = table.spans[piece.first_span : piece.last_span]
    group = run_bytes(layout, piece.first_plane, piece.last_plane)
    offset0 = layout.plane_offsets[piece.first_plane]
    start = (spans[:, 5] - spans[0, 5]) * group
    is_whole = spans[:, 3] == spans[:, 1]
    whole, partial = spans[is_whole], spans[~is_whole]
    ring, host = [start[is_whole]], [whole[:, 0] + whole[:, 1] * offset0]
    num_bytes = [whole[:, 1] * group]
    for plane in range(piece.first_plane, piece.last_plane) if len(partial) else ():
        row, offset = layout.planes[plane].row_bytes, layout.plane_offsets[plane]
        skipped = partial[:, 2] * row
        ring.append(start[~is_whole] + partial[:, 1] * (offset - offset0) + skipped)
        host.append(partial[:, 0] + partial[:, 1] * offset + skipped)
        num_bytes.append(partial[:, 3] * row)
    return EngineCopies(np.concatenate(ring), np.concatenate(host), np.concatenate(num_bytes))


def split_at(copies: EngineCopies, bounds: Int64) -> EngineCopies:
    """Cut runs where host memory was pinned in separate chunks: one copy may not span two.

    Args:
        copies: The runs, each shorter than a chunk.
        bounds: Addresses at which a chunk begins, ascending.
    """
    inside = np.searchsorted(bounds, copies.host, side="right")
    cut_at = np.append(bounds, np.iinfo(np.int64).max)[inside]
    head = np.minimum(copies.num_bytes, cut_at - copies.host)
    tail = copies.num_bytes - head
    crossing = tail > 0
    if not crossing.any():
        return copies
    return EngineCopies(
        np.concatenate([copies.ring, (copies.ring + head)[crossing]]),
        np.concatenate([copies.host, (copies.host + head)[crossing]]),
        np.concatenate([head, tail[crossing]]),
    )
