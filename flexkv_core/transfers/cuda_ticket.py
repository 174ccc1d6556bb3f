"""Fences and tickets made of CUDA events: the engine's streams wait, its thread does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..errors import TransferError
from ..transfer import CopyJob, Fence, Ticket
from .gpu import Event, Gpu, Stream

Streams = Callable[[], Sequence[Stream]]
"""The engine's streams, asked for on its thread: the forward stream and the current one."""

_POLL_S = 0.0001


class CudaFence(Fence):
    """Behind all that the engine's streams held when it was taken."""

    def __init__(self, gpu: Gpu, streams: Sequence[Stream]) -> None:
        """Record one event on each stream."""
        self.events = [gpu.event() for _ in streams]
        for event, stream in zip(self.events, streams, strict=True):
            event.record(stream)

    def is_passed(self) -> bool:
        return all(event.query() for event in self.events)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.is_passed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


class CudaTicket(Ticket):
    """A running copy whose layers, and whose end, are events.

    An event can be waited for on the device only once it is recorded, which the transfer's
    worker does when it submits the piece: milliseconds after the job was queued, not when the
    bytes have moved.  ``order_behind`` and ``order_layer`` wait for that, within bounds.
    """

    def __init__(self, job: CopyJob, sizes: tuple[int, int], gpu: Gpu, streams: Streams) -> None:
        """A ticket for ``job`` of ``sizes`` (bytes, layers)."""
        super().__init__(job, *sizes)
        self._gpu = gpu
        self._streams = streams
        self._marks: list[tuple[int, Event]] = []
        self._told: dict[Stream, int] = {}
        """Up to which layer a stream was told to wait.  The engine's thread."""

    def order_behind(self, timeout_s: float) -> bool:
        return self.order_layer(self.num_layers - 1, timeout_s)

    def order_layer(self, layer: int, timeout_s: float) -> bool:
        if self._gpu.is_capturing():
            return self.is_layer_ready(layer)
        if self._is_over:
            return self.error is None
        streams = [stream for stream in self._streams() if self._told.get(stream, -1) < layer]
        if not streams:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._mark_of(layer) is not None or self._is_over, timeout_s)
            found = self._mark_of(layer)
            if self._is_over:
                return self.error is None
        if found is None:
            return False
        last, mark = found
        for stream in streams:
            self._gpu.wait(stream, mark)
            self._told[stream] = last
        return True

    def mark_layer(self, layer: int, mark: Event) -> None:
        """For the transfer: layers up to ``layer`` are submitted, and ``mark`` is behind them."""
        with self._changed:
            self._marks.append((layer, mark))
            self._changed.notify_all()

    def finish(self, seconds: float, error: TransferError | None = None) -> None:
        super().finish(seconds, error)
        self._marks.clear()

    def _mark_of(self, layer: int) -> tuple[int, Event] | None:
        """The first mark behind this layer, and the last layer that it is behind."""
        return next((marked for marked in self._marks if marked[0] >= layer), None)
