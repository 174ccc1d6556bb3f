"""How jobs are cut: sizes, order, nothing lost and nothing twice."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv_core.buffers import HostRegion, SlotPool
from flexkv_core.layout import BlockLayout, PartLayout, Plane, kv_layout
from flexkv_core.transfer import CopyJob, HostSpans, PassedFence
from flexkv_core.transfers.engine_copies import engine_copies, split_at
from flexkv_core.transfers.measure import choose
from flexkv_core.transfers.pieces import CopyLimits, cut, layer_groups, plane_runs, run_bytes
from flexkv_core.transfers.pinning import chunk_starts
from flexkv_core.transfers.plane_table import plane_rows, word_size
from flexkv_core.transfers.rows import SpanTable, read_spans
from flexkv_core.transfers.tables import full_table, job_table

QWEN = kv_layout(num_layers=36, row_bytes=2048, block_tokens=64)


def test_layers_come_in_small_groups_at_both_ends() -> None:
    limits = CopyLimits(staged_bytes=0, part_bytes=32 << 20)
    sizes = [len(group) for group in layer_groups(QWEN, 16_384, limits)]
    assert sizes == [1, *[2] * 16, 1, 1, 1]
    assert [len(group) for group in layer_groups(QWEN, 512, limits)] == [8, 8, 8, 8, 4]


@given(layers=st.integers(1, 80), row=st.integers(1, 4096), tokens=st.integers(0, 40_000))
def test_every_layer_is_in_one_group(layers: int, row: int, tokens: int) -> None:
    layout = kv_layout(num_layers=layers, row_bytes=row)
    groups = layer_groups(layout, tokens, CopyLimits(0, 1 << 20))
    assert [layer for group in groups for layer in group] == list(range(layers))


def test_planes_of_a_layer_may_stand_apart() -> None:
    parts = (
        PartLayout(
            "kv", "bfloat16", (Plane(0, "k", 8), Plane(0, "v", 8), Plane(1, "k", 8), Plane(1, "v", 8))
        ),
        PartLayout("index", "uint8", (Plane(0, "index", 4), Plane(1, "index", 4))),
    )
    layout = BlockLayout(4, 1, parts)
    assert plane_runs(layout, range(1), 1000) == [(0, 2), (4, 5)]
    assert plane_runs(layout, range(2), 1000) == [(0, 6)]
    assert plane_runs(layout, range(2), 16) == [(0, 2), (2, 4), (4, 6)]
    assert plane_runs(layout, range(2), 1) == [(at, at + 1) for at in range(6)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[BlockLayout, SpanTable]:
    layout = kv_layout(
        num_layers=draw(st.integers(1, 6)),
        row_bytes=draw(st.lists(st.integers(1, 40), min_size=1, max_size=2)),
        block_tokens=draw(st.integers(1, 8)),
    )
    rows = []
    for number in range(draw(st.integers(0, 12))):
        num_tokens = draw(st.integers(1, layout.block_tokens))
        first = draw(st.integers(0, num_tokens))
        rows.append((10_000 * (number + 1), num_tokens, first, draw(st.integers(first, num_tokens))))
    return layout, SpanTable(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


@given(
    job=jobs(),
    staged=st.sampled_from([0, 500, 1 << 60]),
    batch=st.integers(1, 3000),
    part=st.integers(400, 3000),
    edge=st.integers(0, 900),
    ends_small=st.booleans(),
    layerwise=st.booleans(),
    direct=st.booleans(),
)
def test_each_row_is_in_one_piece(
    job: tuple[BlockLayout, SpanTable],
    staged: int,
    batch: int,
    part: int,
    edge: int,
    ends_small: bool,
    layerwise: bool,
    direct: bool,
) -> None:
    layout, spans = job
    table = job_table(spans, np.arange(int((spans.last - spans.first).sum())))
    limits = CopyLimits(
        staged, part, batch, run_bytes=300, launch_bytes=200, head_bytes=edge, tail_bytes=edge
    )
    seen = np.zeros((len(table.spans), len(layout.planes)), dtype=int)
    ended = -1
    for piece in cut(layout, table, limits, layerwise=layerwise, can_be_direct=direct, ends_small=ends_small):
        assert piece.is_staged or direct
        seen[piece.first_span : piece.last_span, piece.first_plane : piece.last_plane] += 1
        if piece.is_staged:
            blocks = table.spans[piece.first_span : piece.last_span]
            assert blocks[:, 1].sum() * run_bytes(layout, piece.first_plane, piece.last_plane) <= part
        if piece.ends_layer >= 0:
            assert piece.ends_layer > ended
            ended = piece.ends_layer
            ready = [number for number, plane in enumerate(layout.planes) if plane.layer <= ended]
            assert (seen[:, ready] == 1).all()
    assert (seen == 1).all()
    assert sorted(table.spans[:, 0].tolist()) == spans.payload[spans.last > spans.first].tolist()


@given(
    slots=st.lists(st.integers(-1, 6), max_size=9),
    tokens=st.sampled_from([4, 3]),
    first=st.sampled_from([0, 1]),
    wider=st.sampled_from([0, 4096]),
)
def test_full_blocks_are_read_in_few_steps(slots: list[int], tokens: int, first: int, wider: int) -> None:
    layout = kv_layout(num_layers=1, row_bytes=8, block_tokens=4)
    region = HostRegion(6 * (layout.slot_bytes + wider))
    pool = SlotPool(region, layout.slot_bytes + wider)
    count = len(slots)
    spans = HostSpans(pool, slots, [tokens] * count, [first] * count, [tokens] * count)
    found = full_table(spans, layout, None, is_pinned=True)
    is_full = bool(slots) and tokens == 4 and not first and not wider
    if not (is_full and min(slots) >= 0 and max(slots) < 6):
        assert found is None
    else:
        job = CopyJob(1, spans, array("q", range(4 * count)), PassedFence())
        wanted = job_table(read_spans(job, layout), np.arange(4 * count))
        assert found is not None
        np.testing.assert_array_equal(found.spans, wanted.spans)
        assert list(found.moved) == list(found.held) == wanted.held == wanted.moved
        assert (found.num_tokens, found.num_whole) == (4 * count, count)
        assert not found.may_cross
    del spans, pool
    region.close()


@pytest.mark.parametrize(
    ("count", "ends_small", "wanted"),
    [
        (8, True, [7, 1]),
        (8, False, [1, 7]),
        (64, True, [7, 7, 7, 7, 7, 7, 7, 7, 7, 1]),
        (64, False, [1, 7, 7, 7, 7, 7, 7, 7, 7, 7]),
        (2, True, [1, 1]),
        (1, True, [1]),
        (1, False, [1]),
    ],
)
def test_stores_begin_with_a_small_piece_and_loads_end_with_one(
    count: int, ends_small: bool, wanted: list[int]
) -> None:
    full = np.full(count, 64)
    table = job_table(SpanTable(np.arange(count) << 24, full, 0 * full, full), np.arange(64 * count))
    limits = CopyLimits(0, 64 << 20)
    pieces = list(cut(QWEN, table, limits, layerwise=False, can_be_direct=True, ends_small=ends_small))
    assert [piece.last_span - piece.first_span for piece in pieces] == wanted
    edges = {len(pieces) - 2, len(pieces) - 1} if ends_small else {0, 1}
    assert [piece.is_edge for piece in pieces] == [at in edges for at in range(len(pieces))]


def test_whole_blocks_are_one_run_each_and_parts_one_run_a_plane() -> None:
    layout = kv_layout(num_layers=2, row_bytes=(4, 2), block_tokens=8)
    spans = SpanTable(*np.array([[1000, 8, 0, 8], [2000, 5, 0, 5], [3000, 8, 2, 4]], dtype=np.int64).T)
    table = job_table(spans, np.arange(15))
    limits = CopyLimits(0, 1 << 20)
    (piece,) = cut(layout, table, limits, layerwise=False, can_be_direct=False)
    host = [1000, 2000, 3008, 3036, 3056, 3084]
    ring = [0, 96, 164, 192, 212, 240]
    num_bytes = [96, 60, 8, 4, 8, 4]
    load = engine_copies(layout, table, piece, 7000, to_device=True)
    assert load.tolist() == [[7000 + at for at in ring], host, num_bytes]
    store = engine_copies(layout, table, piece, 0, to_device=False)
    assert store.tolist() == [host, ring, num_bytes]


def test_a_run_is_cut_where_pinned_chunks_meet() -> None:
    copies = np.array([[0, 50], [90, 200], [20, 50]])
    assert split_at(copies, np.empty(0, dtype=np.int64), to_device=True) is copies
    found = split_at(copies.copy(), chunk_starts(0, 300, 100), to_device=True)
    assert found.tolist() == [[0, 50, 10], [90, 200, 100], [10, 50, 10]]
    store = split_at(copies[[1, 0, 2]], chunk_starts(0, 300, 100), to_device=False)
    assert store.tolist() == [[90, 200, 100], [0, 50, 10], [10, 50, 10]]


def test_the_word_divides_all_that_is_added_to_an_address() -> None:
    assert word_size([16, 2048]) == 8
    assert word_size([4, 2048]) == 4
    assert word_size([0, 7]) == 1
    table, word = plane_rows(kv_layout(num_layers=1, row_bytes=(96, 36)), [64, 4096], [96, 100])
    assert word == 4
    assert table.tolist() == [[64, 24, 24, 0], [4096, 25, 9, 24]]


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        (((4, 50.0, 20.0), (16, 50.0, 50.0), (64, 50.0, 53.0)), 16),
        (((4, 50.0, 60.0), (16, 50.0, 40.0), (64, 50.0, 53.0)), 64),
        (((4, 50.0, 20.0), (64, 50.0, 48.0)), 128),
        (((4, 50.0, 20.0), (64, 50.0, 49.0)), 64),
    ],
)
def test_the_threshold_is_where_staging_stops_losing(
    rates: tuple[tuple[int, float, float], ...], wanted: int
) -> None:
    assert choose(rates) == wanted
