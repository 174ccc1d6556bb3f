"""One direction's copies: submitted piece by piece, counted while they are under way, finished.

Threads: whoever submits (see ``worker``) runs ``steps``, one thread at a time; the waiter's thread
finishes tickets.  ``_in_flight`` is under ``_lock``, which is held for an addition only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from time import perf_counter

from ..errors import TransferError
from ..layout import BlockLayout
from .cuda_ticket import CudaTicket
from .gpu import Event, Gpu
from .lane import DeviceJob, Lane
from .pieces import CopyLimits, Piece, cut, run_bytes
from .waiter import EventWaiter

_log = logging.getLogger(__name__)

NEVER = 1 << 62

_SHORT = 0.1
"""Of a load's time: a wait that makes no difference to its speed."""


class Way:
    """Loads, or stores, of one device.

    Attributes:
        lane: Where they are submitted.
        waiter: Who waits for their ends.
        limits: How they are cut.
        is_load: Which of the two.
    """

    def __init__(
        self,
        gpu: Gpu,
        layout: BlockLayout,
        lane: Lane,
        waiter: EventWaiter,
        limits: CopyLimits,
        *,
        is_load: bool,
        window_bytes: int | None,
        blocks: tuple[int, int, int],
        wake: Callable[[], None],
    ) -> None:
        """Put together.

        Args:
            gpu: The device.
            layout: The blocks' layout.
            lane: Streams and ring.
            waiter: Not started yet.
            limits: How copies are cut.
            is_load: Which direction.
            window_bytes: Most bytes under way at once; None for no limit.
            blocks: Thread blocks of a direct piece, of a staged one, and of a staged one at an edge.
            wake: Called when there may be room again.
        """
        self.lane, self.waiter, self.limits, self.is_load = lane, waiter, limits, is_load
        self._gpu, self._layout, self._wake = gpu, layout, wake
        self._window_bytes = NEVER if window_bytes is None else window_bytes
        self._is_limited = window_bytes is not None
        self._blocks = blocks
        self._lock = threading.Lock()
        self._in_flight = 0
        self._is_fault_told = False

    @property
    def has_room(self) -> bool:
        """Whether another piece may be submitted.  Locks nothing."""
        return self._in_flight < self._window_bytes

    def steps(self, ticket: CudaTicket, job: DeviceJob) -> Iterator[None]:
        """Submit a copy, a piece a step; the last step queues its end with the waiter."""
        began = perf_counter()
        layerwise = self.is_load and ticket.job.layerwise
        pieces = cut(
            self._layout,
            job.table,
            self.limits,
            layerwise=layerwise,
            can_be_direct=job.table.is_pinned,
            ends_small=self.is_load,
        )
        try:
            left = yield from self._submit(ticket, job, pieces, layerwise=layerwise)
            last = self.lane.mark(timed=self.is_load)
        except BaseException:  # an interrupt too: the engine's thread may be the one that submits
            self.lane.forget(job)
            raise
        self._count(left)
        ticket.mark_layer(self._layout.num_layers - 1, last)
        self.waiter.put(last, partial(self._finish, ticket, began, (job, last), left))

    def _submit(
        self, ticket: CudaTicket, job: DeviceJob, pieces: Iterator[Piece], *, layerwise: bool
    ) -> Generator[None, None, int]:
        """Pauses between pieces, not after the last.  Returns the bytes since the last mark."""
        unmarked = 0
        piece = next(pieces, None)
        while piece is not None:
            self.lane.submit(job, piece, self._blocks[1 + piece.is_edge if piece.is_staged else 0])
            coming = next(pieces, None)
            tokens = job.table.tokens(piece.first_span, piece.last_span)
            unmarked += tokens * run_bytes(self._layout, piece.first_plane, piece.last_plane)
            if coming is None:
                break
            layer = piece.ends_layer if layerwise else -1
            if layer >= 0 or 4 * unmarked >= self._window_bytes:
                self._mark(ticket, layer, unmarked)
                unmarked = 0
            yield
            piece = coming
        return unmarked

    def _mark(self, ticket: CudaTicket, layer: int, num_bytes: int) -> None:
        """Have somebody told when all that was submitted has ended."""
        mark = self.lane.mark()
        if layer >= 0:
            ticket.mark_layer(layer, mark)
        self._count(num_bytes)
        self.waiter.put(mark, partial(self._passed, ticket, layer, num_bytes))

    def _count(self, num_bytes: int) -> None:
        if self._is_limited:
            with self._lock:
                self._in_flight += num_bytes

    def _leave(self, num_bytes: int) -> None:
        if self._is_limited:
            self._count(-num_bytes)
            self._wake()

    def _passed(self, ticket: CudaTicket, layer: int, num_bytes: int, fault: Exception | None) -> None:
        """A mark has passed.  On the waiter's thread."""
        if layer >= 0 and fault is None:
            ticket.finish_layer(layer)
        self._leave(num_bytes)

    def _finish(
        self,
        ticket: CudaTicket,
        began: float,
        ended: tuple[DeviceJob, Event],
        num_bytes: int,
        fault: Exception | None,
    ) -> None:
        """A job's last event has passed; it kept its table until now.  On the waiter's thread."""
        (job, last), seconds, number = ended, perf_counter() - began, ticket.job.number
        error = None
        unchecked = job.on_device if job.slots is not None else None
        try:
            if fault is None and unchecked is not None and self._gpu.word(unchecked, job.table.fault_at):
                why = "device slots beyond the pool; their rows did not move"
                error = TransferError(f"copy {number}: {why}", job=number)
        except Exception as late:  # noqa: BLE001 - the device failed now: so did the copy
            fault = late
        if fault is not None:
            error = TransferError(f"copy {number} failed on the device: {fault!r}", job=number)
            error.__cause__ = fault
        if error is None and job.opened is not None:
            ticket.pace = self._pace(ticket.num_bytes, seconds, (job.opened, last), is_staged=job.is_staged)
        self.lane.finish(job)
        ticket.finish(seconds, error)
        self._leave(num_bytes)

    def _pace(
        self, num_bytes: int, seconds: float, between: tuple[Event, Event], *, is_staged: bool
    ) -> tuple[int, float]:
        """A load's speed without its wait for passes and loads before it.

        While it waits the copy engine fills the ring: what may have crossed the link by then is left out.

        Args:
            num_bytes: Of the load.
            seconds: From its submission to its end.
            between: The events between which its pages could be written.
            is_staged: Whether it went through the ring.
        """
        try:
            alone = between[0].elapsed_time(between[1]) / 1e3
        except Exception as fault:  # noqa: BLE001 - the copy is well: its own event has said so
            # While another thread captures a graph the driver may refuse, with a RuntimeError.
            if not isinstance(fault, RuntimeError) and not self._is_fault_told:
                self._is_fault_told = True
                _log.warning("[FlexKV] loads cannot be timed: %r", fault)
            return 0, 0.0
        if seconds - alone <= _SHORT * seconds:
            return num_bytes, seconds
        return max(0, num_bytes - self.lane.ring_bytes * is_staged), alone
