"""The kernels.  The one that matters moves rows between pages and a *linear* side: host slot or ring.

All planes and many blocks go in one launch.  An item of work is a tile of one block's run of one
plane; on the linear side such a run has no gap, so its words are read and written in order.
Imports triton, so import this module only when there is a CUDA device.
"""

# No "from __future__ import annotations": triton reads the annotations, which fix the arguments'
# types so that no value makes it compile again during serving.

import triton
import triton.language as tl

TILE = 2048
"""Words of a tile: 16 KiB in flight for each thread block, enough for PCIe with a few of them."""

NUM_WARPS = 8

SEND_TILE = 1024

SEND_WARPS = 4

PLANE_FIELDS = 4
"""Of one plane in the plane table: address, words from row to row, words of a row, words a token before."""


@triton.jit(  # type: ignore[untyped-decorator] # triton has no types
    do_not_specialize=[
        "planes",
        "job",
        "slots_at",
        "num_slots",
        "fault_at",
        "first_span",
        "first_plane",
        "num_planes",
        "num_chunks",
        "num_items",
        "ring",
        "group_words",
        "offset0",
        "is_staged",
        "to_device",
    ]
)
def move_rows(  # type: ignore[no-untyped-def] # triton allows no return type
    planes: tl.int64,
    job: tl.int64,
    slots_at: tl.int64,
    num_slots: tl.int64,
    fault_at: tl.int64,
    first_span: tl.int32,
    first_plane: tl.int32,
    num_planes: tl.int32,
    num_chunks: tl.int32,
    num_items: tl.int32,
    ring: tl.int64,
    group_words: tl.int64,
    offset0: tl.int64,
    is_staged: tl.int32,
    to_device: tl.int32,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move the rows of ``num_items`` tiles; see ``pieces`` for what the tables hold.

    Args:
        planes: Address of the plane table.
        job: Address of the job's packed table.
        slots_at: Where in it the device slots begin.
        num_slots: The pool's slots; a row outside does not move.
        fault_at: Where in the job's table to put a 1 if there is such a row.
        first_span: First span of the piece.
        first_plane: First plane of the piece.
        num_planes: Its planes.
        num_chunks: Tiles of the longest run.
        num_items: Spans times planes times chunks.
        ring: Address of the ring part, if staged.
        group_words: Words of one token in the planes of the piece.
        offset0: Words of one token before them.
        is_staged: 1 if the linear side is the ring part, 0 if it is the host slots.
        to_device: 1 for a load, 0 for a store.
        WORD: Element type.
        WORD_BYTES: Its size.
        TILE: Words of a tile.
    """
    table = planes.to(tl.pointer_type(tl.int64))
    spans = job.to(tl.pointer_type(tl.int64))
    ring_tokens = tl.load(spans + first_span * 6 + 5)
    place = tl.arange(0, TILE)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        rest = item // num_chunks
        row = table + (first_plane + rest % num_planes) * 4
        base = tl.load(row)
        stride = tl.load(row + 1)
        words = tl.load(row + 2).to(tl.int32)
        offset = tl.load(row + 3)
        span = spans + (first_span + rest // num_planes) * 6
        payload = tl.load(span)
        num_tokens = tl.load(span + 1)
        first = tl.load(span + 2)
        length = tl.load(span + 3)
        slot_at = tl.load(span + 4)
        tokens_before = tl.load(span + 5) - ring_tokens

        word = (item % num_chunks) * TILE + place
        token = word // words
        inside = token < length
        slot = tl.load(spans + slots_at + slot_at + token, mask=inside, other=0)
        at_page = base + (slot * stride + (word - token * words)) * WORD_BYTES
        is_known = (slot >= 0) & (slot < num_slots)
        nowhere = tl.zeros([TILE], tl.int64)
        tl.store(spans + fault_at + nowhere, nowhere + 1, mask=inside & (is_known == 0))
        inside = inside & is_known
        page = at_page.to(tl.pointer_type(WORD))

        in_ring = ring + (tokens_before * group_words - num_tokens * offset0) * WORD_BYTES
        run = tl.where(is_staged != 0, in_ring, payload)
        at_run = run + (num_tokens * offset + first * words + word) * WORD_BYTES
        linear = at_run.to(tl.pointer_type(WORD))
        if to_device != 0:
            tl.store(page, tl.load(linear, mask=inside), mask=inside)
        else:
            tl.store(linear, tl.load(page, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["source", "target", "num_words"])  # type: ignore[untyped-decorator] # as above
def send_words(  # type: ignore[no-untyped-def] # triton allows no return type
    source: tl.int64,
    target: tl.int64,
    num_words: tl.int32,
    TILE: tl.constexpr,
):
    """Copy words, a tile a thread block; host memory may be one side.

    Args:
        source: Address.
        target: Address.
        num_words: How many.
        TILE: Words of a thread block.
    """
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < num_words
    words = tl.load(source.to(tl.pointer_type(tl.int64)) + place, mask=inside)
    tl.store(target.to(tl.pointer_type(tl.int64)) + place, words, mask=inside)
