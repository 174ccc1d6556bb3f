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

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..layout import BlockLayout
from ..transfer import HostSpans
from .regions import Int64
from .rows import SpanTable

SPAN_FIELDS = 6
"""Of one span in ``JobTable.spans``: payload, num_tokens, first, length, slots before it, and tokens
of whole blocks before it."""

_TEMPLATE = 1024
"""Rows of full blocks are made by so many."""


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
        head_bytes: About so much goes first in a store: the link idles while its rows are gathered,
            and then has this to do until the next piece is submitted.
        tail_bytes: About so much goes last in a load, which is over when its rows are in their pages.
    """

    staged_bytes: int
    part_bytes: int
    batch_bytes: int = 64 << 20
    run_bytes: int = 512 << 10
    launch_bytes: int = 16 << 20
    head_bytes: int = 8 << 20
    tail_bytes: int = 8 << 20


class Piece(NamedTuple):
    """What is submitted at once.

    Attributes:
        first_span: First span, in the order of the job's table.
        last_span: One behind the last.
        first_plane: First plane, in the layout's order.
        last_plane: One behind the last.
        is_staged: Through the ring, or directly.
        is_edge: Whether its kernel must be quick: nothing, or only the copy of a small piece, hides it.
        ends_layer: The layer up to which all is in place after this piece; -1 for none.
    """

    first_span: int
    last_span: int
    first_plane: int
    last_plane: int
    is_staged: bool
    is_edge: bool = False
    ends_layer: int = -1


@dataclass(eq=False)
class JobTable:
    """A job's spans as the kernel reads them: whole blocks first.

    Attributes:
        spans: int64 ``[spans, SPAN_FIELDS]``.
        device_slots: int64, in the order in which the job gave them; an array, or a tensor on the device.
        num_tokens: How many they are.
        num_whole: How many of the spans are whole blocks.
        is_pinned: Whether all of the job's host memory is.
        may_cross: Whether a block may lie in two chunks of pinned memory.
    """

    spans: Int64
    device_slots: Any
    num_tokens: int
    num_whole: int
    is_pinned: bool = True
    may_cross: bool = True

    @property
    def slots_at(self) -> int:
        """Where the device slots begin when they stand behind the spans."""
        return self.spans.size

    @property
    def fault_at(self) -> int:
        """Where the word is that tells of a bad device slot: behind them."""
        return self.spans.size + self.num_tokens

    @property
    def num_words(self) -> int:
        """Words of the whole packed table."""
        return self.fault_at + 1

    @cached_property
    def moved(self) -> Sequence[int]:
        """Per span, the tokens that it and those before it move."""
        if self.num_whole == len(self.spans):
            return self.held
        total: list[int] = self.spans[:, 3].cumsum().tolist()
        return total

    @cached_property
    def held(self) -> Sequence[int]:
        """Per span, the tokens of the whole blocks up to and with it."""
        total: list[int] = (self.spans[:, 5] + self.spans[:, 1]).tolist()
        return total

    def tokens(self, first_span: int, last_span: int) -> int:
        """Tokens that these spans move; of none, none."""
        return _between(self.moved, first_span, last_span)


@lru_cache(maxsize=8)
def _full_spans(block_tokens: int, count: int) -> Int64:
    """The spans of full blocks, without their payloads."""
    before = np.arange(count, dtype=np.int64) * block_tokens
    full = np.full(count, block_tokens, dtype=np.int64)
    return np.stack([0 * full, full, 0 * full, full, before, before], axis=1)


def full_table(
    spans: HostSpans, layout: BlockLayout, device_slots: Any, *, is_pinned: bool
) -> JobTable | None:
    """``job_table`` of full blocks in few steps; None where a span is no such block.

    Most jobs are such, and a thread that comes from other work pays for each kind of step, not for
    the length of the arrays.

    Args:
        spans: The spans.
        layout: The blocks' layout.
        device_slots: As many as the spans have tokens.
        is_pinned: Whether the spans' pool is.
    """
    pool, count, size = spans.pool, len(spans.slots), layout.block_tokens
    full = array("q", [size]) * count
    if not count or pool.slot_bytes != layout.slot_bytes or spans.num_tokens != full or spans.last != full:
        return None
    slots = np.frombuffer(spans.slots, dtype=np.int64)
    # A negative number is a huge one: one comparison finds what lies outside on either side.
    if spans.first != array("q", [0]) * count or np.maximum.reduce(slots.view(np.uint64)) >= pool.capacity:
        return None
    table = _full_spans(size, -(-count // _TEMPLATE) * _TEMPLATE)[:count].copy()
    payload = table[:, 0]
    np.multiply(slots, pool.slot_bytes, out=payload)
    payload += pool.region.address + layout.header_bytes
    job = JobTable(table, device_slots, count * size, count, is_pinned, may_cross=False)
    job.held = job.moved = range(size, size * (count + 1), size)
    return job


def job_table(spans: SpanTable, device_slots: Any, *, is_pinned: bool = True) -> JobTable:
    """Put whole blocks first, drop empty spans, and count what stands before each."""
    table = np.empty((len(spans), SPAN_FIELDS), dtype=np.int64)
    payload, num_tokens, first, length, before, held = table.T
    payload[:], num_tokens[:], first[:] = spans.payload, spans.num_tokens, spans.first
    np.subtract(spans.last, spans.first, out=length)
    np.subtract(length.cumsum(), length, out=before)
    is_whole = length == num_tokens
    num_whole = int(np.count_nonzero(is_whole))
    if num_whole < len(table):
        order = np.concatenate([np.flatnonzero(is_whole), np.flatnonzero(~is_whole & (length > 0))])
        table = table[order]
        num_tokens, held = table[:, 1], table[:, 5]
    np.subtract(num_tokens.cumsum(), num_tokens, out=held)
    return JobTable(table, device_slots, len(device_slots), num_whole, is_pinned)


def plane_runs(layout: BlockLayout, layers: range, most_bytes: int) -> list[tuple[int, int]]:
    """The planes of some layers as runs in storage order, each of at most ``most_bytes`` a token.

    A single plane is never cut, whatever its size.
    """
    if len(layers) == layout.num_layers and layout.token_bytes <= most_bytes:
        return [(0, len(layout.planes))]
    runs: list[tuple[int, int]] = []
    offsets = layout.plane_offsets
    for number, plane in enumerate(layout.planes):
        if plane.layer not in layers:
            continue
        first, last = runs[-1] if runs else (number, -1)
        if last == number and offsets[number] + plane.row_bytes - offsets[first] <= most_bytes:
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
    layout: BlockLayout,
    table: JobTable,
    limits: CopyLimits,
    *,
    layerwise: bool,
    can_be_direct: bool,
    ends_small: bool = True,
) -> Iterator[Piece]:
    """A job's pieces in the order of submission.

    Args:
        layout: The blocks' layout.
        table: The job.
        limits: Sizes.
        layerwise: Layers one after another, instead of blocks.
        can_be_direct: Whether a kernel can reach the host slots (they are pinned).
        ends_small: Whether the last staged piece is the small one (a load's: its kernel comes last),
            or the first (a store's: its kernel comes first).
    """
    num_tokens = table.num_tokens
    is_large = num_tokens * layout.token_bytes >= limits.staged_bytes
    groups = layer_groups(layout, num_tokens, limits) if layerwise else [range(layout.num_layers)]
    for layers in groups:
        group_bytes = len(layers) * layout.block_bytes // layout.num_layers
        is_long = not layerwise or 4 * group_bytes >= limits.run_bytes
        staged = len(table.spans) if not can_be_direct else table.num_whole if is_large and is_long else 0
        edges = (not ends_small and layers is groups[0], ends_small and layers is groups[-1])
        last: Piece | None = None
        for piece in chain(
            _staged_pieces(layout, table, layers, limits, staged, edges) if staged else (),
            _direct_pieces(layout, table, layers, limits, staged) if staged < len(table.spans) else (),
        ):
            if last is not None:
                yield last
            last = piece
        if last is not None:
            yield last._replace(ends_layer=layers[-1])


def _staged_pieces(
    layout: BlockLayout,
    table: JobTable,
    layers: range,
    limits: CopyLimits,
    count: int,
    edges: tuple[bool, bool],
) -> Iterator[Piece]:
    """The first ``count`` spans, each piece small enough for a ring part; small at the edges."""
    held = table.held[:count]
    runs = plane_runs(layout, layers, limits.part_bytes // layout.block_tokens)
    for number, (first_plane, last_plane) in enumerate(runs):
        group = run_bytes(layout, first_plane, last_plane)
        most_tokens = limits.part_bytes // group
        head = _head(held, limits.head_bytes // group) if edges[0] and number == 0 else -1
        ends = edges[1] and number == len(runs) - 1
        tail = _tail(held, limits.tail_bytes // group) if ends else count + 1
        at = 0
        for stop in (head, tail, count):
            for first, last in _fill(held, at, min(stop, count), most_tokens):
                is_edge = first <= head or last >= tail
                yield Piece(first, last, first_plane, last_plane, True, is_edge)
            at = max(at, stop)


def _direct_pieces(
    layout: BlockLayout, table: JobTable, layers: range, limits: CopyLimits, begin: int
) -> Iterator[Piece]:
    """The spans from ``begin`` on, each piece of about ``batch_bytes``."""
    for first_plane, last_plane in plane_runs(layout, layers, layout.token_bytes):
        most_tokens = max(1, limits.batch_bytes // run_bytes(layout, first_plane, last_plane))
        for first, last in _fill(table.moved, begin, len(table.spans), most_tokens):
            yield Piece(first, last, first_plane, last_plane, False)


def _between(total: Sequence[int], first: int, last: int) -> int:
    """What the items from ``first`` to ``last`` hold, by running totals."""
    return total[last - 1] - (total[first - 1] if first else 0) if last > first else 0


def _head(total: Sequence[int], most: int) -> int:
    """How many items begin with about ``most``: one at least."""
    return max(1, bisect_right(total, most))


def _tail(total: Sequence[int], most: int) -> int:
    """From which item on about ``most`` is left: the last at least."""
    tail = bisect_left(total, total[-1] - most) + 1 if total[-1] > most else 0
    return min(tail, len(total) - 1)


def _fill(total: Sequence[int], first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Consecutive runs of items that hold at most ``most`` by running totals, or one that holds more."""
    while first < end:
        before = total[first - 1] if first else 0
        last = min(end, max(first + 1, bisect_right(total, before + most)))
        yield first, last
        first = last


def engine_copies(layout: BlockLayout, table: JobTable, piece: Piece, ring: int, *, to_device: bool) -> Int64:
    """What the copy engine moves for a staged piece: a run for a whole block, plane by plane for a part.

    A store thereby writes nothing of a slot but what was asked for.

    Args:
        layout: The blocks' layout.
        table: The job.
        piece: A staged piece.
        ring: Address of the piece in the ring.
        to_device: Whether the ring is the target.

    Returns:
        int64 ``[3, copies]``: targets, sources, bytes.
    """
    spans = table.spans[piece.first_span : piece.last_span]
    if piece.last_span <= table.num_whole:
        return _whole_copies(layout, piece, spans, ring, to_device=to_device)
    is_whole = spans[:, 3] == spans[:, 1]
    group = run_bytes(layout, piece.first_plane, piece.last_plane)
    offset0 = layout.plane_offsets[piece.first_plane]
    start = ring + (spans[:, 5] - spans[0, 5]) * group
    partial, found = spans[~is_whole], []
    if is_whole.any():
        whole = spans[is_whole]
        found.append((start[is_whole], whole[:, 0] + whole[:, 1] * offset0, whole[:, 1] * group))
    for plane in range(piece.first_plane, piece.last_plane):
        row, offset = layout.planes[plane].row_bytes, layout.plane_offsets[plane]
        skipped = partial[:, 2] * row
        place = start[~is_whole] + partial[:, 1] * (offset - offset0) + skipped
        found.append((place, partial[:, 0] + partial[:, 1] * offset + skipped, partial[:, 3] * row))
    place, host, num_bytes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return np.stack([place, host, num_bytes] if to_device else [host, place, num_bytes])


def _whole_copies(layout: BlockLayout, piece: Piece, spans: Int64, ring: int, *, to_device: bool) -> Int64:
    copies = np.empty((3, len(spans)), dtype=np.int64)
    place, host = copies[:2] if to_device else copies[1::-1]
    num_tokens = spans[:, 1]
    np.multiply(spans[:, 5], run_bytes(layout, piece.first_plane, piece.last_plane), out=place)
    place += ring - int(place[0])
    np.multiply(num_tokens, layout.plane_offsets[piece.first_plane], out=host)
    host += spans[:, 0]
    np.multiply(num_tokens, run_bytes(layout, piece.first_plane, piece.last_plane), out=copies[2])
    return copies


def split_at(copies: Int64, bounds: Int64, *, to_device: bool) -> Int64:
    """Cut runs where host memory was pinned in separate chunks: one copy may not span two.

    Args:
        copies: As from ``engine_copies``, each shorter than a chunk.
        bounds: Addresses at which a chunk begins, ascending.
        to_device: Whether host memory is the source.
    """
    host, num_bytes = copies[1 if to_device else 0], copies[2]
    inside = np.searchsorted(bounds, host, side="right")
    cut_at = np.append(bounds, np.iinfo(np.int64).max)[inside]
    head = np.minimum(num_bytes, cut_at - host)
    crossing = head < num_bytes
    if not crossing.any():
        return copies
    rest = copies[:, crossing]
    rest[:2] += head[crossing]
    rest[2] -= head[crossing]
    copies[2] = head
    return np.concatenate([copies, rest], axis=1)
