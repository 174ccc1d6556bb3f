"""CudaTransfer on a simulated device: the order of streams and events, under random interleaving."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv_core.buffers import HostRegion, SlotPool
from flexkv_core.errors import TransferError
from flexkv_core.layout import BlockLayout, kv_layout
from flexkv_core.metrics import Metrics
from flexkv_core.transfer import BlockSpan, Fence, HostSpans, Ticket
from flexkv_core.transfers.cuda_copy import CudaCopyConfig, CudaTransfer
from flexkv_core.transfers.gpu import PinError
from tests.support.simulated_gpu import SimulatedEvent, SimulatedGpu, SimulatedStream
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

NUM_SLOTS = 300
SEED = 7


class Bench:
    """A simulated device with a forward stream, a pool, a region and a transfer."""

    def __init__(
        self, layout: BlockLayout, config: CudaCopyConfig, *, seed: int = SEED, gap: int = 0, blocks: int = 10
    ) -> None:
        self.layout = layout
        self.gpu = SimulatedGpu(seed)
        self.forward: SimulatedStream = self.gpu.stream()
        self.planes = make_planes(layout, NUM_SLOTS, seed, gap=gap)
        self.metrics = Metrics()
        self.transfer = CudaTransfer(
            self.planes, streams=lambda: [self.forward], config=config, metrics=self.metrics, gpu=self.gpu
        )
        self.threads = [way.waiter._thread for way in self.transfer._ways.values()]
        self.region, self.pool = make_pool(layout, blocks)
        self.transfer.register(self.region)
        self.number = 0

    def forward_pass(self, value: int) -> None:
        """Queue a slow forward pass that writes ``value`` everywhere."""
        for _ in range(300):
            self.gpu.run(self.forward, lambda: None)
        self.gpu.run(self.forward, lambda: [plane.fill_(value) for plane in self.planes.planes] and None)

    def submit(
        self,
        direction: str,
        spans: Sequence[BlockSpan],
        slots: list[int],
        *,
        layerwise: bool = False,
        after: Fence | None = None,
    ) -> Ticket:
        self.number += 1
        job = make_job(self.number, spans, slots, after or self.transfer.fence(), layerwise=layerwise)
        ticket: Ticket = getattr(self.transfer, direction)(job)
        return ticket

    def run(
        self, direction: str, spans: Sequence[BlockSpan], slots: list[int], *, layerwise: bool = False
    ) -> Ticket:
        ticket = self.submit(direction, spans, slots, layerwise=layerwise)
        assert ticket.wait(DEADLINE_S)
        assert ticket.error is None
        return ticket

    def close(self) -> None:
        self.transfer.close()
        self.transfer.close()
        self.gpu.drain(self.forward)
        del self.pool
        self.region.close()
        assert not self.gpu.pinned
        self.gpu.close()
        ways = [*self.transfer._threads, *self.threads]
        assert not [thread.name for thread in ways if thread.is_alive()]


SMALL_RING = {
    "ring_bytes": 4096 * 4,
    "ring_parts": 2,
    "store_window_bytes": 6000,
    "pin_chunk_bytes": 3 * 4096,
}
CONFIGS = {
    "direct": CudaCopyConfig(method="direct", batch_bytes=5000),
    "staged": CudaCopyConfig(method="staged", **SMALL_RING),  # type: ignore[arg-type] # numbers by name
    "mixed": CudaCopyConfig(
        load_staged_bytes=4000, store_staged_bytes=4000, load_window_bytes=9000, **SMALL_RING
    ),  # type: ignore[arg-type] # numbers by name
}


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> CudaCopyConfig:
    return CONFIGS[request.param]


def check_host(bench: Bench, spans: Sequence[BlockSpan], slots: list[int], rows: list[np.ndarray]) -> None:
    at = 0
    for span in spans:
        run = slots[at : at + span.last - span.first]
        at += len(run)
        for plane, wanted in payload(bench.layout, rows, run).items():
            assert bytes(run_of(bench.layout, span, plane)) == wanted, (span, plane)


def round_trip(bench: Bench, rng: random.Random, count: int, *, layerwise: bool) -> None:
    spans, slots = random_spans(bench.layout, bench.pool, NUM_SLOTS, rng, count)
    rows = snapshot(bench.planes)
    around = [bytes(span.slot.view) for span in spans]
    bench.run("store", spans, slots)
    check_host(bench, spans, slots, rows)
    for span, before in zip(spans, around, strict=True):
        check_rest(bench.layout, span, before)
    for tensor in bench.planes.planes:
        tensor.zero_()
    ticket = bench.run("load", spans, slots, layerwise=layerwise)
    assert ticket.is_layer_ready(bench.layout.num_layers - 1)
    for tensor, before_rows in zip(bench.planes.planes, rows, strict=True):
        wanted = np.zeros_like(before_rows)
        wanted[slots] = before_rows[slots]
        np.testing.assert_array_equal(tensor.numpy(), wanted)
    for span in spans:
        bench.pool.give([span.slot.index])


def check_rest(layout: BlockLayout, span: BlockSpan, before: bytes) -> None:
    """A store wrote nothing of the slot but its run."""
    now = bytearray(span.slot.view)
    at = layout.header_bytes
    for plane in layout.planes:
        run = slice(at + span.first * plane.row_bytes, at + span.last * plane.row_bytes)
        now[run] = before[run]
        at += span.num_tokens * plane.row_bytes
    assert bytes(now) == before


@pytest.mark.parametrize("gap", [0, 24], ids=["packed", "strided"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_byte_comes_back(name: str, gap: int, layerwise: bool, config: CudaCopyConfig) -> None:
    bench = Bench(LAYOUTS[name], config, gap=gap)
    for seed in range(3):
        round_trip(bench, random.Random(seed), 10, layerwise=layerwise)
    bench.run("store", [], [])
    bench.close()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_job_survives_any_interleaving(data: st.DataObject) -> None:
    layout = kv_layout(
        num_layers=data.draw(st.integers(1, 5)),
        row_bytes=data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=2)),
        block_tokens=data.draw(st.integers(1, 9)),
    )
    config = CudaCopyConfig(
        method=data.draw(st.sampled_from(["direct", "staged", "auto"])),
        load_staged_bytes=data.draw(st.integers(0, 3000)),
        store_staged_bytes=data.draw(st.integers(0, 3000)),
        ring_bytes=4096 * data.draw(st.integers(1, 3)),
        ring_parts=data.draw(st.integers(1, 3)),
        batch_bytes=data.draw(st.integers(1, 4000)),
        load_window_bytes=data.draw(st.none() | st.integers(1, 3000)),
        store_window_bytes=data.draw(st.none() | st.integers(1, 3000)),
        pin_chunk_bytes=8192 + 4096 * data.draw(st.integers(0, 4)),
        pieces_at_once=data.draw(st.integers(0, 4)),
    )
    seed, gap = data.draw(st.integers(0, 1 << 32)), data.draw(st.integers(0, 5))
    count, layerwise = data.draw(st.integers(0, 10)), data.draw(st.booleans())
    bench = Bench(layout, config, seed=seed, gap=gap)
    round_trip(bench, random.Random(seed), count, layerwise=layerwise)
    bench.close()


def test_the_way_follows_from_size_and_shape() -> None:
    layout = LAYOUTS["kv"]
    bench = Bench(layout, CudaCopyConfig(load_staged_bytes=10 * layout.block_bytes, store_staged_bytes=1))
    spans = [whole(slot, 8) for slot in take(bench.pool, 10)]
    bench.gpu.log.clear()
    bench.run("load", spans[:9], list(range(72)))
    assert bench.gpu.log == ["direct"]
    bench.gpu.log.clear()
    bench.run("load", spans, list(range(80)))
    assert set(bench.gpu.log) == {"staged", "copy"}
    bench.gpu.log.clear()
    bench.run("store", [BlockSpan(spans[0].slot, 8, 2, 5)], [1, 2, 3])
    assert bench.gpu.log == ["direct"]
    del spans
    bench.close()


def test_thresholds_are_measured_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv_core.transfers.measure._SIZES", (4096, 30_000))
    bench = Bench(LAYOUTS["kv"], CudaCopyConfig(ring_bytes=1 << 16))
    round_trip(bench, random.Random(SEED), 10, layerwise=False)
    bench.close()


def test_a_store_sees_what_the_forward_pass_before_it_wrote(config: CudaCopyConfig) -> None:
    """HS-1: the pass is queued, not run, when the store is."""
    bench = Bench(LAYOUTS["kv"], config)
    spans, slots = [whole(slot, 8) for slot in take(bench.pool, 4)], list(range(32))
    bench.gpu.hold()
    bench.forward_pass(0x11)
    ticket = bench.submit("store", spans, slots)
    bench.gpu.run(bench.forward, lambda: None)
    assert not ticket.wait(0.02)
    bench.gpu.go()
    assert ticket.wait(DEADLINE_S)
    rows = [np.full((NUM_SLOTS, 64), 0x11, dtype=np.uint8)] * len(bench.planes.planes)
    check_host(bench, spans, slots, rows)
    del spans, ticket
    bench.close()


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_is_behind_every_pass_that_was_queued_before_it(
    config: CudaCopyConfig, layerwise: bool
) -> None:
    """HS-2: even one that was queued after the fence was taken writes before the load, not after."""
    bench = Bench(LAYOUTS["kv"], config)
    spans, slots = [whole(slot, 8) for slot in take(bench.pool, 4)], list(range(32))
    for plane in bench.planes.planes:
        plane.fill_(0x22)
    bench.run("store", spans, slots)
    bench.gpu.hold()
    early = bench.transfer.fence()
    bench.forward_pass(0x33)
    ticket = bench.submit("load", spans, slots, layerwise=layerwise, after=early)
    bench.gpu.go()
    assert ticket.wait(DEADLINE_S)
    for plane in bench.planes.planes:
        assert bool((plane[:32] == 0x22).all())
        assert bool((plane[32:] == 0x33).all())
    del spans, ticket
    bench.close()


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_engine_is_ordered_behind_a_load_without_waiting(config: CudaCopyConfig, by_layer: bool) -> None:
    bench = Bench(LAYOUTS["kv"], config)
    spans, slots = [whole(slot, 8) for slot in take(bench.pool, 4)], list(range(32))
    rows = snapshot(bench.planes)
    bench.run("store", spans, slots)
    for plane in bench.planes.planes:
        plane.zero_()
    if config.load_window_bytes is None:
        bench.gpu.hold()
    ticket = bench.submit("load", spans, slots, layerwise=by_layer)
    seen: dict[int, bytes] = {}
    for layer in range(3):
        ordered = ticket.order_layer(layer, DEADLINE_S) if by_layer else ticket.order_layer(2, DEADLINE_S)
        assert ordered
        bench.gpu.run(
            bench.forward,
            lambda at=layer: seen.update({at: bench.planes.planes[2 * at][:32].numpy().tobytes()}),
        )
    if config.load_window_bytes is None:
        assert not ticket.is_over
        assert ticket.order_behind(DEADLINE_S)
    bench.gpu.go()
    assert ticket.wait(DEADLINE_S)
    bench.gpu.drain(bench.forward)
    assert seen == {layer: rows[2 * layer][:32].tobytes() for layer in range(3)}
    assert ticket.order_behind(DEADLINE_S)
    del spans, ticket
    bench.close()


def test_a_stream_is_told_once_to_wait_for_a_layer() -> None:
    """Every pass asks twice a layer while the load runs; another stream that asks is told in its turn."""
    bench = Bench(LAYOUTS["kv"], CONFIGS["direct"])
    spans, slots = [whole(slot, 8) for slot in take(bench.pool, 4)], list(range(32))
    streams = [bench.forward, bench.gpu.stream()]
    told: list[SimulatedStream] = []
    plain = bench.gpu.wait

    def wait(stream: SimulatedStream, event: Any) -> None:
        if stream in streams:
            told.append(stream)
        plain(stream, event)

    bench.gpu.hold()
    ticket = bench.submit("load", spans, slots, layerwise=True)
    bench.gpu.wait = wait  # type: ignore[method-assign] # counts
    for _ in range(2):
        assert ticket.order_layer(1, DEADLINE_S)
        assert ticket.order_layer(0, DEADLINE_S)
    assert told == [bench.forward]
    ticket._streams = lambda: streams  # type: ignore[attr-defined] # CudaTicket
    for _ in range(2):
        assert ticket.order_layer(0, DEADLINE_S)
    assert told == streams
    bench.gpu.go()
    assert ticket.wait(DEADLINE_S)
    bench.gpu.drain(streams[1])
    del spans, ticket
    bench.close()


@pytest.mark.parametrize("fault", [RuntimeError, ValueError])
def test_a_load_that_cannot_be_timed_is_well(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While another thread captures a graph the driver may refuse to tell times; other faults are told."""

    def refused(*_: object) -> float:
        raise fault("operation not permitted when stream is capturing")

    bench = Bench(LAYOUTS["kv"], CONFIGS["direct"])
    monkeypatch.setattr(SimulatedEvent, "elapsed_time", refused)
    for slot in take(bench.pool, 2):
        assert bench.run("load", [whole(slot, 8)], list(range(8))).pace == (0, 0.0)
    assert len(caplog.records) == (fault is ValueError)
    bench.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is meant to die
@pytest.mark.parametrize("name", ["direct", "staged"])
def test_close_ends_everything_though_a_thread_died_inside_a_copy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that were submitted end well, the one behind fails, and waiters and lanes are closed."""
    bench = Bench(LAYOUTS["kv"], CONFIGS[name])
    slots = take(bench.pool, 3)
    well = bench.submit("load", [whole(slots[0], 8)], list(range(8)))
    go_on, fence = threading.Event(), HeldFence()
    lane = bench.transfer._ways[True].lane

    def die(*_: object) -> None:
        go_on.wait(DEADLINE_S)
        raise SystemExit

    monkeypatch.setattr(lane, "submit", die)
    first, behind = (
        bench.submit("load", [whole(slot, 8)], list(range(8)), after=fence) for slot in slots[1:]
    )
    fence.gate.set()
    go_on.set()
    assert first.wait(DEADLINE_S)
    wait_until(lambda: not bench.transfer.is_alive(), "the thread has died")
    assert not behind.is_over
    bench.transfer.close()
    assert well.is_ok
    assert "SystemExit" in str(first.error)
    assert "closed before it began" in str(behind.error)
    assert not [thread for thread in bench.threads if thread.is_alive()]
    del slots, well, first, behind
    bench.close()


def test_a_step_of_close_that_fails_skips_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["direct"])

    def broken() -> list[object]:
        raise RuntimeError("a listener is broken")

    with monkeypatch.context() as patched:
        patched.setattr(bench.transfer._queue, "take_rest", broken)
        with pytest.raises(RuntimeError, match="a listener"):
            bench.transfer.close()
    assert not [thread for thread in bench.threads if thread.is_alive()]
    bench.close()


class Ticking:
    """A clock that goes on a little whenever it is looked at.  Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 1000.0

    def __call__(self, seconds: float = 1e-6) -> float:
        with self._lock:
            self._now += seconds
            return self._now


@pytest.mark.parametrize("name", ["direct", "staged"])
def test_the_pace_of_loads_leaves_out_what_they_waited_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load every copy stands behind a pass, and behind other loads: that says nothing of the link.

    What the copy engine brings into the ring meanwhile is left out, too.
    """
    bench = Bench(LAYOUTS["kv"], CONFIGS[name])
    spans, slots = [whole(slot, 8) for slot in take(bench.pool, 10)], list(range(80))
    in_ring = bench.transfer._ways[True].lane.ring_bytes if name == "staged" else 0
    clock = Ticking()
    monkeypatch.setattr("flexkv_core.transfers.way.perf_counter", clock)
    monkeypatch.setattr("tests.support.simulated_gpu.perf_counter", clock)
    bench.gpu.hold()
    bench.forward_pass(1)
    tickets = [bench.submit("load", spans, slots) for _ in range(2)]
    for ticket in tickets:
        wait_until(lambda ticket=ticket: ticket._marks, "all of it is submitted")
    clock(held := 10.0)
    bench.gpu.go()
    for ticket in tickets:
        assert ticket.wait(DEADLINE_S)
        assert ticket.seconds >= held
        num_bytes, seconds = ticket.pace
        assert num_bytes == ticket.num_bytes - in_ring
        assert 0 < seconds <= ticket.seconds - held
    del spans, tickets, ticket
    bench.close()


@pytest.mark.parametrize("wider", [0, 4096], ids=["slots of the layout", "wider slots across chunks"])
@pytest.mark.parametrize("sizes", [[4] * 9, [4, 4, 3, 4, 1]], ids=["full", "partly filled"])
def test_spans_may_be_columns(config: CudaCopyConfig, sizes: list[int], wider: int) -> None:
    layout = LAYOUTS["latent"]
    bench = Bench(layout, config, blocks=1)
    region = HostRegion(10 * (layout.slot_bytes + wider))
    pool = SlotPool(region, layout.slot_bytes + wider)
    bench.transfer.register(region)
    count = len(sizes)
    spans = HostSpans(pool, [9, 1, 8, 2, 7, 3, 6, 4, 5][:count], sizes, [0] * count, sizes)
    slots = random.Random(SEED).sample(range(NUM_SLOTS), sum(sizes))
    rows = snapshot(bench.planes)
    bench.run("store", spans, slots)
    check_host(bench, spans, slots, rows)
    for tensor in bench.planes.planes:
        tensor.zero_()
    bench.run("load", spans, slots, layerwise=wider > 0)
    for tensor, before in zip(bench.planes.planes, rows, strict=True):
        wanted = np.zeros_like(before)
        wanted[slots] = before[slots]
        np.testing.assert_array_equal(tensor.numpy(), wanted)
    for at in (-(1 << 40), 1 << 40):
        bad = HostSpans(pool, [at], [4], [0], [4])
        with pytest.raises(TransferError, match="no registered region"):
            bench.submit("load", bad, list(range(4)))
    bench.gpu.drain(bench.forward)
    del spans, bad, pool
    region.close()
    bench.close()


def test_a_small_copy_is_submitted_by_the_calling_thread() -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["staged"])
    spans = [whole(slot, 8) for slot in take(bench.pool, 10)]
    bench.gpu.hold()
    small = bench.submit("load", spans[:1], list(range(8)))
    assert small.order_layer(2, 0.0)
    large = bench.submit("load", spans, list(range(80)))
    behind = bench.submit("load", spans[:1], list(range(8)))
    assert behind.order_layer(2, DEADLINE_S)
    assert large.order_layer(2, 0.0)
    bench.gpu.go()
    assert all(ticket.wait(DEADLINE_S) and ticket.is_ok for ticket in (small, large, behind))
    bench.gpu.binds = False
    late = bench.submit("load", spans[:1], list(range(8)))
    assert late.order_layer(2, DEADLINE_S)
    assert late.wait(DEADLINE_S)
    del spans, small, large, behind, late
    bench.close()


def test_an_interrupt_while_submitting_goes_on_and_ends_the_copy() -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["staged"])
    spans = [whole(slot, 8) for slot in take(bench.pool, 8)]
    bench.gpu.fault = KeyboardInterrupt("from the engine's terminal")
    bench.gpu.fail_after = 1
    with pytest.raises(KeyboardInterrupt):
        bench.submit("store", spans, list(range(64)))
    bench.gpu.fail_after = None
    for span in spans:
        bench.pool.give([span.slot.index])
    round_trip(bench, random.Random(SEED), 10, layerwise=False)
    del spans
    bench.close()


def test_ordering_is_refused_where_it_cannot_be_done() -> None:
    bench = Bench(LAYOUTS["kv"], CudaCopyConfig(method="direct"))
    span = whole(take(bench.pool, 1)[0], 8)
    fence = HeldFence()
    ticket = bench.submit("load", [span], list(range(8)), after=fence)
    assert not ticket.order_behind(0.001)
    fence.gate.set()
    assert ticket.wait(DEADLINE_S)
    assert ticket.order_behind(DEADLINE_S)
    bench.gpu.captures = True
    assert ticket.order_layer(0, 0.0)
    bench.gpu.hold()
    second = bench.submit("load", [span], list(range(8)))
    assert not second.order_layer(0, DEADLINE_S)
    bench.gpu.go()
    assert second.wait(DEADLINE_S)
    del span, ticket, second
    bench.close()


def test_device_slots_may_lie_on_the_device() -> None:
    """They are read there, behind what makes them, and checked by the kernel."""
    bench = Bench(LAYOUTS["kv"], CONFIGS["staged"])
    bench.gpu.holds_tensors = True
    spans = [whole(slot, 8) for slot in take(bench.pool, 2)]
    slots = torch.full((16,), -1)
    rows = snapshot(bench.planes)
    bench.gpu.hold()
    bench.gpu.run(bench.forward, lambda: slots.copy_(torch.arange(20, 36)) is None)
    ticket = bench.transfer.store(make_job(1, spans, slots))
    bench.gpu.go()
    assert ticket.wait(DEADLINE_S)
    assert ticket.is_ok
    check_host(bench, spans, list(range(20, 36)), rows)
    slots[3] = NUM_SLOTS
    late = bench.transfer.store(make_job(2, spans, slots))
    assert late.wait(DEADLINE_S)
    assert "beyond the pool" in str(late.error)
    with pytest.raises(TransferError, match="16 tokens"):
        bench.transfer.store(make_job(3, spans, slots[:9]))
    del spans, ticket, late
    bench.close()


def test_a_foreign_fence_is_waited_for_by_the_worker() -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["staged"])
    span = whole(take(bench.pool, 1)[0], 8)
    before = bytes(span.slot.view)
    fence = HeldFence()
    ticket = bench.submit("store", [span], list(range(8)), after=fence)
    bench.run("load", [], [])
    assert not ticket.is_over
    assert bytes(span.slot.view) == before
    fence.gate.set()
    assert ticket.wait(DEADLINE_S)
    assert ticket.is_ok
    del span, ticket
    bench.close()


def test_a_load_does_not_wait_for_the_window_of_the_stores() -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["staged"])
    slots = take(bench.pool, 10)
    gate = threading.Event()
    bench.gpu.run(bench.forward, lambda: gate.wait(DEADLINE_S) and None)
    stores = [
        bench.submit("store", [whole(slot, 8) for slot in slots[:9]], list(range(72))) for _ in range(3)
    ]
    quiet: SimulatedStream = bench.gpu.stream()
    bench.forward, held = quiet, bench.forward
    load = bench.submit("load", [whole(slots[9], 8)], list(range(100, 108)))
    assert load.order_layer(2, DEADLINE_S)
    assert not any(ticket.is_over for ticket in stores)
    gate.set()
    assert all(ticket.wait(DEADLINE_S) and ticket.is_ok for ticket in [*stores, load])
    bench.gpu.drain(held)
    del slots, stores, load
    bench.close()


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_launch_that_fails_ends_its_copy_after_all_has_come_to_rest(direction: str, after: int) -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["staged"])
    spans = [whole(slot, 8) for slot in take(bench.pool, 8)]
    bench.gpu.fail_after = after
    ticket = bench.submit(direction, spans, list(range(64)))
    assert ticket.wait(DEADLINE_S)
    assert ticket.error is not None
    assert "launch refused" in str(ticket.error)
    assert not ticket.order_behind(DEADLINE_S)
    bench.gpu.fail_after = None
    for span in spans:
        bench.pool.give([span.slot.index])
    round_trip(bench, random.Random(SEED), 10, layerwise=False)
    del spans, ticket
    bench.close()


def test_a_device_that_dies_fails_the_copies_under_way() -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["direct"])
    span = whole(take(bench.pool, 1)[0], 8)
    bench.gpu.hold()
    bench.gpu.run(bench.forward, lambda: ctypes.c_int.from_buffer(b"") and None)
    ticket = bench.submit("store", [span], list(range(8)))
    bench.gpu.go()
    assert ticket.wait(DEADLINE_S)
    assert ticket.error is not None
    with pytest.raises(RuntimeError, match="device has failed"):
        bench.submit("store", [span], list(range(8)))
    bench.transfer.close()
    bench.gpu.close()


def test_close_waits_for_what_runs_and_fails_what_is_queued() -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["direct"])
    slots = take(bench.pool, 3)
    bench.gpu.hold()
    running = bench.submit("store", [whole(slots[0], 8)], list(range(8)))
    assert running.order_layer(2, DEADLINE_S)
    queued = bench.submit("store", [whole(slots[1], 8)], list(range(8)), after=HeldFence())
    closer = threading.Thread(target=bench.transfer.close)
    closer.start()
    assert queued.wait(DEADLINE_S)
    assert "closed" in str(queued.error)
    assert not running.is_over
    bench.gpu.go()
    closer.join(DEADLINE_S)
    assert running.is_ok
    with pytest.raises(TransferError, match="closed"):
        bench.submit("load", [whole(slots[2], 8)], list(range(8)))
    del slots, running, queued
    bench.close()


@pytest.fixture
def unpinnable() -> Iterator[SimulatedGpu]:
    gpu = SimulatedGpu(SEED)
    gpu.most_pins = 2
    yield gpu
    gpu.close()


def test_a_region_that_cannot_be_pinned_is_rolled_back_and_refused(unpinnable: SimulatedGpu) -> None:
    layout = LAYOUTS["kv"]
    config = CudaCopyConfig(method="direct", pin="require", pin_chunk_bytes=4096)
    stream = unpinnable.stream()
    transfer = CudaTransfer(
        make_planes(layout, 9, 1), streams=lambda: [stream], config=config, gpu=unpinnable
    )
    region, _ = make_pool(layout, 3)
    with pytest.raises(PinError, match="cannot be locked") as caught:
        transfer.register(region)
    assert caught.value.status == 2
    assert f"16,384 of {region.num_bytes:,} B were pinned" in str(caught.value)
    assert "ulimit -l" in str(caught.value)
    assert not unpinnable.pinned
    assert not region.on_close
    unpinnable.pin_status = 100
    with pytest.raises(PinError, match=r"cudaHostRegister failed with error code 100 .*CUDA_VISIBLE_DEVICES"):
        transfer.register(region)
    transfer.close()
    region.close()


def test_without_pinning_all_goes_through_the_ring(
    unpinnable: SimulatedGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS["unequal"]
    unpinnable.most_pins = 0
    bench = Bench.__new__(Bench)
    bench.layout, bench.gpu, bench.number = layout, unpinnable, 0
    bench.forward = unpinnable.stream()
    bench.planes = make_planes(layout, NUM_SLOTS, SEED)
    bench.metrics = Metrics()
    bench.transfer = CudaTransfer(
        bench.planes, streams=lambda: [bench.forward], metrics=bench.metrics, gpu=unpinnable
    )
    bench.region, bench.pool = make_pool(layout, 10)
    bench.transfer.register(bench.region)
    assert "not pinned" in caplog.text
    assert bench.metrics.snapshot()["host_pinned"] == 0
    seen: set[tuple[str, bool]] = set()

    def watched(plain: Any) -> Any:
        def call(*args: Any, may_block: bool, **more: Any) -> None:
            seen.add((threading.current_thread().name, may_block))
            plain(*args, may_block=may_block, **more)

        return call

    for name in ("copy", "copy_run"):
        monkeypatch.setattr(unpinnable, name, watched(getattr(unpinnable, name)))
    round_trip(bench, random.Random(SEED), 10, layerwise=False)
    assert "direct" not in unpinnable.log
    # The driver copies pageable memory while it is called: never on the engine's thread, and never with the
    # interpreter's lock.
    assert seen == {("flexkv-copy-0-load", True), ("flexkv-copy-0-store", True)}
    bench.transfer.close()
    del bench.pool
    bench.region.close()


def test_pinned_memory_is_measured_and_unpinned_when_the_region_closes() -> None:
    bench = Bench(LAYOUTS["kv"], CONFIGS["staged"])
    assert bench.metrics.snapshot()["host_pinned"] == 1
    assert sorted(bench.gpu.pinned) == list(
        range(bench.region.address, bench.region.address + bench.region.num_bytes, bench.layout.slot_bytes)
    )
    del bench.pool
    region = bench.region
    bench.region, bench.pool = make_pool(bench.layout, 1)
    region.close()
    assert not region.is_open
    assert not bench.gpu.pinned
    bench.close()
