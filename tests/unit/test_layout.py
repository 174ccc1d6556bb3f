"""Layouts: where every byte lies, and what a fingerprint tells apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv_core import BlockLayout, LayoutError, PartLayout, Plane, kv_layout
from flexkv_core.layout import PAGE_BYTES, round_up
from flexkv_core.testing.strategies import layouts

GOLDEN = kv_layout(num_layers=28, row_bytes=2048, block_tokens=64)


def test_golden_fingerprint():
    """Stored values carry it: it changes only with LAYOUT_SCHEMA."""
    assert GOLDEN.fingerprint.hex() == "6c4df3c338098b6c99dc0e51f455bee4"
    assert (GOLDEN.token_bytes, GOLDEN.block_bytes, GOLDEN.slot_bytes) == (114688, 7340032, 7344128)


@given(layouts(), st.data())
def test_planes_tile_the_payload_without_gap_or_overlap(layout, data):
    n = data.draw(st.integers(1, layout.block_tokens))
    at = 0
    for plane, offset in zip(layout.planes, layout.plane_offsets, strict=True):
        assert offset * n == at
        at += plane.row_bytes * n
    assert at == n * layout.token_bytes
    assert layout.value_bytes(n) == layout.header_bytes + at <= layout.slot_bytes


@given(layouts())
def test_slots_are_whole_pages(layout):
    assert layout.header_bytes % PAGE_BYTES == 0
    assert layout.slot_bytes % PAGE_BYTES == 0
    assert 0 <= layout.slot_bytes - layout.value_bytes(layout.block_tokens) < PAGE_BYTES
    assert layout.header_bytes >= 192 + 8 * layout.block_tokens


def test_layers_are_runs():
    """The bytes of layers i..j are one run: planes stand by layer."""
    assert [plane.layer for plane in kv_layout(num_layers=3, row_bytes=8).planes] == [0, 0, 1, 1, 2, 2]


def test_fingerprint_tells_apart_what_changes_bytes():
    others = [
        kv_layout(num_layers=27, row_bytes=2048),
        kv_layout(num_layers=28, row_bytes=1024),
        kv_layout(num_layers=28, row_bytes=(2048, 1024)),
        kv_layout(num_layers=28, row_bytes=(4096,)),
        kv_layout(num_layers=28, row_bytes=2048, block_tokens=32),
        kv_layout(num_layers=28, row_bytes=2048, dtype="float16"),
        BlockLayout(64, 1, (replace(GOLDEN.parts[0], name="swa"),)),
        BlockLayout(64, 1, (GOLDEN.parts[0], PartLayout("index", "uint8", (Plane(0, "index", 128),)))),
    ]
    assert len({layout.fingerprint for layout in (GOLDEN, *others)}) == len(others) + 1


def test_fingerprint_leaves_the_engines_page_out():
    assert kv_layout(num_layers=28, row_bytes=2048, page_tokens=16).fingerprint == GOLDEN.fingerprint


def test_parts_follow_one_another():
    index = PartLayout("index", "uint8", (Plane(0, "index", 12), Plane(1, "index", 12)))
    layout = BlockLayout(4, 1, (kv_layout(num_layers=2, row_bytes=32).parts[0], index))
    assert layout.plane_offsets == (0, 32, 64, 96, 128, 140)
    assert layout.token_bytes == 152
    assert layout.num_layers == 2
    assert "index: 2 planes of uint8" in layout.describe()


@pytest.mark.parametrize(
    ("block", "page", "why"),
    [
        (0, 1, "at least 1"),
        (4, 0, "at least 1"),
        (6, 4, "multiple of the engine's page"),
        (-4, 2, "at least 1"),
    ],
)
def test_impossible_sizes_are_refused(block, page, why):
    with pytest.raises(LayoutError, match=why):
        kv_layout(num_layers=1, row_bytes=8, block_tokens=block, page_tokens=page)


def test_nothing_to_store_is_refused():
    with pytest.raises(LayoutError, match="at least one part"):
        BlockLayout(4, 1, ())
    with pytest.raises(LayoutError, match="at least one plane"):
        kv_layout(num_layers=0, row_bytes=8)


@pytest.mark.parametrize(
    "planes",
    [(Plane(0, "k", 0),), (Plane(0, "k", -8),), (Plane(-1, "k", 8),)],
)
def test_rows_of_no_length_and_negative_layers_are_refused(planes):
    with pytest.raises(LayoutError, match="plane"):
        BlockLayout(4, 1, (PartLayout("kv", "bfloat16", planes),))


def test_parts_of_one_name_are_refused():
    part = GOLDEN.parts[0]
    with pytest.raises(LayoutError, match="kv"):
        BlockLayout(64, 1, (part, part))


def test_three_rows_a_layer_are_refused():
    with pytest.raises(LayoutError, match="row_bytes"):
        kv_layout(num_layers=1, row_bytes=(8, 8, 8))


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up(value, multiple):
    up = round_up(value, multiple)
    assert up % multiple == 0
    assert 0 <= up - value < multiple
