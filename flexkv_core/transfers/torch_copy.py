"""The portable transfer: one worker thread that copies rows with the processor.

For pools in host memory, and a plain fallback for a CUDA device: slower there than
``cuda_copy``, but with no kernel to compile and no memory to pin.

Threads: ``load``, ``store``, ``fence`` and ``register`` may be called from any thread; they
touch the queue and the region list, each under its own lock.  The worker (``flexkv-copy-<n>``)
alone touches device planes and slots, and alone finishes tickets of copies that have begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..buffers import HostRegion
from ..errors import TransferError
from ..transfer import CopyJob, Fence, PassedFence, Ticket, Transfer
from .copy_queue import Copy, CopyQueue
from .planes import DevicePlanes
from .regions import HostMemory, HostRegions, Int64
from .rows import TokenRows, read_slots, read_spans, token_rows

PIECE_BYTES = 2 << 20
"""A load waits at most for one piece of a store: a millisecond, and the second-level cache holds it."""

_FENCE_POLL_S = 0.002
"""How long the worker waits for one fence before it looks at the other queue."""

Rows = NDArray[Any]
"""1-D array of rows, one item of type ``V<row_bytes>`` each."""


class TorchTransfer(Transfer):
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
        self.layout = planes.layout
        self.planes = planes
        self._fence = fence
        self._regions = HostRegions()
        self._queue: CopyQueue[Copy] = CopyQueue()
        self._layers = planes.layers
        self._device = _CpuRows(planes) if planes.device.type == "cpu" else _DeviceRows(planes)
        self._thread = threading.Thread(target=self._work, name=f"flexkv-copy-{device_number}", daemon=True)
        self._thread.start()

    def register(self, region: HostRegion) -> None:
        self._regions.add(region)

    def fence(self) -> Fence:
        return self._fence()

    def load(self, job: CopyJob) -> Ticket:
        return self._submit(job, is_load=True)

    def store(self, job: CopyJob) -> Ticket:
        return self._submit(job, is_load=False)

    def close(self) -> None:
        for copy in self._queue.close():
            number = copy.ticket.job.number
            copy.ticket.finish(
                0.0, TransferError("the transfer was closed before this copy began", job=number)
            )
        self._thread.join()
        self._regions.clear()

    def _submit(self, job: CopyJob, *, is_load: bool) -> Ticket:
        self._queue.check_open(job)
        slots = read_slots(job, self.planes.num_slots)
        spans = read_spans(job, self.layout)
        end = spans.payload + spans.num_tokens * self.layout.token_bytes
        parts = [
            (memory, token_rows(spans, slots, chosen, memory.address))
            for memory, chosen in self._regions.split(spans.payload, end)
        ]
        ticket = Ticket(job, job.num_tokens * self.layout.token_bytes, self.layout.num_layers)
        self._queue.add(Copy(ticket, self._steps(ticket, parts, is_load=is_load), is_load=is_load))
        return ticket

    def _steps(
        self, ticket: Ticket, parts: list[tuple[HostMemory, TokenRows]], *, is_load: bool
    ) -> Iterator[None]:
        """The copy, piece by piece: layer after layer, so that early layers are ready early."""
        began = perf_counter()
        move = self._device.load if is_load else self._device.store
        for layer, planes in enumerate(self._layers):
            for memory, rows in parts:
                for begin, end in self._pieces(planes, len(rows)):
                    for plane in planes:
                        at = rows.at(
                            self.layout.plane_offsets[plane], self.layout.planes[plane].row_bytes, begin, end
                        )
                        move(plane, memory, at, rows.device_slots[begin:end])
                    yield
            if is_load:
                ticket.finish_layer(layer)
        ticket.finish(perf_counter() - began)

    def _pieces(self, planes: list[int], num_tokens: int) -> Iterator[tuple[int, int]]:
        """Runs of tokens that move about ``PIECE_BYTES`` in the planes of one layer."""
        token_bytes = sum(self.layout.planes[plane].row_bytes for plane in planes)
        step = max(1, PIECE_BYTES // max(1, token_bytes))
        for begin in range(0, num_tokens, step):
            yield begin, min(begin + step, num_tokens)

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """One piece of one copy; False when closed and done.  Keeps nothing of a copy that ended."""
        heads = self._queue.heads()
        ready = next((copy for copy in heads if copy.has_begun or copy.ticket.job.after.is_passed()), None)
        if ready is None and heads:
            heads[0].ticket.job.after.wait(_FENCE_POLL_S)
        elif ready is not None and self._queue.begin(ready) and not self._advance(ready):
            self._queue.remove(ready)
        return bool(heads)

    def _advance(self, copy: Copy) -> bool:
        try:
            return copy.step()
        except Exception as fault:  # noqa: BLE001 - the thread's top: one copy fails, the next goes on
            number = copy.ticket.job.number
            error = TransferError(f"copy {number} failed: {fault!r}", job=number)
            error.__cause__ = fault
            copy.ticket.finish(0.0, error)
            return False


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
