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
import tempfile
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


Timings = dict[str, list[float]]


def timed(timings: Timings, name: str, run: Callable[[], Any]) -> Any:
    """Run once; note the processor time of this thread, in milliseconds."""
    began = time.thread_time()
    result = run()
    timings.setdefault(name, []).append((time.thread_time() - began) * 1e3)
    return result


def settled(manager: KVManager, is_so: Callable[[], bool] | None = None) -> float:
    """Let what goes on below the first tier end; milliseconds of this thread in the polls that took it in.

    A poll a millisecond, as a busy scheduler's ticks come; those that find nothing cost little, and count.
    """
    spent, end = 0.0, time.monotonic() + 60.0
    while not is_so() if is_so else manager.chain.num_under_way:
        if time.monotonic() > end:
            raise SystemExit("the tiers below have not ended within a minute")
        time.sleep(0.001)
        began = time.thread_time()
        manager.poll()
        spent += time.thread_time() - began
    return spent * 1e3


def opened(tiers: list[dict[str, Any]], layout: BlockLayout) -> KVManager:
    """A manager over these tiers whose copies end at once."""
    config = ChainConfig.model_validate(
        {"block_tokens": layout.block_tokens, "tiers": tiers, "engine": {"max_store_tokens": 10**9}}
    )
    manager = KVManager(
        config, layout=layout, namespace=Namespace(model="bench"), transfer=InstantTransfer(layout)
    )
    manager.start()
    gc.collect()
    gc.freeze()  # as SGLang does with what its start has made, so that collections look at new objects only
    return manager


def stores(manager: KVManager, prompts: list[Any]) -> Timings:
    """Store every prompt."""
    slots = array("q", range(len(prompts[0])))
    timings: Timings = {}
    for tokens in prompts:
        sequence = manager.sequence(tokens)
        timed(timings, "keys of all blocks", lambda s=sequence: s.keys())
        task, mask = timed(timings, "store: plan and reserve", lambda s=sequence: manager.put_match(s))
        assert mask.all()
        timed(timings, "store: launch", lambda i=task: manager.launch([i], [slots]))
        timed(timings, "store: complete", manager.poll)
        manager.wait([task])
        timings.setdefault("store: written below", []).append(settled(manager))
    return timings


def loads(manager: KVManager, prompts: list[Any]) -> Timings:
    """Look every prompt up, and load it."""
    slots = array("q", range(len(prompts[0])))
    timings: Timings = {}
    for tokens in prompts:
        lookup = timed(timings, "keys + lookup of a full hit", lambda t=tokens: manager.lookup(t))
        assert lookup.num_tokens == len(tokens)
        sequence = manager.sequence(tokens)
        manager.lookup(sequence)
        timed(timings, "lookup again (keys kept)", lambda s=sequence: manager.lookup(s))
        task, _ = timed(timings, "load: plan and pin", lambda s=sequence: manager.get_match(s, start=0))
        timed(timings, "load: launch", lambda i=task: manager.launch([i], [slots]))
        timed(timings, "load: complete", manager.poll)
        manager.wait([task])
    miss = array("q", [7] * len(prompts[0]))
    for _ in prompts:
        timed(timings, "lookup that misses at once", lambda: manager.lookup(miss))
        timed(timings, "1,000 idle polls", lambda: [manager.poll() for _ in range(1000)])
    return timings


def loads_from_below(manager: KVManager, prompts: list[Any]) -> Timings:
    """Load every prompt, of which the first tier holds nothing any more."""
    slots = array("q", range(len(prompts[0])))
    timings: Timings = {}
    for tokens in prompts:
        sequence = manager.sequence(tokens)
        assert manager.lookup(sequence).num_tokens == len(tokens)
        task, _ = timed(
            timings, "load: plan, pin, ask below", lambda s=sequence: manager.get_match(s, start=0)
        )
        timings.setdefault("load: staged", []).append(settled(manager, lambda i=task: manager.is_staged(i)))
        timed(timings, "load: launch", lambda i=task: manager.launch([i], [slots]))
        timed(timings, "load: complete", manager.poll)
        manager.wait([task])
    return timings


def show(title: str, timings: Timings, blocks: int) -> None:
    """Print medians; the first round warms up."""
    print(f"{title}:")
    medians = {name: statistics.median(times[1:]) for name, times in timings.items()}
    for kind in ("store", "load"):
        parts = [value for name, value in medians.items() if name.startswith(f"{kind}:")]
        if parts:
            medians[f"{kind}: all of it"] = sum(parts)
    for name, value in medians.items():
        per_block = f"   {value / blocks * 1000:8.3f} ms per 1,000 blocks" if ":" in name else ""
        print(f"  {name:44} {value:8.3f} ms{per_block}")


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
    rng = random.Random(0)
    prompts = [
        array("q", [rng.randrange(150_000) for _ in range(args.tokens)]) for _ in range(args.rounds + 1)
    ]
    raw = prompts[0].tobytes()
    step = args.block * 8
    reference = median_ms(
        lambda: [sha256(raw[i : i + step]).digest() for i in range(0, len(raw), step)], args.rounds
    )
    capacity = (args.rounds + 4) * blocks * layout.slot_bytes
    host = {"name": "host", "driver": "cpu", "options": {"capacity": capacity}}
    small = host | {"options": {"capacity": 2 * blocks * layout.slot_bytes}}
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{args.tokens} tokens in {blocks} blocks of {args.block}, median of {args.rounds}")
    print(f"  {'reference: SHA-256 of the blocks alone':44} {reference:8.3f} ms")
    with tempfile.TemporaryDirectory() as folder:
        disk = {"name": "disk", "driver": "ssd", "options": {"path": folder, "capacity": 4 * capacity}}
        for title, tiers in (("cpu", [host]), ("cpu, then ssd", [host, disk])):
            manager = opened(tiers, layout)
            show(title, stores(manager, prompts) | loads(manager, prompts), blocks)
            manager.shutdown()
        manager = opened(
            [small, disk | {"options": {"path": f"{folder}/2", "capacity": 4 * capacity}}], layout
        )
        stores(manager, prompts)
        show("small cpu, then ssd, which everything comes from", loads_from_below(manager, prompts), blocks)
        manager.shutdown()
    manager = opened([small], layout)
    show("cpu, full, so that every store makes its room", stores(manager, prompts), blocks)
    manager.shutdown()


if __name__ == "__main__":
    main()
