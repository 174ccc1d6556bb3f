"""The portable transfer: one worker thread that copies rows with the processor.

For pools in host memory, and a plain fallback for a CUDA device: slower there than
``cuda_copy``, but with no kernel to compile and no memory to pin.

Threads: see ``worker``; the worker alone touches device planes and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..buffers import HostRegion
from ..transfer import CopyJob, Fence, PassedFence, Ticket
from .copy_queue import Copy
from .planes import DevicePlanes
from .regions import HostMemory, Int64
from .rows import TokenRows, read_slots, read_spans, token_rows
from .worker import QueuedTransfer

PIECE_BYTES = 2 << 20
"""A load waits at most for one piece of a store: a millisecond, and the second-level cache holds it."""

Rows = NDArray[Any]
"""1-D array of rows, one item of type ``V<row_bytes>`` each."""


class TorchTransfer(QueuedTransfer):
    """Copies row by row between torch tensors and host slots."""

    def __init__(
        self, planes: DevicePlanes, *, fence: Callable[[], Fence] = PassedFence, device_number: int = 0
    ) -> None:
        """Start the worker.

        Args:
            planes: The pool.
            fence: Makes a fence behind what the engine has queued; on a CPU there is nothing.
            device_number: For the worker's name.
        """
        super().__init__(planes, device_number)
        self._fence = fence
        self._layers = planes.layers
        self._device = _CpuRows(planes) if planes.device.type == "cpu" else _DeviceRows(planes)
        self.start()

    def register(self, region: HostRegion) -> None:
        self._regions.add(region)

    def fence(self) -> Fence:
        return self._fence()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._regions.clear()

    def _prepare(self, job: CopyJob, *, is_load: bool) -> Copy:
        slots = read_slots(job, self.planes.num_slots)
        spans = read_spans(job, self.layout)
        parts = [
            (memory, token_rows(spans, slots, chosen, memory.address))
            for memory, chosen in self._regions.split(spans.payload, spans.end(self.layout))
        ]
        ticket = Ticket(job, job.num_tokens * self.layout.token_bytes, self.layout.num_layers)
        return Copy(ticket, self._steps(ticket, parts, is_load=is_load), is_load=is_load)

    def _steps(
        self, ticket: Ticket, parts: list[tuple[HostMemory, TokenRows]], *, is_load: bool
    ) -> Iterator[None]:
        """The copy, piece by piece: layer after layer, so that early layers are ready early."""
        began, busy = perf_counter(), 0.0
        move = self._device.load if is_load else self._device.store
        for layer, planes in enumerate(self._layers):
            for memory, rows in parts:
                for begin, end in self._pieces(planes, len(rows)):
                    resumed = perf_counter()
                    for plane in planes:
                        at = rows.at(
                            self.layout.plane_offsets[plane], self.layout.planes[plane].row_bytes, begin, end
                        )
                        move(plane, memory, at, rows.device_slots[begin:end])
                    busy += perf_counter() - resumed
                    yield
            if is_load:
                ticket.finish_layer(layer)
        ticket.pace = (ticket.num_bytes, busy)
        ticket.finish(perf_counter() - began)

    def _pieces(self, planes: list[int], num_tokens: int) -> Iterator[tuple[int, int]]:
        """Runs of tokens that move about ``PIECE_BYTES`` in the planes of one layer."""
        token_bytes = sum(self.layout.planes[plane].row_bytes for plane in planes)
        step = max(1, PIECE_BYTES // max(1, token_bytes))
        for begin in range(0, num_tokens, step):
            yield begin, min(begin + step, num_tokens)


class _CpuRows:
    """Planes in host memory: whole rows are taken and set by index, two passes through the cache."""

    def __init__(self, planes: DevicePlanes) -> None:
        self._planes: list[Rows] = [plane.numpy().view(f"V{plane.shape[1]}")[:, 0] for plane in planes.planes]
        self._sizes = [plane.shape[1] for plane in planes.planes]

    def load(self, plane: int, memory: HostMemory, at: Int64, slots: Int64) -> None:
        self._planes[plane][slots] = memory.rows(self._sizes[plane])[at]

    def store(self, plane: int, memory: HostMemory, at: Int64, slots: Int64) -> None:
        memory.rows(self._sizes[plane])[at] = self._planes[plane][slots]


class _DeviceRows:
    """Planes on a device, by plain torch operations on a stream of the worker's own."""

    def __init__(self, planes: DevicePlanes) -> None:
        self._planes = planes.planes
        self._sizes = [plane.shape[1] for plane in planes.planes]
        self._stream = torch.cuda.Stream(planes.device)

    def load(self, plane: int, memory: HostMemory, at: Int64, slots: Int64) -> None:
        found = memory.rows(self._sizes[plane])[at].view(np.uint8).reshape(-1, self._sizes[plane])
        target = self._planes[plane]
        with torch.cuda.stream(self._stream):
            target.index_copy_(
                0, torch.from_numpy(slots).to(target.device), torch.from_numpy(found).to(target.device)
            )
            self._stream.synchronize()

    def store(self, plane: int, memory: HostMemory, at: Int64, slots: Int64) -> None:
        source = self._planes[plane]
        with torch.cuda.stream(self._stream):
            found = source.index_select(0, torch.from_numpy(slots).to(source.device)).cpu()
        row_bytes = self._sizes[plane]
        memory.rows(row_bytes)[at] = found.numpy().view(f"V{row_bytes}").reshape(-1)
