"""The part of the transfer kit that an author fills in, and what its tests are written with."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from flexkv_core.buffers import HostRegion, Slot, SlotPool
from flexkv_core.layout import BlockLayout, PartLayout, Plane, kv_layout
from flexkv_core.transfer import BlockSpan, CopyJob, Fence, Ticket, Transfer

from .kit import Kit

NUM_SLOTS = 200
NUM_BLOCKS = 6

LAYOUTS = {
    "kv": kv_layout(num_layers=3, row_bytes=64, block_tokens=8),
    "unequal_rows": kv_layout(num_layers=2, row_bytes=(96, 32), block_tokens=16),
    "latent": kv_layout(num_layers=2, row_bytes=(1152,), block_tokens=4),
    "one_token_blocks": kv_layout(num_layers=2, row_bytes=16, block_tokens=1),
    "layers_of_two_kinds": BlockLayout(
        4,
        1,
        (PartLayout("kv", "bfloat16", (Plane(0, "k", 32), Plane(0, "v", 64), Plane(1, "latent", 128))),),
    ),
}


class GateFence(Fence):
    """A fence that a test opens."""

    def __init__(self) -> None:
        self._gate = threading.Event()

    def is_passed(self) -> bool:
        return self._gate.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._gate.wait(timeout_s)

    def open(self) -> None:
        """Let everything behind the fence go on."""
        self._gate.set()


@dataclass
class Bench:
    """A transfer, its host slots, and what the device holds at the start."""

    kit: TransferKit
    transfer: Transfer
    layout: BlockLayout
    region: HostRegion
    slots: list[Slot]
    rows: list[list[bytes]]
    numbers: Iterator[int]

    def job(
        self, spans: Sequence[BlockSpan], device_slots: Sequence[int], after: Fence | None = None
    ) -> CopyJob:
        """A job with a number of its own."""
        given = self.kit.device_slots(device_slots)
        return CopyJob(next(self.numbers), spans, given, after or self.transfer.fence())

    def finish(self, ticket: Ticket) -> None:
        """Wait for success."""
        assert ticket.wait(self.kit.deadline_s), "the copy did not end"
        assert ticket.error is None

    def host_rows(self, span: BlockSpan, plane: int) -> list[bytes]:
        """The rows of a span as the layout says that they lie in the slot."""
        size = self.layout.planes[plane].row_bytes
        base = self.layout.header_bytes + self.layout.plane_offsets[plane] * span.num_tokens
        return [
            bytes(span.slot.view[base + token * size : base + (token + 1) * size])
            for token in range(span.first, span.last)
        ]

    def device_rows(self, plane: int, device_slots: Sequence[int]) -> list[bytes]:
        """The device's rows now."""
        size = self.layout.planes[plane].row_bytes
        data = bytes(self.kit.read_rows(self.transfer, plane, device_slots))
        return [data[at : at + size] for at in range(0, len(data), size)]


class TransferKit(Kit):
    """What an author gives.

    Attributes:
        first_slot: Lowest device slot that may be used (1 where slot 0 is a dummy).
    """

    first_slot: int = 1
    seed: int = 20240817

    def open_transfer(self, layout: BlockLayout, num_slots: int) -> Transfer:
        """A transfer over a fresh device pool of ``num_slots`` token slots."""
        raise NotImplementedError("the kit's user gives open_transfer(layout, num_slots)")

    def write_rows(self, transfer: Transfer, plane: int, slots: Sequence[int], rows: bytes) -> None:
        """Set the device's rows of one plane, one after the other, behind the transfer's back."""
        raise NotImplementedError

    def read_rows(self, transfer: Transfer, plane: int, slots: Sequence[int]) -> bytes:
        """The device's rows of one plane, one after the other."""
        raise NotImplementedError

    def device_slots(self, slots: Sequence[int]) -> Any:
        """Device slots as the engine passes them; default ``array('q')``."""
        return array("q", slots)

    def gate(self, transfer: Transfer) -> tuple[Fence, Callable[[], None]]:  # noqa: ARG002 - for overrides
        """A fence that is not passed, and a function that lets it pass."""
        fence = GateFence()
        return fence, fence.open

    def run_queued(self, transfer: Transfer) -> None:
        """For a transfer without a thread of its own: run what may run now."""

    @pytest.fixture(params=list(LAYOUTS))
    def bench(self, request: pytest.FixtureRequest) -> Iterator[Bench]:
        """A bench for each layout."""
        bench = self.make_bench(LAYOUTS[request.param])
        yield bench
        bench.transfer.close()
        bench.slots.clear()
        bench.region.close()

    def make_bench(self, layout: BlockLayout) -> Bench:
        """A pool of seeded random rows, registered host memory full of another pattern."""
        chance = random.Random(self.seed)
        transfer = self.open_transfer(layout, NUM_SLOTS)
        rows = []
        for number, plane in enumerate(layout.planes):
            data = chance.randbytes(plane.row_bytes * (NUM_SLOTS - self.first_slot))
            self.write_rows(transfer, number, range(self.first_slot, NUM_SLOTS), data)
            size = plane.row_bytes
            padding = [b""] * self.first_slot
            rows.append(padding + [data[at : at + size] for at in range(0, len(data), size)])
        region = HostRegion(NUM_BLOCKS * layout.slot_bytes)
        region.view[:] = b"\xa5" * region.num_bytes
        transfer.register(region)
        pool = SlotPool(region, layout.slot_bytes, NUM_BLOCKS)
        slots = [pool.slot(number) for number in pool.take(NUM_BLOCKS)]
        return Bench(self, transfer, layout, region, slots, rows, count(1))

    def some_slots(self, number: int, salt: int = 0) -> list[int]:
        """Distinct device slots in random order."""
        return random.Random(self.seed + salt).sample(range(self.first_slot, NUM_SLOTS), number)
