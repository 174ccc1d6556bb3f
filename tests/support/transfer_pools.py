"""Small pools, regions and jobs that the transfer tests share."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from flexkv_core.buffers import HostRegion, Slot, SlotPool
from flexkv_core.layout import BlockLayout, PartLayout, Plane, kv_layout
from flexkv_core.transfer import BlockSpan, CopyJob, Fence, PassedFence
from flexkv_core.transfers.planes import DevicePlanes


class HeldFence(Fence):
    """A fence that a test opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def is_passed(self) -> bool:
        return self.gate.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self.gate.wait(timeout_s)


def make_planes(
    layout: BlockLayout, num_slots: int, seed: int, *, gap: int = 0, device: str = "cpu"
) -> DevicePlanes:
    """Planes of random bytes; with a gap, rows are strided parts of wider ones."""
    random_bytes = torch.Generator().manual_seed(seed)
    planes = []
    for plane in layout.planes:
        wide = torch.randint(
            0, 256, (num_slots, plane.row_bytes + gap), dtype=torch.uint8, generator=random_bytes
        ).to(device)
        planes.append(wide[:, gap // 2 : gap // 2 + plane.row_bytes])
    return DevicePlanes(layout, tuple(planes), num_slots)


def make_pool(layout: BlockLayout, capacity: int) -> tuple[HostRegion, SlotPool]:
    region = HostRegion(layout.slot_bytes * capacity)
    return region, SlotPool(region, layout.slot_bytes, capacity)


def take(pool: SlotPool, count: int) -> list[Slot]:
    return [pool.slot(index) for index in pool.take(count)]


def make_job(
    number: int,
    spans: Sequence[BlockSpan],
    slots: list[int] | torch.Tensor,
    after: Fence | None = None,
    *,
    layerwise: bool = False,
) -> CopyJob:
    given = slots if isinstance(slots, torch.Tensor) else array("q", slots)
    return CopyJob(number, spans, given, after or PassedFence(), layerwise)


def whole(slot: Slot, num_tokens: int) -> BlockSpan:
    return BlockSpan(slot, num_tokens, 0, num_tokens)


def snapshot(planes: DevicePlanes) -> list[np.ndarray]:
    return [plane.cpu().numpy().copy() for plane in planes.planes]


def payload(layout: BlockLayout, rows: list[np.ndarray], slots: list[int]) -> dict[int, bytes]:
    """What each plane holds in these slots, written plainly: plane number -> bytes."""
    return {
        plane: b"".join(rows[plane][slot].tobytes() for slot in slots) for plane in range(len(layout.planes))
    }


def run_of(layout: BlockLayout, span: BlockSpan, plane: int) -> memoryview:
    """Where a span's run of one plane lies in its slot, by the layout's definition."""
    row = layout.planes[plane].row_bytes
    start = layout.header_bytes + sum(p.row_bytes for p in layout.planes[:plane]) * span.num_tokens
    return span.slot.view[start + span.first * row : start + span.last * row]


LAYOUTS = {
    "kv": kv_layout(num_layers=3, row_bytes=64, block_tokens=8),
    "unequal": kv_layout(num_layers=2, row_bytes=(96, 36), block_tokens=16),
    "latent": kv_layout(num_layers=2, row_bytes=(1152,), block_tokens=4),
    "odd": kv_layout(num_layers=2, row_bytes=(7, 13), block_tokens=5),
    "two parts": BlockLayout(
        4,
        1,
        (
            PartLayout(
                "kv", "bfloat16", (Plane(0, "k", 32), Plane(0, "v", 32), Plane(2, "k", 32), Plane(2, "v", 32))
            ),
            PartLayout("index", "uint8", (Plane(1, "index", 12), Plane(2, "index", 12))),
        ),
    ),
}


def random_spans(
    layout: BlockLayout, pool: SlotPool, num_slots: int, rng: random.Random, count: int
) -> tuple[list[BlockSpan], list[int]]:
    """Spans of full and partly filled blocks, whole and partial, with distinct random device slots."""
    spans = []
    for slot in map(pool.slot, pool.take(count)):
        num_tokens = rng.choice([layout.block_tokens, rng.randint(1, layout.block_tokens)])
        first = rng.choice([0, rng.randrange(num_tokens)])
        spans.append(
            BlockSpan(slot, num_tokens, first, rng.choice([num_tokens, rng.randint(first + 1, num_tokens)]))
        )
    total = sum(span.last - span.first for span in spans)
    return spans, rng.sample(range(num_slots), total)
