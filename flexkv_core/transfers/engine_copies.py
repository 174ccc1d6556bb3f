"""What the copy engine moves for a staged piece, as arrays of addresses and lengths.  Pure."""

from __future__ import annotations

import numpy as np

from ..layout import BlockLayout
from .pieces import Piece, run_bytes
from .regions import Int64
from .tables import JobTable


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
