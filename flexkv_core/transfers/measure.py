"""Measured at start: from which size on staging beats the direct kernel on this link.

On scratch memory of our own, with the same streams, ring and launches as real copies; the
engine's pool is not touched.  Takes some tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ..buffers import HostRegion
from ..layout import BlockLayout
from .gpu import Gpu, PinError
from .lane import Lane
from .pieces import CopyLimits, cut
from .pinning import pin_region, unpin_chunks
from .plane_table import PlaneTable, plane_rows, send_planes
from .rows import SpanTable
from .tables import JobTable, job_table

_SIZES = (4 << 20, 16 << 20, 40 << 20, 72 << 20)
_REPEATS = 5
_DEFAULT_STAGED_BYTES = 64 << 20
"""Where nothing can be measured.  Both ways met near this size on an H200."""

_FAIR = 0.97
"""Staging leaves the processors to the engine, so it may lose a little and still be chosen."""

_SCRATCH_SLOTS = 1024


@dataclass(frozen=True)
class Thresholds:
    """What was found.

    Attributes:
        staged_bytes: From this size on jobs are staged.
        rates: Per size measured: bytes, GB/s direct, GB/s staged.
    """

    staged_bytes: int
    rates: tuple[tuple[int, float, float], ...]

    def describe(self) -> str:
        """One line for the log."""
        rates = ", ".join(
            f"{size >> 20} MiB {direct:.1f}/{staged:.1f}" for size, direct, staged in self.rates
        )
        return f"staged from {self.staged_bytes >> 20} MiB on (direct/staged GB/s: {rates or 'not measured'})"


def choose(rates: tuple[tuple[int, float, float], ...]) -> int:
    """The smallest measured size from which on staging never loses, or next to nothing."""
    staged_bytes = 2 * rates[-1][0]
    for size, direct, staged in reversed(rates):
        if staged < _FAIR * direct:
            break
        staged_bytes = size
    return staged_bytes


def warm_up(gpu: Gpu, lane: Lane, layout: BlockLayout) -> None:
    """Compile the kernel now instead of in the first copy, where thresholds are given."""
    _measure(gpu, lane, layout, (1, 1), (1,))


def measure_thresholds(
    gpu: Gpu, lane: Lane, layout: BlockLayout, *, direct_blocks: int, ring_blocks: int
) -> Thresholds:
    """Time both ways at a few sizes, in whole blocks; also compiles the kernel."""
    return _measure(gpu, lane, layout, (direct_blocks, ring_blocks), _SIZES)


def _measure(
    gpu: Gpu, lane: Lane, layout: BlockLayout, thread_blocks: tuple[int, int], sizes: tuple[int, ...]
) -> Thresholds:
    direct_blocks, ring_blocks = thread_blocks
    most = max(1, sizes[-1] // layout.block_bytes)
    count = min(most, max(1, (192 << 20) // layout.slot_bytes))
    region = HostRegion(count * layout.slot_bytes)
    try:
        starts = pin_region(gpu, region.address, region.num_bytes, region.num_bytes).tolist()
    except PinError:
        region.close()
        return Thresholds(_DEFAULT_STAGED_BYTES, ())
    try:
        planes, keep = _scratch_planes(gpu, lane, layout)
        found = []
        for size in sizes:
            blocks = min(count, max(1, size // layout.block_bytes))
            table = _table(region.address, layout, blocks)
            run = _runner(lane, layout, table, planes)
            num_bytes = blocks * layout.block_bytes
            direct = num_bytes / run(1 << 62, direct_blocks) / 1e9
            found.append((num_bytes, direct, num_bytes / run(0, ring_blocks) / 1e9))
        rates = tuple(sorted(set(found)))
        del keep
        return Thresholds(choose(rates), rates)
    finally:
        lane.drain()
        unpin_chunks(gpu, starts)
        region.close()


def _scratch_planes(gpu: Gpu, lane: Lane, layout: BlockLayout) -> tuple[PlaneTable, object]:
    """All planes in one piece of scratch memory, so that it stays small; rows overlap."""
    widest = max(plane.row_bytes for plane in layout.planes)
    memory = gpu.allocate(_SCRATCH_SLOTS * widest, lane.kernels)
    addresses = [memory.data_ptr()] * len(layout.planes)
    rows, word = plane_rows(layout, addresses, [plane.row_bytes for plane in layout.planes])
    return PlaneTable(send_planes(gpu, lane.kernels, rows), word, _SCRATCH_SLOTS), memory


def _table(address: int, layout: BlockLayout, blocks: int) -> JobTable:
    number = np.arange(blocks, dtype=np.int64)
    full = np.full(blocks, layout.block_tokens, dtype=np.int64)
    spans = SpanTable(address + number * layout.slot_bytes + layout.header_bytes, full, 0 * full, full)
    slots = np.random.default_rng(0).integers(0, _SCRATCH_SLOTS, blocks * layout.block_tokens)
    return job_table(spans, slots)


def _runner(
    lane: Lane, layout: BlockLayout, table: JobTable, planes: PlaneTable
) -> Callable[[int, int], float]:
    def run(staged_bytes: int, blocks: int) -> float:
        """Best seconds of a few runs, the first of which warms up."""
        limits = CopyLimits(staged_bytes, lane.part_bytes)
        pieces = list(
            cut(layout, table, limits, layerwise=False, can_be_direct=True, ends_small=lane.is_load)
        )
        slots = table.device_slots
        times = []
        for _ in range(_REPEATS + 1):
            table.device_slots = slots
            began = perf_counter()
            job = lane.begin(table, planes, list, np.empty(0, dtype=np.int64))
            for piece in pieces:
                lane.submit(job, piece, 8 * blocks if piece.is_edge else blocks)
            lane.mark().synchronize()
            times.append(perf_counter() - began)
            lane.finish(job)
        table.device_slots = slots
        return min(times[1:])

    return run
