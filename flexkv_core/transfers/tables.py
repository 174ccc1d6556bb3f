"""A job as the kernel reads it: its spans, whole blocks first, and running totals over them.

Pure: arrays in, arrays out, no loop over tokens or pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

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


def _between(total: Sequence[int], first: int, last: int) -> int:
    """What the items from ``first`` to ``last`` hold, by running totals."""
    return total[last - 1] - (total[first - 1] if first else 0) if last > first else 0
