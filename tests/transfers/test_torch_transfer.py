"""TorchTransfer on pools in host memory: every byte, every refusal, every order that is promised."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv_core.buffers import HostRegion, Slot, SlotPool
from flexkv_core.errors import LayoutError, TransferError
from flexkv_core.layout import BlockLayout, kv_layout
from flexkv_core.transfer import BlockSpan, CopyJob, PassedFence, Ticket
from flexkv_core.transfers.planes import DevicePlanes
from flexkv_core.transfers.torch_copy import PIECE_BYTES, TorchTransfer
from tests.support.transfer_pools import (
    LAYOUTS,
    HeldFence,
    make_job,
    make_planes,
    make_pool,
    payload,
    random_spans,
    run_of,
    snapshot,
    take,
    whole,
)
from tests.support.waiting import DEADLINE_S, wait_until

NUM_SLOTS = 400
SEED = 20


class Bench:
    """A pool, a host region and a transfer between them."""

    def __init__(
        self, layout: BlockLayout, *, blocks: int = 12, gap: int = 0, num_slots: int = NUM_SLOTS
    ) -> None:
        self.layout = layout
        self.region, self.pool = make_pool(layout, blocks)
        self.planes = make_planes(layout, num_slots, SEED, gap=gap)
        self.transfer = TorchTransfer(self.planes)
        self.transfer.register(self.region)
        self.number = 0

    def run(self, direction: str, spans: list[BlockSpan], slots: list[int]) -> Ticket:
        self.number += 1
        ticket: Ticket = getattr(self.transfer, direction)(make_job(self.number, spans, slots))
        assert ticket.wait(DEADLINE_S)
        assert ticket.error is None
        return ticket

    def let_go(self) -> None:
        """Wait until the worker holds nothing of the copies before: their ends are told a little earlier."""
        self.run("store", [], [])

    def close(self) -> None:
        self.transfer.close()
        del self.pool
        self.region.close()


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> BlockLayout:
    return LAYOUTS[request.param]


@pytest.fixture(params=[0, 24], ids=["packed", "strided"])
def bench(request: pytest.FixtureRequest, layout: BlockLayout) -> Iterator[Bench]:
    bench = Bench(layout, gap=request.param)
    yield bench
    bench.close()
    assert not bench.transfer.is_alive()


def check_host(bench: Bench, spans: list[BlockSpan], slots: list[int], rows: list[np.ndarray]) -> None:
    at = 0
    for span in spans:
        run = slots[at : at + span.last - span.first]
        at += len(run)
        for plane, wanted in payload(bench.layout, rows, run).items():
            assert bytes(run_of(bench.layout, span, plane)) == wanted, (span, plane)


def check_device(planes: DevicePlanes, rows: list[np.ndarray], slots: list[int]) -> None:
    """The chosen slots are restored, and no other slot was touched."""
    for tensor, before in zip(planes.planes, rows, strict=True):
        wanted = np.zeros_like(before)
        wanted[slots] = before[slots]
        np.testing.assert_array_equal(tensor.cpu().numpy(), wanted)


def test_every_plane_comes_back_byte_for_byte(bench: Bench) -> None:
    spans, slots = random_spans(bench.layout, bench.pool, NUM_SLOTS, random.Random(SEED), 12)
    rows = snapshot(bench.planes)
    stored = bench.run("store", spans, slots)
    check_host(bench, spans, slots, rows)
    for tensor in bench.planes.planes:
        tensor.zero_()
    loaded = bench.run("load", spans, slots)
    check_device(bench.planes, rows, slots)
    assert stored.num_bytes == loaded.num_bytes == len(slots) * bench.layout.token_bytes
    assert loaded.is_layer_ready(bench.layout.num_layers - 1)
    del spans, stored, loaded


def test_nothing_but_the_run_is_written_to_a_host_slot(bench: Bench) -> None:
    slot = take(bench.pool, 1)[0]
    slot.view[:] = b"\xa5" * len(slot.view)
    n = bench.layout.block_tokens
    span = BlockSpan(slot, n, 1, n - 1)
    rows = snapshot(bench.planes)
    slots = list(range(10, 10 + n - 2))
    bench.run("store", [span], slots)
    wanted = bytearray(b"\xa5" * len(slot.view))
    at = bench.layout.header_bytes
    for plane, found in payload(bench.layout, rows, slots).items():
        row = bench.layout.planes[plane].row_bytes
        wanted[at + row : at + row + len(found)] = found
        at += row * n
    assert bytes(slot.view) == bytes(wanted)


def test_slots_may_come_as_a_tensor(bench: Bench) -> None:
    slot = take(bench.pool, 1)[0]
    rows = snapshot(bench.planes)
    slots = list(range(bench.layout.block_tokens))
    ticket = bench.transfer.store(make_job(1, [whole(slot, len(slots))], torch.tensor(slots)))
    assert ticket.wait(DEADLINE_S)
    check_host(bench, [whole(slot, len(slots))], slots, rows)


@pytest.fixture
def small() -> Iterator[Bench]:
    bench = Bench(LAYOUTS["kv"])
    yield bench
    bench.close()


def test_many_blocks_in_more_than_one_piece() -> None:
    layout = kv_layout(num_layers=2, row_bytes=4096, block_tokens=16)
    bench = Bench(layout, blocks=40, num_slots=700)
    spans = [whole(slot, 16) for slot in take(bench.pool, 40)]
    slots = random.Random(SEED).sample(range(700), 640)
    rows = snapshot(bench.planes)
    assert 2 * PIECE_BYTES < 640 * 2 * 4096
    bench.run("store", spans, slots)
    for tensor in bench.planes.planes:
        tensor.zero_()
    bench.run("load", spans, slots)
    check_device(bench.planes, rows, slots)
    del spans
    bench.close()


def test_two_regions_in_one_job(small: Bench) -> None:
    region, pool = make_pool(small.layout, 2)
    small.transfer.register(region)
    taken = [*take(small.pool, 1), *take(pool, 2), *take(small.pool, 1)]
    spans = [whole(slot, 8) for slot in taken]
    slots = random.Random(SEED).sample(range(NUM_SLOTS), 32)
    rows = snapshot(small.planes)
    small.run("store", spans, slots)
    check_host(small, spans, slots, rows)
    del taken, spans, pool
    small.let_go()
    region.close()
    assert not region.is_open


def test_an_empty_job_ends_well(small: Bench) -> None:
    small.run("store", [], [])
    small.run("load", [whole(take(small.pool, 1)[0], 4)][:0], [])


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize(
    "slots", [[-1], [NUM_SLOTS], [0, 1], []], ids=["negative", "too large", "too many", "too few"]
)
def test_bad_device_slots_are_refused_and_nothing_moves(
    small: Bench, direction: str, slots: list[int]
) -> None:
    slot = take(small.pool, 1)[0]
    before, rows = bytes(slot.view), snapshot(small.planes)
    with pytest.raises(TransferError, match="copy 7 refused") as caught:
        getattr(small.transfer, direction)(make_job(7, [BlockSpan(slot, 8, 2, 3)], slots))
    assert caught.value.job == 7
    small.run("store", [], [])
    assert bytes(slot.view) == before
    check_device(small.planes, rows, list(range(NUM_SLOTS)))


@pytest.mark.parametrize(
    ("num_tokens", "first", "last"), [(0, 0, 0), (9, 0, 9), (8, 3, 2), (4, 0, 5), (4, -1, 2)]
)
def test_impossible_spans_are_refused(small: Bench, num_tokens: int, first: int, last: int) -> None:
    span = BlockSpan(take(small.pool, 1)[0], num_tokens, first, last)
    with pytest.raises(TransferError, match="refused"):
        small.transfer.load(make_job(1, [span], list(range(max(0, last - first)))))


def test_other_slot_types_are_refused(small: Bench) -> None:
    span = whole(take(small.pool, 1)[0], 2)
    for slots in (torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)):
        with pytest.raises(TransferError, match="int64"):
            small.transfer.load(make_job(1, [span], slots))
    with pytest.raises(TransferError, match="array"):
        small.transfer.load(CopyJob(1, [span], array("i", [1, 2]), PassedFence()))


def test_short_slots_and_foreign_memory_are_refused(small: Bench) -> None:
    slot = take(small.pool, 1)[0]
    short = Slot(slot.index, slot.view[: small.layout.header_bytes + 10], slot.address)
    with pytest.raises(TransferError, match="too small"):
        small.transfer.store(make_job(1, [whole(short, 8)], list(range(8))))
    foreign = HostRegion(small.layout.slot_bytes)
    stranger = take(SlotPool(foreign, small.layout.slot_bytes), 1)[0]
    with pytest.raises(TransferError, match="no registered region"):
        small.transfer.store(make_job(1, [whole(slot, 8), whole(stranger, 8)], list(range(16))))
    del stranger
    foreign.close()


def test_a_region_is_registered_once_and_forgotten_when_it_closes(small: Bench) -> None:
    region, pool = make_pool(small.layout, 1)
    small.transfer.register(region)
    with pytest.raises(TransferError, match="already"):
        small.transfer.register(region)
    slot = take(pool, 1)[0]
    small.run("store", [whole(slot, 8)], list(range(8)))
    lost = Slot(0, memoryview(bytearray(len(slot.view))), slot.address)
    del slot, pool
    small.let_go()
    region.close()
    assert not region.is_open
    with pytest.raises(TransferError, match="no registered region"):
        small.transfer.store(make_job(1, [whole(lost, 8)], list(range(8))))
    with pytest.raises(TransferError, match="closed"):
        small.transfer.register(region)


@pytest.mark.parametrize("direction", ["load", "store"])
def test_nothing_moves_before_the_fence(small: Bench, direction: str) -> None:
    fence = HeldFence()
    slot = take(small.pool, 1)[0]
    before, rows = bytes(slot.view), snapshot(small.planes)
    ticket = getattr(small.transfer, direction)(make_job(1, [whole(slot, 8)], list(range(8)), fence))
    other = "store" if direction == "load" else "load"
    small.run(other, [], [])
    assert not ticket.wait(0.01)
    assert not ticket.is_layer_ready(0)
    assert bytes(slot.view) == before
    check_device(small.planes, rows, list(range(NUM_SLOTS)))
    fence.gate.set()
    assert ticket.wait(DEADLINE_S)
    assert ticket.is_ok
    assert ticket.pace[0] == ticket.num_bytes
    assert 0 < ticket.pace[1] <= ticket.seconds


def test_a_load_overtakes_queued_stores(small: Bench) -> None:
    fence = HeldFence()
    slots = take(small.pool, 3)
    held = small.transfer.load(make_job(0, [whole(slots[0], 8)], list(range(8)), fence))
    order: list[str] = []

    class Watched(HeldFence):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def is_passed(self) -> bool:
            if fence.is_passed() and self.name not in order:
                order.append(self.name)
            return fence.is_passed()

    tickets = [small.transfer.store(make_job(1, [whole(slots[1], 8)], list(range(8)), Watched("store")))]
    tickets += [small.transfer.load(make_job(2, [whole(slots[2], 8)], list(range(8, 16)), Watched("load")))]
    fence.gate.set()
    assert all(ticket.wait(DEADLINE_S) and ticket.is_ok for ticket in [held, *tickets])
    assert order == ["load", "store"]


def test_a_load_does_not_wait_for_the_end_of_a_long_store() -> None:
    """It is asked for while a piece of the store is being copied, and ends before the next one is."""
    layout = kv_layout(num_layers=4, row_bytes=PIECE_BYTES // 8, block_tokens=8)
    bench = Bench(layout, blocks=2, num_slots=16)
    first, second = take(bench.pool, 2)
    entered, asked = threading.Event(), threading.Event()
    loads: list[Ticket] = []
    behind: list[bool] = []
    store = bench.transfer._device.store

    def slow_store(plane: int, *args: object) -> None:
        if plane == 2:
            entered.set()
            asked.wait(DEADLINE_S)
        elif plane > 2:
            behind.append(loads[0].is_over)
        store(plane, *args)  # type: ignore[arg-type] # passed through

    bench.transfer._device.store = slow_store  # type: ignore[method-assign] # a slow device
    long = bench.transfer.store(make_job(1, [whole(first, 8)], list(range(8))))
    assert entered.wait(DEADLINE_S)
    loads.append(bench.transfer.load(make_job(2, [whole(second, 8)], list(range(8, 16)))))
    asked.set()
    assert long.wait(DEADLINE_S)
    assert long.is_ok
    assert loads[0].is_ok
    rest_of_the_piece, *others = behind
    assert not rest_of_the_piece
    assert len(others) > 4
    assert all(others)
    del first, second
    bench.close()


def test_layers_become_ready_in_order(small: Bench) -> None:
    seen: list[list[bool]] = []
    load = small.transfer._device.load

    def watched(plane: int, *args: object) -> None:
        seen.append([ticket.is_layer_ready(layer) for ticket in tickets for layer in range(3)])
        load(plane, *args)  # type: ignore[arg-type] # passed through

    small.transfer._device.load = watched  # type: ignore[method-assign] # watches each plane
    fence = HeldFence()
    tickets = [small.transfer.load(make_job(1, [whole(take(small.pool, 1)[0], 8)], list(range(8)), fence))]
    fence.gate.set()
    assert all(tickets[0].wait_layer(layer, DEADLINE_S) for layer in range(3))
    assert tickets[0].wait(DEADLINE_S)
    assert seen == [[False] * 3] * 2 + [[True, False, False]] * 2 + [[True, True, False]] * 2


def test_a_failing_copy_fails_alone(small: Bench) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("the device is on fire")

    load = small.transfer._device.load
    small.transfer._device.load = broken  # type: ignore[method-assign] # a device that fails
    slot = take(small.pool, 1)[0]
    ticket = small.transfer.load(make_job(9, [whole(slot, 8)], list(range(8))))
    assert ticket.wait(DEADLINE_S)
    assert ticket.is_over
    assert not ticket.is_ok
    assert ticket.error is not None
    assert ticket.error.job == 9
    assert "on fire" in str(ticket.error)
    assert not ticket.is_layer_ready(0)
    small.transfer._device.load = load  # type: ignore[method-assign] # works again
    small.run("load", [whole(slot, 8)], list(range(8)))
    del ticket


@pytest.mark.parametrize("call", ["is_passed", "wait"])
def test_a_fence_that_breaks_fails_its_copy_alone(small: Bench, call: str) -> None:
    """A device that has failed raises when it is asked: the thread goes on with the next copy."""

    class Broken(HeldFence):
        def is_passed(self) -> bool:
            return bool(call == "is_passed" and self._fail())

        def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - fails at once
            return self._fail()

        def _fail(self) -> bool:
            raise RuntimeError("the device is gone")

    (slot,) = take(small.pool, 1)
    ticket = small.transfer.load(make_job(9, [whole(slot, 8)], list(range(8)), Broken()))
    assert ticket.wait(DEADLINE_S)
    assert "the device is gone" in str(ticket.error)
    small.run("load", [whole(slot, 8)], list(range(8)))
    assert small.transfer.is_alive()
    del ticket, slot


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is meant to die
def test_a_transfer_whose_thread_has_died_takes_nothing_more_and_ends_what_it_had() -> None:
    """R85: nobody waits for a deadline, least of all each request after another."""
    bench = Bench(LAYOUTS["kv"])

    def die(*_: object) -> None:
        raise SystemExit

    bench.transfer._pause = die  # type: ignore[method-assign] # a thread that dies between two pieces
    slots = take(bench.pool, 2)
    ticket = bench.transfer.load(make_job(1, [whole(slots[0], 8)], list(range(8))))
    wait_until(lambda: not bench.transfer.is_alive(), "the thread has died")
    for direction in ("load", "store"):
        with pytest.raises(TransferError, match="copy 2 refused: .* has died"):
            getattr(bench.transfer, direction)(make_job(2, [whole(slots[1], 8)], list(range(8))))
    assert not ticket.is_over
    bench.transfer.close()
    assert "has died" in str(ticket.error)
    with pytest.raises(TransferError, match="closed"):
        bench.transfer.load(make_job(3, [whole(slots[1], 8)], list(range(8))))
    del slots, ticket
    bench.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is meant to die
def test_a_thread_that_died_inside_a_copy_does_not_keep_the_transfer_from_closing() -> None:
    """That copy has ended; the one behind it ends with the transfer."""
    bench = Bench(LAYOUTS["kv"])
    go_on = threading.Event()

    def die(*_: object) -> None:
        go_on.wait(DEADLINE_S)
        raise SystemExit

    bench.transfer._device.load = die  # type: ignore[method-assign] # a thread that dies inside a copy
    slots = take(bench.pool, 2)
    first, behind = (
        bench.transfer.load(make_job(number, [whole(slot, 8)], list(range(8))))
        for number, slot in enumerate(slots)
    )
    go_on.set()
    for thread in bench.transfer._threads:
        thread.join(DEADLINE_S)
    assert "SystemExit" in str(first.error)
    assert not behind.is_over
    bench.transfer.close()
    assert "closed before it began" in str(behind.error)
    del slots, first, behind
    bench.close()


def test_close_ends_queued_copies_with_an_error_and_lets_running_ones_finish() -> None:
    bench = Bench(LAYOUTS["kv"])
    entered, go_on = threading.Event(), threading.Event()
    store = bench.transfer._device.store

    def slow_store(*args: object) -> None:
        entered.set()
        go_on.wait(DEADLINE_S)
        store(*args)  # type: ignore[arg-type] # passed through

    bench.transfer._device.store = slow_store  # type: ignore[method-assign] # a slow device
    slots = take(bench.pool, 3)
    running = bench.transfer.store(make_job(1, [whole(slots[0], 8)], list(range(8))))
    assert entered.wait(DEADLINE_S)
    queued = [
        bench.transfer.store(make_job(2, [whole(slots[1], 8)], list(range(8)))),
        bench.transfer.load(make_job(3, [whole(slots[2], 8)], list(range(8, 16)), HeldFence())),
    ]
    closer = threading.Thread(target=bench.transfer.close)
    closer.start()
    assert all(ticket.wait(DEADLINE_S) for ticket in queued)
    assert not running.is_over
    go_on.set()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert running.is_ok
    assert ["closed" in str(ticket.error) for ticket in queued] == [True, True]
    with pytest.raises(TransferError, match="closed"):
        bench.transfer.store(make_job(4, [whole(slots[1], 8)], list(range(8))))
    bench.transfer.close()
    del slots, running, queued
    bench.close()
    assert not bench.region.is_open


def test_a_pool_that_does_not_fit_its_layout_is_refused_by_name() -> None:
    layout = kv_layout(num_layers=1, row_bytes=16, block_tokens=4)
    good = torch.zeros(8, 16, dtype=torch.uint8)
    faults = {
        "planes": (good,),
        "uint8": (good, good.view(torch.int16)),
        r"shape \(8, 8\)": (good, good[:, :8]),
        "stand 2 apart": (good, torch.zeros(8, 32, dtype=torch.uint8)[:, ::2]),
        "overlap": (good, torch.zeros(200, dtype=torch.uint8).as_strided((8, 16), (8, 1))),
    }
    for words, planes in faults.items():
        with pytest.raises(LayoutError, match=words):
            DevicePlanes(layout, planes, 8)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_mix_of_spans_survives_a_round_trip(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=2))
    layout = kv_layout(
        num_layers=data.draw(st.integers(1, 3)), row_bytes=rows, block_tokens=data.draw(st.integers(1, 9))
    )
    gap, count = 2 * data.draw(st.integers(0, 4)), data.draw(st.integers(0, 6))
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    bench = Bench(layout, blocks=6, gap=gap, num_slots=60)
    spans, slots = random_spans(layout, bench.pool, 60, rng, count)
    before = snapshot(bench.planes)
    bench.run("store", spans, slots)
    check_host(bench, spans, slots, before)
    for tensor in bench.planes.planes:
        tensor.zero_()
    bench.run("load", spans, slots)
    check_device(bench.planes, before, slots)
    del spans
    bench.close()
    assert not bench.region.is_open
