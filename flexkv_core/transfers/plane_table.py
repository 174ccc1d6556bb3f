"""The pool's planes as the kernel reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..layout import BlockLayout
from .gpu import Gpu, Stream, Table
from .regions import Int64


@dataclass(frozen=True, eq=False)
class PlaneTable:
    """The planes as the kernel reads them.

    Attributes:
        on_device: int64 ``[planes, 4]`` on the device: address, stride, row and offset in words.
        word_bytes: Size of a word: the largest that divides every address, stride and row.
        num_slots: Device slots that there are.
    """

    on_device: Table
    word_bytes: int
    num_slots: int


def word_size(numbers: Sequence[int]) -> int:
    """The largest of 8, 4, 2, 1 that divides all ``numbers``."""
    return int(np.gcd.reduce(np.array([8, *numbers], dtype=np.int64)))


def plane_rows(layout: BlockLayout, addresses: Sequence[int], strides: Sequence[int]) -> tuple[Int64, int]:
    """The plane table's content and its word size, from the planes' addresses and strides in bytes."""
    rows = [plane.row_bytes for plane in layout.planes]
    word = word_size([*addresses, *strides, *rows])
    table = np.array([addresses, strides, rows, layout.plane_offsets], dtype=np.int64).T.copy()
    table[:, 1:] //= word
    return table, word


def send_planes(gpu: Gpu, stream: Stream, rows: Int64) -> Table:
    """The plane table on the device, for good."""
    table = gpu.table(rows.size, stream)
    table.host[:] = rows.reshape(-1)
    gpu.send(stream, table, rows.size, may_block=True)
    gpu.drain(stream)
    return table
