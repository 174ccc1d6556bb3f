"""The conformance kit for transfers.

    class TestTorch(TransferTests):
        def open_transfer(self, layout, num_slots): ...       # over a device pool of so many slots
        def write_rows(self, transfer, plane, slots, rows): ...
        def read_rows(self, transfer, plane, slots): ...

The kit never looks into the device pool but through these two methods.
"""

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
from flexkv_core.errors import TransferError
from flexkv_core.layout import BlockLayout, PartLayout, Plane, kv_layout
from flexkv_core.transfer import BlockSpan, CopyJob, Fence, Ticket, Transfer

from .kit import Kit
from .leaks import Snapshot

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


class TransferTests(TransferKit):
    """Every test that a transfer must pass."""

    def test_every_plane_of_full_blocks(self, bench: Bench) -> None:
        size = bench.layout.block_tokens
        spans = [BlockSpan(slot, size, 0, size) for slot in bench.slots]
        self._round_trip(bench, spans)

    def test_partly_filled_blocks_and_partial_spans(self, bench: Bench) -> None:
        chance = random.Random(self.seed)
        spans = []
        for slot in bench.slots:
            num_tokens = chance.randint(1, bench.layout.block_tokens)
            first = chance.randrange(num_tokens)
            spans.append(BlockSpan(slot, num_tokens, first, chance.randint(first + 1, num_tokens)))
        self._round_trip(bench, spans)

    def test_one_token(self, bench: Bench) -> None:
        size = bench.layout.block_tokens
        self._round_trip(bench, [BlockSpan(bench.slots[0], size, size - 1, size)])

    def _round_trip(self, bench: Bench, spans: list[BlockSpan]) -> None:
        total = sum(span.last - span.first for span in spans)
        source, target = self.some_slots(total), self.some_slots(total, salt=1)
        before = [bytes(slot.view) for slot in bench.slots]
        ticket = bench.transfer.store(bench.job(spans, source))
        bench.finish(ticket)
        assert ticket.num_bytes == total * bench.layout.token_bytes
        for plane in range(len(bench.layout.planes)):
            got = [row for span in spans for row in bench.host_rows(span, plane)]
            assert got == [bench.rows[plane][slot] for slot in source], f"plane {plane} of the host"
        self._assert_only_spans_changed(bench, spans, before)
        bench.finish(bench.transfer.load(bench.job(spans, target)))
        everything = range(self.first_slot, NUM_SLOTS)
        for plane, rows in enumerate(bench.rows):
            wanted = list(rows)
            for to, whence in zip(target, source, strict=True):
                wanted[to] = rows[whence]
            assert bench.device_rows(plane, everything) == wanted[self.first_slot :], f"plane {plane}"

    def _assert_only_spans_changed(self, bench: Bench, spans: list[BlockSpan], before: list[bytes]) -> None:
        for span, was in zip(spans, before, strict=False):
            now = bytearray(span.slot.view)
            for plane in range(len(bench.layout.planes)):
                size = bench.layout.planes[plane].row_bytes
                at = bench.layout.header_bytes + bench.layout.plane_offsets[plane] * span.num_tokens
                run = slice(at + span.first * size, at + span.last * size)
                now[run] = was[run]
            assert bytes(now) == was, "bytes outside the span were written"

    def test_layers_are_all_ready_at_the_end(self, bench: Bench) -> None:
        ticket = bench.transfer.load(self._whole(bench))
        for layer in range(bench.layout.num_layers):
            assert ticket.wait_layer(layer, self.deadline_s)
        bench.finish(ticket)
        assert all(ticket.is_layer_ready(layer) for layer in range(bench.layout.num_layers))

    def test_ticket_ends_once(self, bench: Bench) -> None:
        ticket = bench.transfer.store(self._whole(bench))
        bench.finish(ticket)
        assert ticket.is_over
        assert ticket.is_ok
        with pytest.raises(AssertionError):
            ticket.finish(0.0)

    @pytest.mark.parametrize("direction", ["load", "store"])
    def test_nothing_moves_before_the_fence(self, bench: Bench, direction: str) -> None:
        fence, let_pass = self.gate(bench.transfer)
        job = self._whole(bench, fence)
        before = [bytes(slot.view) for slot in bench.slots]
        ticket = getattr(bench.transfer, direction)(job)
        self.run_queued(bench.transfer)
        assert not ticket.wait(0.05)
        slots = range(self.first_slot, NUM_SLOTS)
        for plane, rows in enumerate(bench.rows):
            assert bench.device_rows(plane, slots) == rows[self.first_slot :]
        assert [bytes(slot.view) for slot in bench.slots] == before
        let_pass()
        self.run_queued(bench.transfer)
        bench.finish(ticket)

    def test_many_jobs_under_way(self, bench: Bench) -> None:
        size = bench.layout.block_tokens
        source = self.some_slots(size * len(bench.slots))
        stores = [
            bench.transfer.store(bench.job([BlockSpan(slot, size, 0, size)], source[at * size :][:size]))
            for at, slot in enumerate(bench.slots)
        ]
        for ticket in stores:
            bench.finish(ticket)
        for plane, rows in enumerate(bench.rows):
            got = [
                row for slot in bench.slots for row in bench.host_rows(BlockSpan(slot, size, 0, size), plane)
            ]
            assert got == [rows[slot] for slot in source]

    def test_close_waits_for_copies_and_takes_no_more(self, bench: Bench) -> None:
        ticket = bench.transfer.store(self._whole(bench))
        job = self._whole(bench)
        bench.transfer.close()
        assert ticket.is_over
        bench.transfer.close()
        with pytest.raises(TransferError):
            bench.transfer.load(job)

    def test_leaves_no_thread_or_descriptor(self) -> None:
        before = Snapshot.take()
        for cycle in range(3):
            bench = self.make_bench(LAYOUTS["kv"])
            bench.finish(bench.transfer.store(self._whole(bench)))
            bench.transfer.close()
            bench.slots.clear()
            bench.region.close()
            if cycle == 0:  # what a library starts once for the process is not the transfer's leak
                before = Snapshot.take()
        assert before.wait_until_back() == []

    def _whole(self, bench: Bench, after: Fence | None = None) -> CopyJob:
        size = bench.layout.block_tokens
        return bench.job([BlockSpan(bench.slots[0], size, 0, size)], self.some_slots(size), after)
