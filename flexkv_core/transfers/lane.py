"""One direction of a device's traffic: two streams of our own and a ring of device memory.

Who waits for whom, which is all there is to get right:

* The kernels' stream alone touches pages; a job's fences are put before its first kernel.
* A piece in the ring is *full* when its producer has ended, and the consumer waits for that; its
  place is *free* when its consumer has ended, and the next producer there waits for that.  In a
  load the copy engine produces and the kernel consumes, in a store the reverse.
* ``mark`` puts an event behind both streams.

A load's copies into the ring do not wait for the fence: they touch no page.

Threads: one at a time submits (see ``worker``), and owns ``_submitted``; ``finish`` is called by the
direction's waiter, which owns ``_finished``; ``_tables`` is a deque, which both may use; ``drain``
is for any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ..layout import BlockLayout
from .engine_copies import engine_copies, split_at
from .gpu import Event, Gpu, Move, Stream, Table
from .pieces import Piece, run_bytes
from .plane_table import PlaneTable
from .regions import Int64
from .ring import Ring
from .tables import JobTable

_KEPT_TABLES = 4
_KEPT_WORDS = 40_000
"""Of a table that is kept for the next job: enough for 36,000 tokens in blocks of 64."""

_DEEP = 12
"""Pieces under way from which on the driver's queue may be full.  Seen on an H200: it takes some fifty."""


@dataclass(eq=False)
class DeviceJob:
    """A job under way.

    Attributes:
        table: The job.
        planes: Between whose pages.
        fences: Gives what its first kernel waits for.
        bounds: Where chunks of pinned memory begin; None if no block crosses one.
        waits: What ``fences`` gave, once the job is read.
        slots: Device slots in a tensor on the device.
        on_device: Its packed table, from then to the job's end.
        is_open: Whether that has been sent.
        opened: Of a load, behind all that its first kernel waits for; timed.
        is_staged: Whether a piece went through the ring.
        num_pieces: Pieces submitted.
    """

    table: JobTable
    planes: PlaneTable
    fences: Callable[[], Sequence[Event]]
    bounds: Int64 | None
    waits: Sequence[Event] = ()
    slots: torch.Tensor | None = None
    on_device: Table | None = None
    is_open: bool = False
    opened: Event | None = None
    is_staged: bool = False
    num_pieces: int = 0


class Lane:
    """Loads, or stores, of one device."""

    def __init__(self, gpu: Gpu, layout: BlockLayout, ring: tuple[int, int], *, is_load: bool) -> None:
        """Allocate the ring, given as bytes of a part and number of parts; a piece fills at most a part."""
        part_bytes, num_parts = ring
        self._gpu = gpu
        self._layout = layout
        self.is_load = is_load
        self.kernels = gpu.stream()
        self.engine = gpu.stream()
        self.part_bytes = part_bytes
        self.ring_bytes = part_bytes * num_parts
        self._memory = gpu.allocate(self.ring_bytes, self.kernels)
        self._ring = Ring(self.ring_bytes, gpu.event)
        self._full = gpu.event()
        self._tables = deque(gpu.table(_KEPT_WORDS, self.kernels) for _ in range(_KEPT_TABLES))
        self._widest = max(plane.row_bytes for plane in layout.planes)
        self.last_bytes = 0
        """Of the last piece, if it was staged."""
        self._submitted = 0
        self._finished = 0
        self._engine_is_behind = True
        """Whether the engine's stream is behind all kernels; a store's are, a direct store's are not."""
        ready = gpu.event()
        ready.record(self.kernels)
        gpu.wait(self.engine, ready)

    @property
    def is_shallow(self) -> bool:
        """Whether so little is under way that submitting more cannot block."""
        return self._submitted - self._finished < _DEEP

    def begin(
        self, table: JobTable, planes: PlaneTable, fences: Callable[[], Sequence[Event]], bounds: Int64
    ) -> DeviceJob:
        """Make a job.  It is read by its first kernel, or by ``read`` before it has to wait.  Any thread.

        Args:
            table: The job.
            planes: The pool.
            fences: Gives what the first kernel waits for.
            bounds: Where chunks of pinned memory begin, ascending.
        """
        may_cross = table.may_cross and len(bounds) > 1 and _crosses(self._layout, table, bounds)
        return DeviceJob(table, planes, fences, bounds if may_cross else None)

    def read(self, job: DeviceJob) -> None:
        """Take the job's fences and arrays over from the caller.  Any thread, once."""
        table = job.table
        job.waits = job.fences()
        slots, table.device_slots = table.device_slots, None
        if table.num_words <= _KEPT_WORDS:
            with suppress(IndexError):
                job.on_device = self._tables.popleft()
        if job.on_device is None:
            job.on_device = self._gpu.table(max(table.num_words, _KEPT_WORDS), self.kernels)
        host, start = job.on_device.host, table.slots_at
        host[:start] = table.spans.reshape(-1)
        if isinstance(slots, torch.Tensor):
            job.slots = slots
        else:
            host[start : table.fault_at] = slots
        host[table.fault_at] = 0

    def submit(self, job: DeviceJob, piece: Piece, blocks: int) -> None:
        """Queue one piece, with so many thread blocks for its kernel."""
        may_block = not self.is_shallow
        job.num_pieces += 1
        self._submitted += 1
        self.last_bytes = 0
        if not piece.is_staged:
            self._move(job, piece, blocks, 0, may_block=may_block)
            self._engine_is_behind = False
            return
        job.is_staged = True
        group = run_bytes(self._layout, piece.first_plane, piece.last_plane)
        held = job.table.held
        size = held[piece.last_span - 1] - (held[piece.first_span - 1] if piece.first_span else 0)
        self.last_bytes = size * group
        at, behind = self._ring.place(self.last_bytes)
        place = self._memory.data_ptr() + at
        if self.is_load:
            self._wait(self.engine, behind)
            self._copy(job, piece, place, may_block=may_block)
            self._full.record(self.engine)
            self._gpu.wait(self.kernels, self._full)
            self._move(job, piece, blocks, place, may_block=may_block)
            self._ring.keep().record(self.kernels)
            return
        self._wait(self.kernels, behind)
        self._move(job, piece, blocks, place, may_block=may_block)
        self._full.record(self.kernels)
        self._gpu.wait(self.engine, self._full)
        self._copy(job, piece, place, may_block=may_block)
        self._ring.keep().record(self.engine)
        self._engine_is_behind = True

    def mark(self, *, timed: bool = False) -> Event:
        """An event behind all that was submitted."""
        event = self._gpu.event(timed=timed)
        if self.is_load:
            # The kernel consumes what the engine brings: its stream is behind the engine's.
            event.record(self.kernels)
            return event
        if not self._engine_is_behind:
            self._full.record(self.kernels)
            self._gpu.wait(self.engine, self._full)
            self._engine_is_behind = True
        event.record(self.engine)
        return event

    def finish(self, job: DeviceJob) -> None:
        """The job's last event has passed: its table can serve another."""
        self._finished += job.num_pieces
        table, job.on_device = job.on_device, None
        if table is not None and len(table.host) == _KEPT_WORDS and len(self._tables) < _KEPT_TABLES:
            self._tables.append(table)

    def forget(self, job: DeviceJob) -> None:
        """A job whose submission failed: it will not be finished."""
        self._submitted -= job.num_pieces

    def drain(self) -> None:
        """Block until nothing that was submitted moves any more."""
        self._gpu.drain(self.kernels)
        self._gpu.drain(self.engine)

    def _wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._gpu.wait(stream, event)

    def _copy(self, job: DeviceJob, piece: Piece, place: int, *, may_block: bool) -> None:
        """The engine's half of a staged piece: between host and ring."""
        table = job.table
        may_block = may_block or not table.is_pinned
        if (
            piece.last_span - piece.first_span == 1
            and piece.last_span <= table.num_whole
            and job.bounds is None
        ):
            num_tokens = int(table.spans[piece.first_span, 1])
            at = int(table.spans[piece.first_span, 0])
            at += num_tokens * self._layout.plane_offsets[piece.first_plane]
            size = num_tokens * run_bytes(self._layout, piece.first_plane, piece.last_plane)
            target, source = (place, at) if self.is_load else (at, place)
            self._gpu.copy_run(self.engine, target, source, size, may_block=may_block)
            return
        copies = engine_copies(self._layout, job.table, piece, place, to_device=self.is_load)
        if job.bounds is not None:
            copies = split_at(copies, job.bounds, to_device=self.is_load)
        self._gpu.copy(self.engine, copies, is_pinned=job.table.is_pinned, may_block=may_block)

    def _open(self, job: DeviceJob, *, may_block: bool) -> None:
        """Before a job's first kernel: its fences, and its table behind them."""
        if job.on_device is None:
            self.read(job)
        assert job.on_device is not None
        job.is_open = True
        for event in job.waits:
            self._gpu.wait(self.kernels, event)
        if self.is_load:
            job.opened = self._gpu.event(timed=True)
            job.opened.record(self.kernels)
        self._gpu.send(self.kernels, job.on_device, job.table.num_words, may_block=may_block)
        if job.slots is not None:
            self._gpu.put(self.kernels, job.on_device, job.table.slots_at, job.slots)

    def _move(self, job: DeviceJob, piece: Piece, blocks: int, ring: int, *, may_block: bool) -> None:
        """Queue the kernel of a piece."""
        if not job.is_open:
            self._open(job, may_block=may_block)
        on_device = job.on_device
        assert on_device is not None
        layout, word, table = self._layout, job.planes.word_bytes, job.table
        move = Move(
            planes=job.planes.on_device.data_ptr(),
            job=on_device.data_ptr(),
            slots_at=table.slots_at,
            num_slots=job.planes.num_slots,
            fault_at=table.fault_at,
            first_span=piece.first_span,
            first_plane=piece.first_plane,
            num_planes=piece.last_plane - piece.first_plane,
            longest_run=layout.block_tokens * self._widest // word,
            num_spans=piece.last_span - piece.first_span,
            ring=ring,
            group_words=run_bytes(layout, piece.first_plane, piece.last_plane) // word,
            offset0=layout.plane_offsets[piece.first_plane] // word,
            is_staged=piece.is_staged,
            to_device=self.is_load,
            word_bytes=word,
            blocks=blocks,
        )
        self._gpu.move(self.kernels, move, may_block=may_block)


def _crosses(layout: BlockLayout, table: JobTable, bounds: Int64) -> bool:
    """Whether a block lies in two chunks."""
    first = table.spans[:, 0]
    last = first + table.spans[:, 1] * layout.token_bytes - 1
    return bool((bounds.searchsorted(first, "right") != bounds.searchsorted(last, "right")).any())
