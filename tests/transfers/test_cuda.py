"""CudaTransfer on a real device: bytes, orders and the poison that must never be stored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from flexkv_core.errors import TransferError
from flexkv_core.layout import BlockLayout, kv_layout
from flexkv_core.transfer import BlockSpan, HostSpans, Ticket
from flexkv_core.transfers.cuda_copy import CudaCopyConfig, CudaTransfer
from flexkv_core.transfers.cuda_gpu import CudaGpu
from flexkv_core.transfers.cuda_ticket import CudaFence
from flexkv_core.transfers.torch_copy import TorchTransfer
from flexkv_core.transfers.worker import QueuedTransfer
from tests.support.transfer_pools import (
    LAYOUTS,
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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEADLINE_S = 60.0
SEED = 11
SMALL_RING = CudaCopyConfig(
    method="staged", ring_bytes=1 << 20, ring_parts=2, store_window_bytes=1 << 19, pin_chunk_bytes=3 << 19
)
CONFIGS = {
    "direct": CudaCopyConfig(method="direct", batch_bytes=100_000),
    "staged": SMALL_RING,
    "mixed": replace(SMALL_RING, method="auto", load_staged_bytes=100_000, store_staged_bytes=100_000),
}
REAL = {
    "qwen3-8b": kv_layout(num_layers=36, row_bytes=2048),
    "fp8": kv_layout(num_layers=8, row_bytes=1024, dtype="float8_e4m3fn"),
    "latent": kv_layout(num_layers=12, row_bytes=(1152,), page_tokens=64),
}


class Bench:
    """A pool on the device, pinned host slots and a transfer between them."""

    def __init__(
        self,
        layout: BlockLayout,
        config: CudaCopyConfig | None,
        *,
        num_slots: int,
        gap: int = 0,
        blocks: int = 12,
    ) -> None:
        self.layout, self.num_slots = layout, num_slots
        self.planes = make_planes(layout, num_slots, SEED, gap=gap, device="cuda")
        self.forward = torch.cuda.Stream()
        self.transfer: QueuedTransfer = (
            CudaTransfer(self.planes, streams=self.streams, config=config) if config else self.plain()
        )
        self.region, self.pool = make_pool(layout, blocks)
        self.transfer.register(self.region)
        self.number = 0
        torch.cuda.synchronize()

    def streams(self) -> list[torch.cuda.Stream]:
        return [self.forward, torch.cuda.current_stream()]

    def plain(self) -> TorchTransfer:
        gpu = CudaGpu(self.planes.device)
        return TorchTransfer(self.planes, fence=lambda: CudaFence(gpu, self.streams()))

    def submit(
        self,
        direction: str,
        spans: Sequence[BlockSpan],
        slots: list[int] | torch.Tensor,
        *,
        layerwise: bool = False,
    ) -> Ticket:
        self.number += 1
        job = make_job(self.number, spans, slots, self.transfer.fence(), layerwise=layerwise)
        ticket: Ticket = getattr(self.transfer, direction)(job)
        return ticket

    def run(
        self,
        direction: str,
        spans: Sequence[BlockSpan],
        slots: list[int] | torch.Tensor,
        *,
        layerwise: bool = False,
    ) -> None:
        ticket = self.submit(direction, spans, slots, layerwise=layerwise)
        assert ticket.wait(DEADLINE_S)
        assert ticket.error is None

    def check_host(self, spans: Sequence[BlockSpan], slots: list[int], rows: list[np.ndarray]) -> None:
        at = 0
        for span in spans:
            run = slots[at : at + span.last - span.first]
            at += len(run)
            for plane, wanted in payload(self.layout, rows, run).items():
                assert bytes(run_of(self.layout, span, plane)) == wanted, (span.slot.index, plane)

    def round_trip(self, rng: random.Random, count: int, *, layerwise: bool) -> None:
        spans, slots = random_spans(self.layout, self.pool, self.num_slots, rng, count)
        rows = snapshot(self.planes)
        self.run("store", spans, slots)
        self.check_host(spans, slots, rows)
        for plane in self.planes.planes:
            plane.zero_()
        self.run("load", spans, slots, layerwise=layerwise)
        for tensor, before in zip(snapshot(self.planes), rows, strict=True):
            wanted = np.zeros_like(before)
            wanted[slots] = before[slots]
            np.testing.assert_array_equal(tensor, wanted)
        self.pool.give([span.slot.index for span in spans])

    def close(self) -> None:
        torch.cuda.synchronize()
        self.transfer.close()
        self.transfer.close()
        del self.pool
        self.region.close()


@pytest.fixture(params=[*CONFIGS, "plain"])
def config(request: pytest.FixtureRequest) -> CudaCopyConfig | None:
    return CONFIGS.get(request.param)


@pytest.mark.parametrize("gap", [0, 24], ids=["packed", "strided"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
@pytest.mark.parametrize("name", [*LAYOUTS, *REAL])
def test_every_byte_comes_back(name: str, gap: int, layerwise: bool, config: CudaCopyConfig | None) -> None:
    layout = {**LAYOUTS, **REAL}[name]
    bench = Bench(layout, config, num_slots=12 * layout.block_tokens + 7, gap=gap)
    for seed in range(2):
        bench.round_trip(random.Random(seed), 12, layerwise=layerwise)
    bench.close()


@pytest.mark.parametrize("page", [1, 16, 64, 128])
def test_pages_of_any_size(page: int) -> None:
    """Slots in whole pages at random places, with the thresholds measured here."""
    layout = kv_layout(num_layers=36, row_bytes=2048, block_tokens=max(64, page), page_tokens=page)
    bench = Bench(layout, CudaCopyConfig(), num_slots=4096, blocks=24)
    rng = random.Random(SEED)
    tokens = 24 * layout.block_tokens
    pages = rng.sample(range(4096 // page), tokens // page)
    slots = [number * page + at for number in pages for at in range(page)]
    spans = [whole(slot, layout.block_tokens) for slot in take(bench.pool, 24)]
    rows = snapshot(bench.planes)
    bench.run("store", spans, slots)
    bench.check_host(spans, slots, rows)
    bench.planes.poison(slots)
    bench.run("load", spans, slots)
    for now, before in zip(snapshot(bench.planes), rows, strict=True):
        np.testing.assert_array_equal(now, before)
    del spans
    bench.close()


@pytest.mark.parametrize("name", ["direct", "staged", "mixed"])
@pytest.mark.parametrize("sizes", [[64] * 11, [64, 64, 17, 64]], ids=["full", "partly filled"])
def test_spans_as_columns(name: str, sizes: list[int]) -> None:
    layout = REAL["qwen3-8b"]
    bench = Bench(layout, CONFIGS[name], num_slots=1024)
    count = len(sizes)
    spans = HostSpans(bench.pool, random.Random(SEED).sample(range(12), count), sizes, [0] * count, sizes)
    slots = random.Random(SEED).sample(range(1024), sum(sizes))
    rows = snapshot(bench.planes)
    bench.run("store", spans, slots)
    bench.check_host(spans, slots, rows)
    bench.planes.poison(slots)
    bench.run("load", spans, slots)
    for now, before in zip(snapshot(bench.planes), rows, strict=True):
        np.testing.assert_array_equal(now, before)
    del spans
    bench.close()


@pytest.fixture
def busy() -> Iterator[Bench]:
    bench = Bench(
        kv_layout(num_layers=4, row_bytes=512, block_tokens=16), CONFIGS["direct"], num_slots=1024, blocks=40
    )
    yield bench
    bench.close()


def delay(stream: torch.cuda.Stream) -> None:
    """About 50 ms of work."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)


def test_copies_are_behind_the_forward_pass_and_it_behind_them(busy: Bench) -> None:
    spans, slots = [whole(slot, 16) for slot in take(busy.pool, 8)], list(range(100, 228))
    delay(busy.forward)
    with torch.cuda.stream(busy.forward):
        for plane in busy.planes.planes:
            plane.fill_(0x11)
    busy.run("store", spans, slots)
    busy.check_host(spans, slots, [np.full((1024, 512), 0x11, np.uint8)] * len(busy.planes.planes))
    delay(busy.forward)
    with torch.cuda.stream(busy.forward):
        for plane in busy.planes.planes:
            plane.fill_(0x33)
    ticket = busy.submit("load", spans, slots, layerwise=True)
    seen = []
    for layer in range(4):
        assert ticket.order_layer(layer, DEADLINE_S)
        with torch.cuda.stream(busy.forward):
            seen.append(busy.planes.planes[2 * layer][100:228].clone())
    assert not ticket.is_over
    assert ticket.wait(DEADLINE_S)
    torch.cuda.synchronize()
    assert all(bool((rows == 0x11).all()) for rows in seen)
    assert bool((busy.planes.planes[0][:100] == 0x33).all())
    del spans, ticket


def test_device_slots_on_the_device_are_checked_by_the_kernel(busy: Bench) -> None:
    spans = [whole(slot, 16) for slot in take(busy.pool, 2)]
    rows = snapshot(busy.planes)
    slots = torch.arange(40, 72, device="cuda")
    busy.run("store", spans, slots)
    busy.check_host(spans, list(range(40, 72)), rows)
    slots[5] = 1024
    ticket = busy.submit("store", spans, slots)
    assert ticket.wait(DEADLINE_S)
    assert isinstance(ticket.error, TransferError)
    assert "beyond the pool" in str(ticket.error)
    del spans, ticket


def test_poison_is_never_stored_while_slots_are_reused(busy: Bench) -> None:
    """Store, poison, restore, 1,000 times: slots are rewritten as soon as the rules allow it."""
    rng = random.Random(SEED)
    span_tokens, poison = 16, 0xDB
    kept: list[tuple[BlockSpan, int]] = []
    free = list(range(1024))
    for turn in range(1000):
        if len(kept) == 40:
            span, value = kept.pop(rng.randrange(40))
            slots = rng.sample(free, span_tokens)
            ticket = busy.submit("load", [span], slots, layerwise=bool(turn % 2))
            assert ticket.order_behind(0.005) or ticket.wait(DEADLINE_S)
            with torch.cuda.stream(busy.forward):
                chosen = torch.tensor(slots, device="cuda")
                found = [plane[chosen] for plane in busy.planes.planes]
                busy.planes.poison(slots, poison)
            assert all(bool((rows == value).all()) for rows in found), (turn, value)
            assert ticket.wait(DEADLINE_S)
            busy.pool.give([span.slot.index])
        value = rng.randrange(poison)
        slots = rng.sample(free, span_tokens)
        with torch.cuda.stream(busy.forward):
            busy.planes.poison(slots, value)
        span = whole(take(busy.pool, 1)[0], span_tokens)
        stored = busy.submit("store", [span], slots)
        assert stored.wait(DEADLINE_S)
        with torch.cuda.stream(busy.forward):
            busy.planes.poison(slots, poison)
        kept.append((span, value))
    kept.clear()
    del span, stored, ticket
