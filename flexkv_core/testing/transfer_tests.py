"""The conformance kit for transfers.

    class TestTorch(TransferTests):
        def open_transfer(self, layout, num_slots): ...       # over a device pool of so many slots
        def write_rows(self, transfer, plane, slots, rows): ...
        def read_rows(self, transfer, plane, slots): ...

The kit never looks into the device pool but through these two methods.
"""

from __future__ import annotations

import random

import pytest

from flexkv_core.errors import TransferError
from flexkv_core.transfer import BlockSpan, CopyJob, Fence

from .leaks import Snapshot
from .transfer_kit import LAYOUTS, NUM_SLOTS, Bench, TransferKit


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
