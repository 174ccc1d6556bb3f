"""One direction of a device's traffic: two streams of our own and a ring of device memory.

Who waits for whom, which is all there is to get right:

* The kernel's stream alone touches pages; a job's fence is put before its first kernel.
* A ring part is ``full`` when its producer has ended, and the consumer waits for that; it is
  ``free`` when its consumer has ended, and the next producer waits for that.  In a load the
  copy engine produces and the kernel consumes, in a store the reverse.
* ``mark`` puts an event behind both streams.

A load's copies into the ring do not wait for the fence: they touch no page.

Threads: the transfer's worker alone, apart from construction and ``drain``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layout import BlockLayout
from .gpu import Event, Gpu, Move
from .pieces import JobTable, Piece, engine_copies, run_bytes, split_at
from .regions import Int64


@dataclass(frozen=True, eq=False)
class PlaneTable:
    """The planes as the kernel reads them.

    Attributes:
        on_device: int64 ``[planes, 4]`` on the device: address, stride, row and offset in words.
        word_bytes: Size of a word: the largest that divides every address, stride and row.
        num_slots: Device slots that there are.
    """

    on_device: Any
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


@dataclass(frozen=True, eq=False)
class DeviceJob:
    """A job whose table is on the device.

    Attributes:
        table: The job.
        on_device: Its packed table, kept until the job has ended.
        bounds: Where chunks of pinned memory begin.
    """

    table: JobTable
    on_device: Any
    bounds: Int64


class Lane:
    """Loads, or stores, of one device."""

    def __init__(self, gpu: Gpu, layout: BlockLayout, ring: tuple[int, int], *, is_load: bool) -> None:
        """Allocate the ring, given as bytes of a part and number of parts."""
        part_bytes, num_parts = ring
        self._gpu = gpu
        self._layout = layout
        self._is_load = is_load
        self.kernels = gpu.stream()
        self.engine = gpu.stream()
        self.part_bytes = part_bytes
        self._ring = gpu.allocate(part_bytes * num_parts, self.kernels)
        self._full = [gpu.event() for _ in range(num_parts)]
        self._free = [gpu.event() for _ in range(num_parts)]
        self._next = 0
        ready = gpu.event()
        ready.record(self.kernels)
        gpu.wait(self.engine, ready)

    def begin(self, table: JobTable, bounds: Int64, fences: Sequence[Event]) -> DeviceJob:
        """Put a job's fences before its first kernel and upload its table behind them."""
        for event in fences:
            self._gpu.wait(self.kernels, event)
        on_device = self._gpu.upload_job(table.spans, table.device_slots, self.kernels)
        return DeviceJob(table, on_device, bounds)

    def submit(self, job: DeviceJob, piece: Piece, planes: PlaneTable, blocks: int) -> None:
        """Queue one piece; returns at once."""
        if not piece.is_staged:
            self._gpu.move(self.kernels, self._move(job, piece, planes, blocks, 0))
            return
        part = self._next
        self._next = (part + 1) % len(self._full)
        address = self._ring.data_ptr() + part * self.part_bytes
        producer, consumer = (self.engine, self.kernels) if self._is_load else (self.kernels, self.engine)
        self._gpu.wait(producer, self._free[part])
        self._fill(job, piece, planes, blocks, address, by_engine=self._is_load)
        self._full[part].record(producer)
        self._gpu.wait(consumer, self._full[part])
        self._fill(job, piece, planes, blocks, address, by_engine=not self._is_load)
        self._free[part].record(consumer)

    def mark(self) -> Event:
        """An event behind all that was submitted."""
        event = self._gpu.event()
        if self._is_load:
            # The kernel consumes what the engine brings: its stream is behind the engine's.
            event.record(self.kernels)
            return event
        event.record(self.kernels)
        self._gpu.wait(self.engine, event)
        last = self._gpu.event()
        last.record(self.engine)
        return last

    def drain(self) -> None:
        """Block until nothing that was submitted moves any more."""
        self._gpu.drain(self.kernels)
        self._gpu.drain(self.engine)

    def _fill(
        self, job: DeviceJob, piece: Piece, planes: PlaneTable, blocks: int, ring: int, *, by_engine: bool
    ) -> None:
        """One half of a staged piece: between host and ring, or between ring and pages."""
        if not by_engine:
            self._gpu.move(self.kernels, self._move(job, piece, planes, blocks, ring))
            return
        copies = split_at(engine_copies(self._layout, job.table, piece), job.bounds)
        for place, host, num_bytes in zip(
            (copies.ring + ring).tolist(), copies.host.tolist(), copies.num_bytes.tolist(), strict=True
        ):
            target, source = (place, host) if self._is_load else (host, place)
            self._gpu.copy(self.engine, target, source, num_bytes)

    def _move(self, job: DeviceJob, piece: Piece, planes: PlaneTable, blocks: int, ring: int) -> Move:
        layout, word = self._layout, planes.word_bytes
        rows = max(plane.row_bytes for plane in layout.planes[piece.first_plane : piece.last_plane])
        longest = int(job.table.spans[piece.first_span : piece.last_span, 3].max())
        return Move(
            planes=planes.on_device.data_ptr(),
            job=job.on_device.data_ptr(),
            slots_at=job.table.slots_at,
            num_slots=planes.num_slots,
            fault_at=job.table.fault_at,
            first_span=piece.first_span,
            first_plane=piece.first_plane,
            num_planes=piece.last_plane - piece.first_plane,
            longest_run=longest * rows // word,
            num_spans=piece.last_span - piece.first_span,
            ring=ring,
            group_words=run_bytes(layout, piece.first_plane, piece.last_plane) // word,
            offset0=layout.plane_offsets[piece.first_plane] // word,
            is_staged=piece.is_staged,
            to_device=self._is_load,
            word_bytes=word,
            blocks=blocks,
        )
