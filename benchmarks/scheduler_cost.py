"""What the chain costs the scheduler's thread: keys, lookup, and the bookkeeping of loads and stores.

The host pool is real, copies are not made (a transfer that ends at once), so what is measured is the
Python of the calling thread, in processor time of that thread.  Reference of the same run: SHA-256 over
the same tokens, one call a block.

    python benchmarks/scheduler_cost.py [--tokens 32768] [--block 64] [--rounds 20]
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from flexkv_core import BlockLayout, ChainConfig, CopyJob, HostRegion, Namespace, Ticket, Transfer, kv_layout
from flexkv_core.manager import KVManager
from flexkv_core.transfer import PassedFence


class InstantTransfer(Transfer):
    """Ends every copy at once."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout

    def register(self, region: HostRegion) -> None:  # noqa: ARG002 - nothing to pin
        return

    def fence(self) -> PassedFence:
        return PassedFence()

    def load(self, job: CopyJob) -> Ticket:
        ticket = Ticket(job, 0, 1)
        ticket.finish(0.0)
        return ticket

    store = load

    def close(self) -> None:
        return


def median_ms(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        run()
        times.append((time.thread_time() - began) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    layout = kv_layout(num_layers=1, row_bytes=8, block_tokens=args.block)
    blocks = args.tokens // args.block
    capacity = (args.rounds + 4) * blocks * layout.slot_bytes
    config = ChainConfig.model_validate(
        {
            "block_tokens": args.block,
            "tiers": [{"name": "host", "driver": "cpu", "options": {"capacity": capacity}}],
            "engine": {"max_store_tokens": 10**9},
        }
    )
    manager = KVManager(
        config, layout=layout, namespace=Namespace(model="bench"), transfer=InstantTransfer(layout)
    )
    manager.start()
    gc.collect()
    gc.freeze()  # as SGLang does with what its start has made, so that collections look at new objects only
    rng = random.Random(0)
    prompts = [
        array("q", [rng.randrange(150_000) for _ in range(args.tokens)]) for _ in range(args.rounds + 1)
    ]
    slots = array("q", range(args.tokens))
    timings: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = run()
        timings.setdefault(name, []).append((time.thread_time() - began) * 1e3)
        return result

    for tokens in prompts:
        task, mask = timed("store: plan and reserve", lambda t=tokens: manager.put_match(t))
        assert mask.all()
        timed("store: launch", lambda i=task: manager.launch([i], [slots]))
        timed("store: complete", manager.poll)
        manager.wait([task])
    for tokens in prompts:
        lookup = timed("keys + lookup of a full hit", lambda t=tokens: manager.lookup(t))
        assert lookup.num_tokens == args.tokens
        task, _ = timed("load: plan and pin", lambda t=tokens: manager.get_match(t, start=0))
        timed("load: launch", lambda i=task: manager.launch([i], [slots]))
        timed("load: complete", manager.poll)
        manager.wait([task])
    sequence = manager.sequence(prompts[0])
    manager.lookup(sequence)
    again = median_ms(lambda: manager.lookup(sequence), args.rounds)
    miss = array("q", [7] * args.tokens)
    missed = median_ms(lambda: manager.lookup(miss), args.rounds)
    idle = median_ms(lambda: [manager.poll() for _ in range(1000)], args.rounds)
    raw = prompts[0].tobytes()
    step = args.block * 8
    reference = median_ms(
        lambda: [sha256(raw[i : i + step]).digest() for i in range(0, len(raw), step)], args.rounds
    )
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{args.tokens} tokens in {blocks} blocks of {args.block}, median of {args.rounds}")
    print(f"  {'reference: SHA-256 of the blocks alone':44} {reference:8.3f} ms")
    for name, times in timings.items():
        value = statistics.median(times[1:])
        print(f"  {name:44} {value:8.3f} ms   {value / blocks * 1000:8.3f} ms per 1,000 blocks")
    print(f"  {'lookup again (keys kept)':44} {again:8.3f} ms")
    print(f"  {'lookup that misses at once':44} {missed:8.3f} ms")
    print(f"  {'1,000 idle polls':44} {idle:8.3f} ms")
    manager.shutdown()


if __name__ == "__main__":
    main()
