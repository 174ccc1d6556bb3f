"""How fast are paged copies between a GPU's KV pool and host slots, next to plain pinned copies?

    python benchmarks/gpu_copy.py [--json FILE] [--tokens 512,4096,16384,32768] [--repeats 7]

Shape of Qwen3-8B: 36 layers, K and V rows of 2 KiB, blocks of 64 tokens.  Needs one CUDA device with
16 GB free, 8 GB of host memory and about three minutes; without a device it says so and measures
nothing.  Every rate is of this run; ``share`` is a rate over the pinned-copy rate of the same
direction.  ``gpu`` times run from the engine's stream at the moment of the fence to the moment at
which that stream may go on; ``call`` is what the calling thread pays for ``load`` or ``store``.
Before each job the calling thread is busy for some milliseconds, as an engine's scheduler always is; with
``--idle`` it sleeps as long, and its first calls run with cold caches.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexkv_core.buffers import HostRegion, SlotPool
from flexkv_core.layout import BlockLayout, kv_layout
from flexkv_core.transfer import CopyJob, HostSpans, Ticket
from flexkv_core.transfers.cuda_copy import CudaCopyConfig, CudaTransfer
from flexkv_core.transfers.planes import DevicePlanes

LAYOUT = kv_layout(num_layers=36, row_bytes=2048, block_tokens=64)
POOL_SLOTS = 65_536
DEADLINE_S = 60.0
PLAIN_BYTES = 512 << 20
BETWEEN_S = 0.003


@dataclass
class Result:
    """What was measured, and how it is printed."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, **facts: float | str) -> None:
        row = {"what": what, **{key: round(v, 4) if isinstance(v, float) else v for key, v in facts.items()}}
        self.rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)


@dataclass
class Bench:
    """A pool, pinned slots, and one transfer between them."""

    transfer: CudaTransfer
    pool: SlotPool
    forward: torch.cuda.Stream
    is_idle: bool = False
    number: int = 0

    def rest(self) -> None:
        """What the calling thread does before a job."""
        torch.cuda.synchronize()
        if self.is_idle:
            time.sleep(BETWEEN_S)
            return
        until = time.perf_counter() + BETWEEN_S
        while time.perf_counter() < until:
            torch.cuda.current_stream().query()

    def job(self, blocks: Sequence[int], slots: Sequence[int], *, layerwise: bool = False) -> CopyJob:
        """A job whose fence is taken now."""
        self.number += 1
        full = [LAYOUT.block_tokens] * len(blocks)
        spans = HostSpans(self.pool, blocks, full, [0] * len(blocks), full)
        given = array("q", slots)
        return CopyJob(self.number, spans, given, self.transfer.fence(), layerwise)

    def timed(
        self, direction: str, blocks: Sequence[int], slots: Sequence[int], *, layerwise: bool = False
    ) -> dict[str, float]:
        """One copy: GB/s as the engine's stream sees it, and what its thread pays."""
        self.rest()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        job = self.job(blocks, slots, layerwise=layerwise)
        begin.record(self.forward)
        before = time.perf_counter()
        ticket: Ticket = getattr(self.transfer, direction)(job)
        called = time.perf_counter()
        while not ticket.order_behind(0.005):
            assert ticket.error is None, ticket.error
        ordered = time.perf_counter()
        end.record(self.forward)
        assert ticket.wait(DEADLINE_S), "the copy did not end"
        assert ticket.error is None, ticket.error
        ended = time.perf_counter()
        end.synchronize()
        gpu_s = begin.elapsed_time(end) / 1e3
        return {
            "GBps": ticket.num_bytes / gpu_s / 1e9,
            "gpu_ms": gpu_s * 1e3,
            "wall_ms": (ended - before) * 1e3,
            "call_ms": (called - before) * 1e3,
            "ordered_ms": (ordered - before) * 1e3,
        }

    def repeated(
        self,
        count: int,
        direction: str,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        layerwise: bool = False,
    ) -> dict[str, float]:
        """Medians of ``count`` runs, of which the first warms up."""
        runs = [self.timed(direction, blocks, slots, layerwise=layerwise) for _ in range(count + 1)][1:]
        return {key: statistics.median(row[key] for row in runs) for key in runs[0]}


def plain_rates(result: Result) -> dict[str, float]:
    """Pinned copies of 512 MiB, each way and both."""
    host = [torch.empty(PLAIN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(PLAIN_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def rate(ways: Sequence[str]) -> float:
        for repeats in (2, 8):
            torch.cuda.synchronize()
            before = time.perf_counter()
            for _ in range(repeats):
                for way in ways:
                    number = ("load", "store").index(way)
                    with torch.cuda.stream(streams[number]):
                        pair = (device[number], host[number])
                        target, source = pair if way == "load" else pair[::-1]
                        target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - before
        return repeats * len(ways) * PLAIN_BYTES / seconds / 1e9

    rates = {"load": rate(["load"]), "store": rate(["store"]), "both": rate(["load", "store"])}
    result.add("plain pinned copies", **rates)
    return rates


def random_slots(rng: random.Random, page: int, tokens: int, begin: int, end: int) -> list[int]:
    pages = rng.sample(range(begin // page, end // page), tokens // page)
    return [number * page + at for number in pages for at in range(page)]


def one_way(
    bench: Bench, name: str, options: argparse.Namespace, rates: dict[str, float], out: Result
) -> None:
    rng = random.Random(1)
    for tokens in options.tokens:
        blocks = rng.sample(range(bench.pool.capacity), tokens // LAYOUT.block_tokens)
        for page in (1, 64):
            slots = random_slots(rng, page, tokens, 0, POOL_SLOTS)
            for direction in ("store", "load"):
                found = bench.repeated(options.repeats, direction, blocks, slots)
                out.add(
                    f"{name} {direction}",
                    tokens=tokens,
                    page=page,
                    share=found["GBps"] / rates[direction],
                    **found,
                )


def layerwise(bench: Bench, options: argparse.Namespace, rates: dict[str, float], out: Result) -> None:
    rng = random.Random(2)
    for tokens in options.tokens:
        blocks = rng.sample(range(bench.pool.capacity), tokens // LAYOUT.block_tokens)
        slots = random_slots(rng, 1, tokens, 0, POOL_SLOTS)
        found = bench.repeated(options.repeats, "load", blocks, slots, layerwise=True)
        ticket = bench.transfer.load(bench.job(blocks, slots, layerwise=True))
        before = time.perf_counter()
        assert ticket.wait_layer(0, DEADLINE_S)
        first_ms = (time.perf_counter() - before) * 1e3
        assert ticket.wait(DEADLINE_S)
        out.add(
            "layerwise load",
            tokens=tokens,
            share=found["GBps"] / rates["load"],
            first_layer_ms=first_ms,
            **found,
        )


def both_ways(bench: Bench, name: str, rates: dict[str, float], out: Result, tokens: int = 16_384) -> None:
    rng = random.Random(3)
    half, count = POOL_SLOTS // 2, tokens // LAYOUT.block_tokens
    blocks = rng.sample(range(bench.pool.capacity), 2 * count)
    up, down = random_slots(rng, 1, tokens, 0, half), random_slots(rng, 1, tokens, half, POOL_SLOTS)
    seconds = []
    for _ in range(5):
        bench.rest()
        jobs = [bench.job(blocks[:count], up), bench.job(blocks[count:], down)]
        before = time.perf_counter()
        tickets = [bench.transfer.load(jobs[0]), bench.transfer.store(jobs[1])]
        assert all(ticket.wait(DEADLINE_S) and ticket.is_ok for ticket in tickets)
        seconds.append(time.perf_counter() - before)
    rate = 2 * tokens * LAYOUT.token_bytes / statistics.median(seconds) / 1e9
    out.add(f"{name} both ways", tokens=tokens, GBps=rate, share=rate / rates["both"])


def products(bench: Bench, name: str, out: Result, tokens: int = 16_384) -> None:
    """Matrix products alone, then beside copies that go on all the time."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rng = random.Random(4)
    count = tokens // LAYOUT.block_tokens
    blocks = rng.sample(range(bench.pool.capacity), count)
    slots = random_slots(rng, 1, tokens, 0, POOL_SLOTS)
    work = torch.cuda.Stream()

    def run() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(work):
            begin.record(work)
            for _ in range(60):
                torch.mm(a, b)
            end.record(work)
        end.synchronize()
        return float(begin.elapsed_time(end))

    run()
    alone = statistics.median(run() for _ in range(3))
    for direction in ("load", "store"):
        tickets = [getattr(bench.transfer, direction)(bench.job(blocks, slots)) for _ in range(6)]
        beside = run()
        still_copying = not tickets[-1].is_over
        assert all(ticket.wait(DEADLINE_S) and ticket.is_ok for ticket in tickets)
        out.add(
            f"{name} products beside {direction}s", alone_ms=alone, beside_ms=beside,
            slower=beside / alone - 1, copied_throughout=str(still_copying),
        )  # fmt: skip


def check_bytes(bench: Bench, planes: DevicePlanes, out: Result) -> None:
    """A round trip of 4,096 tokens, compared row by row on the device."""
    rng = random.Random(5)
    blocks = rng.sample(range(bench.pool.capacity), 64)
    slots = random_slots(rng, 1, 4096, 0, POOL_SLOTS)
    chosen = torch.tensor(slots, device="cuda")
    before = [plane[chosen].clone() for plane in planes.planes]
    bench.timed("store", blocks, slots)
    planes.poison(slots)
    bench.timed("load", blocks, slots)
    equal = all(
        bool((plane[chosen] == rows).all()) for plane, rows in zip(planes.planes, before, strict=True)
    )
    out.add("bytes come back", equal=str(equal))
    assert equal


def make_planes(layout: BlockLayout) -> DevicePlanes:
    rows = layout.planes[0].row_bytes
    planes = [
        torch.randint(0, 256, (POOL_SLOTS, rows), dtype=torch.uint8, device="cuda") for _ in layout.planes
    ]
    return DevicePlanes(layout, tuple(planes), POOL_SLOTS)


def run_method(
    method: str,
    planes: DevicePlanes,
    region: HostRegion,
    options: argparse.Namespace,
    rates: dict[str, float],
    out: Result,
) -> None:
    forward = torch.cuda.Stream()
    before = time.perf_counter()
    config = CudaCopyConfig(method=method)  # type: ignore[arg-type] # one of its literals
    transfer = CudaTransfer(planes, streams=lambda: [forward], config=config)
    opened = time.perf_counter()
    transfer.register(region)
    registered = time.perf_counter()
    limits = {
        ("load" if is_load else "store"): way.limits.staged_bytes for is_load, way in transfer._ways.items()
    }
    out.add(
        f"{method} opened", open_s=opened - before, pin_s=registered - opened,
        load_staged_MB=limits["load"] / 1e6, store_staged_MB=limits["store"] / 1e6,
    )  # fmt: skip
    bench = Bench(transfer, SlotPool(region, LAYOUT.slot_bytes), forward, options.idle)
    check_bytes(bench, planes, out)
    one_way(bench, method, options, rates, out)
    both_ways(bench, method, rates, out)
    if method == "auto":
        layerwise(bench, options, rates, out)
    products(bench, method, out)
    transfer.close()


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--json", type=Path, help="where to write the rows")
    options.add_argument("--tokens", default="512,4096,16384,32768", help="sizes of the copies, in tokens")
    options.add_argument("--repeats", type=int, default=7, help="runs of each copy; the first warms up")
    options.add_argument("--methods", default="auto,direct,staged", help="ways to copy")
    options.add_argument("--idle", action="store_true", help="let the calling thread sleep before each job")
    given = options.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return 0
    given.tokens = [int(number) for number in given.tokens.split(",")]
    out = Result()
    out.add(
        "machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, cuda=str(torch.version.cuda)
    )
    rates = plain_rates(out)
    planes = make_planes(LAYOUT)
    most = max(*given.tokens, 32_768)
    for method in given.methods.split(","):
        region = HostRegion(most // LAYOUT.block_tokens * LAYOUT.slot_bytes)
        run_method(method, planes, region, given, rates, out)
        region.close()
    plain_rates(out)
    if given.json:
        given.json.write_text(json.dumps(out.rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
