"""Forward passes that await their loads layer by layer, on a real device."""

from __future__ import annotations

import random
from time import perf_counter

import pytest
import torch

from flexkv_core.layerwise.counters import LayerCounters
from flexkv_core.layerwise.waits import LayerWaits
from flexkv_core.layout import kv_layout
from tests.support.transfer_pools import take, whole
from tests.transfers.test_cuda import CONFIGS, DEADLINE_S, Bench, delay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS, TOKENS, BLOCKS = 12, 16, 48
SEED = 23
ROUNDS = 150


@pytest.mark.parametrize("name", CONFIGS)
def test_each_layer_of_every_load_is_there_when_a_pass_reads_it(name: str) -> None:
    """R59, R81, R82: one to four loads a batch, a pass behind another, pages poisoned in between."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    layout = kv_layout(num_layers=LAYERS, row_bytes=512, block_tokens=TOKENS)
    bench = Bench(layout, CONFIGS[name], num_slots=TOKENS * BLOCKS, blocks=BLOCKS)
    waits = LayerWaits(LayerCounters(LAYERS), timeout_s=DEADLINE_S, is_alive=bench.transfer.is_alive)
    spans = [whole(slot, TOKENS) for slot in take(bench.pool, BLOCKS)]
    slots = list(range(TOKENS * BLOCKS))
    wanted = [plane.clone() for plane in bench.planes.planes]
    bench.run("store", spans, slots)
    faults = torch.zeros((), dtype=torch.int64, device="cuda")
    longest = 0.0
    for number in range(ROUNDS):
        with torch.cuda.stream(bench.forward):
            for plane in bench.planes.planes:
                plane.fill_(0xDB)
        if number % 10 == 0:
            delay(bench.forward)
        chosen = rng.sample(range(BLOCKS), rng.randint(4, 32))
        cuts = sorted(rng.sample(range(1, len(chosen)), rng.randint(0, 3)))
        parts = [chosen[a:b] for a, b in zip([0, *cuts], [*cuts, len(chosen)], strict=True)]
        for part in parts:
            rows = [block * TOKENS + token for block in part for token in range(TOKENS)]
            ticket = bench.submit("load", [spans[block] for block in part], rows, layerwise=True)
            while not waits.may_open:
                waits.collect()
            waits.open(ticket, number)
        at = torch.tensor(
            [block * TOKENS + token for block in chosen for token in range(TOKENS)], device="cuda"
        )
        bench.forward.wait_stream(torch.cuda.current_stream())
        began = perf_counter()
        with torch.cuda.stream(bench.forward):
            for layer in range(LAYERS):
                waits.wait_until(layer)
                for plane in (2 * layer, 2 * layer + 1):
                    faults += (bench.planes.planes[plane][at] != wanted[plane][at]).sum()
            at.record_stream(bench.forward)
        if number % 10:
            longest = max(longest, perf_counter() - began)
        waits.begin_batch()
        waits.collect()
    torch.cuda.synchronize()
    assert int(faults) == 0
    assert not waits.take_failed()
    print(f"longest time to queue a pass: {longest * 1e3:.2f} ms")
    waits.close()
    del spans, ticket
    bench.close()


def test_a_captured_stream_waits_for_the_bytes() -> None:
    """What is captured must hold without waiting: the thread waits until the layer is there."""
    layout = kv_layout(num_layers=LAYERS, row_bytes=512, block_tokens=TOKENS)
    bench = Bench(layout, CONFIGS["direct"], num_slots=TOKENS * BLOCKS, blocks=BLOCKS)
    waits = LayerWaits(LayerCounters(LAYERS), timeout_s=DEADLINE_S, is_alive=bench.transfer.is_alive)
    spans = [whole(slot, TOKENS) for slot in take(bench.pool, BLOCKS)]
    slots = list(range(TOKENS * BLOCKS))
    wanted = bench.planes.planes[-1].clone()
    bench.run("store", spans, slots)
    bench.planes.planes[-1].zero_()
    torch.cuda.synchronize()
    load = waits.open(bench.submit("load", spans, slots, layerwise=True), 1)
    out = torch.empty_like(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        waits.wait_until(LAYERS - 1)
        out.copy_(bench.planes.planes[-1])
    assert load.ready_to == LAYERS - 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    waits.collect()
    waits.close()
    del spans, load
    bench.close()
