"""The transfer for a CUDA device: paged copies at the speed of the link, off the engine's thread.

Ordering (see also ``lane``): every job waits on the device behind the fence it was given; a load
moreover behind all that the engine's streams hold when it is queued, for a forward pass that was
launched before may still write the slots that the load was given.  A ticket is finished only
after its last event has passed, so a stored block's bytes lie in host memory before anybody
hears of it.

Threads: the engine's thread queues, takes fences, and submits a copy's first pieces itself where
nothing is queued before it.  A worker for each direction (``flexkv-copy-<n>-load``, ``-store``)
submits the rest; whoever submits has the direction's lane (streams, ring) to itself.  Two waiters
(``-loads``, ``-stores``) wait for events and finish tickets.  ``_chunks``, ``_bounds``
and ``_are_pinned`` are replaced, never changed.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from ..buffers import HostRegion
from ..errors import TransferError
from ..metrics import Metrics
from ..transfer import CopyJob, Fence, HostSpans
from .copy_queue import Copy
from .cuda_config import CudaCopyConfig as CudaCopyConfig
from .cuda_ticket import CudaFence, CudaTicket, Streams
from .gpu import Event, Gpu, PinError
from .lane import Lane
from .measure import Thresholds, measure_thresholds, warm_up
from .pieces import CopyLimits
from .pinning import pin_region, unpin_chunks
from .plane_table import PlaneTable, plane_rows, send_planes
from .planes import DevicePlanes
from .regions import Int64
from .rows import check_tensor, read_slots, read_spans
from .tables import JobTable, full_table, job_table
from .waiter import EventWaiter
from .way import NEVER, Way
from .worker import QueuedTransfer

_log = logging.getLogger(__name__)

_PAUSE_S = 0.0001
"""A worker that goes on at once takes the interpreter's lock again before the engine's thread has woken
up to take it, which then waits for 5 ms.  A long piece keeps the link busy for much longer than that."""

_LONG_BYTES = 32 << 20

_MOST_LAYERWISE = 16
"""Blocks of a layerwise load that the calling thread begins itself."""


class CudaTransfer(QueuedTransfer):
    """Copies between a CUDA device's KV pool and pinned host slots."""

    def __init__(
        self,
        planes: DevicePlanes,
        *,
        streams: Streams | None = None,
        config: CudaCopyConfig | None = None,
        metrics: Metrics | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        """Allocate rings, compile the kernel, measure, start the threads.

        Args:
            planes: The pool.
            streams: The engine's streams (see ``Streams``); default: the calling thread's
                current stream.
            config: How copies are made.
            metrics: Where counts go.
            gpu: The device; default: the one that the planes lie on.

        Raises:
            TransferError: no CUDA driver or no triton.
        """
        device = planes.device
        number = device.index or 0
        self.config = config or CudaCopyConfig()
        super().__init__(planes, number, is_split=True, pieces_at_once=self.config.pieces_at_once)
        self._gpu = gpu or _cuda(device)
        self._streams: Streams = streams or (lambda: [torch.cuda.current_stream(device)])
        self._metrics = metrics or Metrics()
        self._chunks: dict[int, Int64 | None] = {}
        self._are_pinned = True
        self._bounds = np.empty(0, dtype=np.int64)
        self._gpu.bind()
        self._ways = {is_load: self._open_way(is_load, number) for is_load in (True, False)}
        self._table = self._plane_table()
        for way in self._ways.values():
            way.waiter.start()
        self.start()

    def register(self, region: HostRegion) -> None:
        self._gpu.bind()
        starts: Int64 | None = None
        try:
            starts = pin_region(self._gpu, region.address, region.num_bytes, self._chunk_bytes())
        except PinError as fault:
            if self.config.pin == "require":
                raise
            _log.warning("[FlexKV] host memory is not pinned, copies will be slow: %s", fault)
        try:
            self._regions.add(region, partial(self._forget, region.address))
        except TransferError:
            unpin_chunks(self._gpu, [] if starts is None else starts.tolist())
            raise
        self._know({**self._chunks, region.address: starts})
        self._metrics.gauge("host_pinned", float(self._are_pinned))

    def _know(self, chunks: dict[int, Int64 | None]) -> None:
        """Which regions there are, and where their pinned chunks begin."""
        self._are_pinned = all(starts is not None for starts in chunks.values())
        known = [starts for starts in chunks.values() if starts is not None]
        self._chunks = chunks
        self._bounds = np.sort(np.concatenate([np.empty(0, np.int64), *known]))

    def _chunk_bytes(self) -> int:
        """Whole slots, so that no block of a pool of ours lies in two chunks."""
        slot_bytes = self.layout.slot_bytes
        return max(1, self.config.pin_chunk_bytes // slot_bytes) * slot_bytes

    def fence(self) -> Fence:
        return CudaFence(self._gpu, self._streams())

    def is_alive(self) -> bool:
        return super().is_alive() and all(way.waiter.is_alive for way in self._ways.values())

    def close(self) -> None:
        with ExitStack() as steps:  # every one is taken, whatever another raises
            steps.callback(self._close_ways)
            super().close()

    def _close_ways(self) -> None:
        ways, self._ways = self._ways, {}
        with ExitStack() as steps:
            for way in ways.values():
                steps.callback(_drain, way.lane)
                steps.callback(way.waiter.close)

    def _open_way(self, is_load: bool, number: int) -> Way:
        config = self.config
        parts = config.ring_bytes // config.ring_parts
        longest_run = max(plane.row_bytes for plane in self.layout.planes) * self.layout.block_tokens
        part_bytes = -(-max(parts, longest_run) // 4096) * 4096
        lane = Lane(self._gpu, self.layout, (part_bytes, config.ring_parts), is_load=is_load)
        direct = config.load_blocks if is_load else config.store_blocks
        return Way(
            self._gpu,
            self.layout,
            lane,
            EventWaiter(self._gpu, f"flexkv-copy-{number}-{'loads' if is_load else 'stores'}"),
            CopyLimits(
                self._staged_bytes(lane, is_load),
                part_bytes,
                config.batch_bytes,
                head_bytes=config.store_head_bytes,
            ),
            is_load=is_load,
            window_bytes=config.load_window_bytes if is_load else config.store_window_bytes,
            blocks=(direct, config.ring_blocks, config.edge_blocks),
            wake=partial(self._queue.wake, is_load=is_load),
        )

    def _staged_bytes(self, lane: Lane, is_load: bool) -> int:
        """From which size on jobs are staged: forced, or measured now."""
        config = self.config
        given = config.load_staged_bytes if is_load else config.store_staged_bytes
        if config.method != "auto":
            given = 0 if config.method == "staged" else NEVER
        if given is not None:
            warm_up(self._gpu, lane, self.layout)
            return given
        blocks = config.load_blocks if is_load else config.store_blocks
        found: Thresholds = measure_thresholds(
            self._gpu, lane, self.layout, direct_blocks=blocks, ring_blocks=config.ring_blocks
        )
        _log.info("[FlexKV] %s: %s", "loads" if is_load else "stores", found.describe())
        return found.staged_bytes

    def _plane_table(self) -> PlaneTable:
        rows, word = plane_rows(
            self.layout,
            [plane.data_ptr() for plane in self.planes.planes],
            [plane.stride(0) for plane in self.planes.planes],
        )
        table = send_planes(self._gpu, self._ways[True].lane.kernels, rows)
        return PlaneTable(table, word, self.planes.num_slots)

    def _prepare(self, job: CopyJob, *, is_load: bool) -> Copy:
        slots, are_on_device = self._slots_of(job)
        table = self._full_table(job, slots) or self._table_of(job, slots)
        way = self._ways[is_load]
        sizes = (table.num_tokens * self.layout.token_bytes, self.layout.num_layers)
        ticket = CudaTicket(job, sizes, self._gpu, self._streams)
        fences = partial(self._fences, job.after, and_now=is_load or are_on_device)
        known = way.lane.begin(table, self._table, fences, self._bounds)
        settle = partial(way.lane.read, known)
        return Copy(ticket, way.steps(ticket, known), is_load=is_load, settle=settle)

    def _fences(self, after: Fence, *, and_now: bool) -> list[Event]:
        """What a job waits for on the device; ``and_now``: moreover all that the engine has queued."""
        fences: list[Event] = list(after.events) if isinstance(after, CudaFence) else []
        return fences + CudaFence(self._gpu, self._streams()).events if and_now else fences

    def _full_table(self, job: CopyJob, slots: Any) -> JobTable | None:
        """The usual job, full blocks in slots of one pool, by the shortest way; None for any other."""
        spans = job.spans
        if not isinstance(spans, HostSpans):
            return None
        region, slot_bytes = spans.pool.region, spans.pool.slot_bytes
        begin = region.address + self.layout.header_bytes
        if region.address not in self._chunks or (begin | slot_bytes) % self._table.word_bytes:
            return None
        is_pinned = self._chunks[region.address] is not None
        return full_table(spans, self.layout, slots, is_pinned=is_pinned)

    def _table_of(self, job: CopyJob, slots: Any) -> JobTable:
        """Any job's table.

        Raises:
            TransferError: the job is refused.
        """
        spans = read_spans(job, self.layout)
        if len(spans) and int(np.bitwise_or.reduce(spans.payload)) % self._table.word_bytes:
            why = f"host slots must be aligned to {self._table.word_bytes} B"
            raise TransferError(f"copy {job.number} refused: {why}", job=job.number)
        places = self._regions.split(spans.payload, spans.end(self.layout))
        known = [self._chunks.get(memory.address) is not None for memory, _ in places]
        return job_table(spans, slots, is_pinned=all(known))

    def _slots_of(self, job: CopyJob) -> tuple[Any, bool]:
        """Device slots as an array that was checked, or as the device's tensor, which the kernel checks."""
        given = job.device_slots
        if not isinstance(given, torch.Tensor) or not self._gpu.holds(given):
            return read_slots(job, self.planes.num_slots, copied=False), False
        check_tensor(job)
        return given.detach(), True

    def _may_submit(self, copy: Copy) -> bool:
        way = self._ways[copy.is_load]
        job = copy.ticket.job
        if not self._are_pinned:  # the driver copies pageable memory while it is called
            return False
        # Pieces of a long layerwise load are hundreds of copies each, which take their time to submit.
        if job.layerwise and len(job.spans) > _MOST_LAYERWISE:
            return False
        is_ready = way.lane.is_shallow and way.has_room and isinstance(job.after, CudaFence)
        return is_ready and self._gpu.is_bound()

    def _may_go(self, copy: Copy) -> bool:
        return self._ways[copy.is_load].has_room

    def _may_begin(self, copy: Copy) -> bool:
        return isinstance(copy.ticket.job.after, CudaFence) or super()._may_begin(copy)

    def _pause(self, copy: Copy) -> None:
        if self._ways[copy.is_load].lane.last_bytes >= _LONG_BYTES:
            time.sleep(_PAUSE_S)

    def _settle(self, copy: Copy) -> None:
        _drain(self._ways[copy.is_load].lane)

    def _work(self, ways: tuple[bool, ...]) -> None:
        self._gpu.bind()
        super()._work(ways)

    def _forget(self, address: int) -> None:
        """A region closes: nothing may move there any more, then it is unpinned."""
        starts = self._chunks.get(address)
        self._know({known: value for known, value in self._chunks.items() if known != address})
        for way in self._ways.values():
            _drain(way.lane)
        if starts is not None:
            unpin_chunks(self._gpu, starts.tolist())


def _cuda(device: torch.device) -> Gpu:
    from .cuda_gpu import CudaGpu

    return CudaGpu(device)


def _drain(lane: Lane) -> None:
    """Return when nothing moves on a lane any more."""
    try:
        lane.drain()
    except Exception:  # noqa: BLE001 - clean-up: the device itself has failed, so nothing moves any
        # more, and every copy under way has said so.
        _log.exception("[FlexKV] could not wait for the device")
