"""Passes that wait for layers, over the real transfers: CUDA's on a simulated device, torch's on a CPU."""

from __future__ import annotations

import time

import pytest

from flexkv_core.layerwise.counters import LayerCounters
from flexkv_core.layerwise.waits import LayerWaits
from flexkv_core.layout import kv_layout
from flexkv_core.transfer import Ticket
from flexkv_core.transfers.cuda_copy import CudaCopyConfig
from flexkv_core.transfers.torch_copy import TorchTransfer
from tests.support.transfer_pools import (
    LAYOUTS,
    HeldFence,
    make_job,
    make_planes,
    make_pool,
    snapshot,
    take,
    whole,
)
from tests.support.waiting import DEADLINE_S
from tests.transfers.test_cuda_transfer import CONFIGS, Bench

LAYERS = 3


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> CudaCopyConfig:
    return CONFIGS[request.param]


def _two_loads(bench: Bench) -> tuple[list[Ticket], list[bytes]]:
    """Two layerwise loads of what the pool held, which is wiped; and what each layer's keys must be."""
    spans = [whole(slot, 8) for slot in take(bench.pool, 8)]
    rows = snapshot(bench.planes)
    bench.run("store", spans, list(range(64)))
    bench.gpu.drain(bench.forward)
    for plane in bench.planes.planes:
        plane.zero_()
    loads = [(spans[:4], list(range(32))), (spans[4:], list(range(32, 64)))]
    if bench.transfer.config.load_window_bytes is None:
        bench.gpu.hold()
    tickets = [bench.submit("load", part, slots, layerwise=True) for part, slots in loads]
    return tickets, [rows[2 * layer][:64].tobytes() for layer in range(LAYERS)]


@pytest.mark.parametrize("captures", [False, True], ids=["streams", "a stream that is captured"])
def test_a_pass_reads_each_layer_of_all_loads(config: CudaCopyConfig, captures: bool) -> None:
    """R59, R81, HS-5: the device stands still, and the thread still gets to the end of its pass.

    A stream that is being captured cannot be told to wait: there the thread waits for the bytes.
    """
    bench = Bench(LAYOUTS["kv"], config)
    waits = LayerWaits(LayerCounters(LAYERS), timeout_s=DEADLINE_S, is_alive=bench.transfer.is_alive)
    tickets, wanted = _two_loads(bench)
    loads = [waits.open(ticket, ticket.job.number) for ticket in tickets]
    bench.gpu.captures = captures
    if captures:
        bench.gpu.go()
    seen: dict[int, bytes] = {}
    for layer in range(LAYERS):
        waits.wait_until(layer)
        bench.gpu.run(
            bench.forward,
            lambda at=layer: seen.update({at: bench.planes.planes[2 * at][:64].numpy().tobytes()}),
        )
    if captures:
        assert [load.ready_to for load in loads] == [LAYERS - 1] * 2
    elif config.load_window_bytes is None:
        assert not any(ticket.is_over for ticket in tickets)
        assert all(load.is_ordered for load in loads)
    bench.gpu.go()
    assert all(ticket.wait(DEADLINE_S) and ticket.is_ok for ticket in tickets)
    bench.gpu.drain(bench.forward)
    assert seen == dict(enumerate(wanted))
    assert len(waits.collect()) == 2
    assert not waits.take_failed()
    waits.close()
    del tickets, loads
    bench.close()


def test_a_device_that_fails_wakes_the_pass() -> None:
    """R85: a CUDA error ends the wait within a second, with its reason."""
    bench = Bench(LAYOUTS["kv"], CONFIGS["direct"])
    waits = LayerWaits(LayerCounters(LAYERS), timeout_s=240)
    spans = [whole(slot, 8) for slot in take(bench.pool, 4)]
    bench.gpu.captures = True  # so that the thread waits for the bytes
    bench.gpu.fail_after = 0
    ticket = bench.submit("load", spans, list(range(32)), layerwise=True)
    waits.open(ticket, 5)
    began = time.monotonic()
    waits.wait_until(0)
    assert time.monotonic() - began < 60
    (failed,) = waits.take_failed()
    assert "task 5" in failed.failure
    assert "launch refused" in failed.failure
    bench.gpu.fail_after = None
    waits.close()
    del spans, ticket, failed
    bench.close()


def _end_thread(_fault: Exception | None) -> None:
    raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is meant to die
def test_a_waiter_that_has_died_wakes_the_pass() -> None:
    """R85: nobody would ever tell of an end; the pass learns it as soon as of a dead worker."""
    bench = Bench(LAYOUTS["kv"], CONFIGS["direct"])
    waits = LayerWaits(LayerCounters(LAYERS), timeout_s=240, is_alive=bench.transfer.is_alive)
    spans = [whole(slot, 8) for slot in take(bench.pool, 4)]
    assert bench.transfer.is_alive()
    bench.transfer._ways[True].waiter.put(bench.gpu.event(), _end_thread)
    ticket = bench.submit("load", spans, list(range(32)), layerwise=True)
    bench.gpu.captures = True  # so that the thread waits for the bytes
    waits.open(ticket, 5)
    began = time.monotonic()
    waits.wait_until(0)
    assert time.monotonic() - began < 60
    (failed,) = waits.take_failed()
    assert "has died" in failed.failure
    bench.gpu.drain(bench.forward)
    waits.close()
    del spans, ticket, failed
    bench.close()


def test_loads_of_a_batch_take_turns() -> None:
    """R92, HU-31: every load has its first layer before any has its last."""
    layout = kv_layout(num_layers=4, row_bytes=64, block_tokens=8)
    planes = make_planes(layout, 300, seed=7)
    transfer = TorchTransfer(planes)
    region, pool = make_pool(layout, 12)
    transfer.register(region)
    fence, order = HeldFence(), []
    tickets = []
    for number in range(3):
        spans = [whole(slot, 8) for slot in take(pool, 4)]
        job = make_job(number, spans, list(range(32 * number, 32 * number + 32)), fence, layerwise=True)
        ticket = transfer.load(job)
        ticket.listen(lambda count, number=number: order.append((number, count)))
        tickets.append(ticket)
    fence.gate.set()
    assert all(ticket.wait(DEADLINE_S) and ticket.is_ok for ticket in tickets)
    first = [order.index((number, 1)) for number in range(3)]
    last = [order.index((number, 4)) for number in range(3)]
    assert max(first) < min(last), order
    transfer.close()
    del spans, job, ticket, tickets, pool
    region.close()


def test_a_load_whose_turn_has_not_come_holds_up_no_other() -> None:
    """It waits for an earlier pass, which may itself wait for the load before it."""
    layout = kv_layout(num_layers=2, row_bytes=64, block_tokens=8)
    planes = make_planes(layout, 300, seed=7)
    transfer = TorchTransfer(planes)
    region, pool = make_pool(layout, 4)
    transfer.register(region)
    spans = [whole(slot, 8) for slot in take(pool, 2)]
    fence = HeldFence()
    later = transfer.load(make_job(2, spans[1:], list(range(8, 16)), fence, layerwise=True))
    first = transfer.load(make_job(1, spans[:1], list(range(8)), layerwise=True))
    assert first.wait(DEADLINE_S)
    assert not later.is_over
    fence.gate.set()
    assert later.wait(DEADLINE_S)
    transfer.close()
    del spans, pool, first, later
    region.close()
