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

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ..layout import BlockLayout
from .tables import JobTable


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
