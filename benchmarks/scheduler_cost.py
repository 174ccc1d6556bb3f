"""What the chain costs the scheduler's thread: keys, lookup, and the bookkeeping of loads and stores.

The host pool and the disk are real, copies are not made (a transfer that ends at once), so what is measured
is the Python of the calling thread, in processor time of that thread.  Blocks are small, but for the last
part, whose blocks of 1 MiB the disk takes four at a time.  Reference of the same run: SHA-256 over the same
tokens, one call a block.

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

_LARGE_ROUNDS = 4
"""With large blocks, each of which takes half a GiB of memory and of the disk."""


def timed(timings: Timings, name: str, run: Callable[[], Any]) -> Any:
    """Run once; note the processor time of this thread, in milliseconds."""
    began = time.thread_time()
    result = run()
    timings.setdefault(name, []).append((time.thread_time() - began) * 1e3)
    return result


def settled(timings: Timings, name: str, manager: KVManager, is_so: Callable[[], bool] | None = None) -> None:
    """Let what goes on below the first tier end, and note this thread's time in the polls that took it in.

    A poll a millisecond, as a busy scheduler's ticks come; those that find nothing have a line of their own:
    they come as often while nothing is under way.
    """
    spent, idle, end = 0.0, 0.0, time.monotonic() + 120.0
    while not is_so() if is_so else manager.chain.num_under_way:
        if time.monotonic() > end:
            raise SystemExit("the tiers below have not ended within two minutes")
        time.sleep(0.001)
        is_idle = manager.chain._completions.is_empty()  # noqa: SLF001 - nothing else tells before the poll
        began = time.thread_time()
        manager.poll()
        took = time.thread_time() - began
        spent, idle = (spent, idle + took) if is_idle else (spent + took, idle)
    timings.setdefault(name, []).append(spent * 1e3)
    timings.setdefault(f"meanwhile, polls that found nothing ({name.split(':')[0]})", []).append(idle * 1e3)


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
        settled(timings, "store: written below", manager)
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
        settled(timings, "load: staged", manager, lambda i=task: manager.is_staged(i))
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
        is_per_block = name.startswith(("store:", "load:"))
        per_block = f"   {value / blocks * 1000:8.3f} ms per 1,000 blocks" if is_per_block else ""
        print(f"  {name:44} {value:8.3f} ms{per_block}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
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
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{args.tokens} tokens in {blocks} blocks of {args.block}, median of {args.rounds}")
    print(f"  {'reference: SHA-256 of the blocks alone':44} {reference:8.3f} ms")
    small = kv_layout(num_layers=1, row_bytes=8, block_tokens=args.block)
    measure(small, prompts, blocks, "small blocks")
    large = kv_layout(num_layers=1, row_bytes=(1 << 19) // args.block, block_tokens=args.block)
    below(large, prompts[: _LARGE_ROUNDS + 1], blocks, f"blocks of 1 MiB, median of {_LARGE_ROUNDS}")


def measure(layout: BlockLayout, prompts: list[Any], blocks: int, what: str) -> None:
    """All chains."""
    host = tier_of(layout, "host", "cpu", (len(prompts) + 3) * blocks)
    manager = opened([host], layout)
    show(f"{what}: cpu", stores(manager, prompts) | loads(manager, prompts), blocks)
    manager.shutdown()
    manager = opened([tier_of(layout, "host", "cpu", 2 * blocks)], layout)
    show(f"{what}: cpu, full, so that every store makes its room", stores(manager, prompts), blocks)
    manager.shutdown()
    below(layout, prompts, blocks, what)


def below(layout: BlockLayout, prompts: list[Any], blocks: int, what: str) -> None:
    """Chains with a disk."""
    room = (len(prompts) + 3) * blocks
    with tempfile.TemporaryDirectory() as folder:
        disk = tier_of(layout, "disk", "ssd", room, path=f"{folder}/1")
        manager = opened([tier_of(layout, "host", "cpu", room), disk], layout)
        show(f"{what}: cpu, then ssd", stores(manager, prompts) | loads(manager, prompts), blocks)
        manager.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        disk = tier_of(layout, "disk", "ssd", room, path=f"{folder}/2")
        manager = opened([tier_of(layout, "host", "cpu", 2 * blocks), disk], layout)
        stores(manager, prompts)
        timings = loads_from_below(manager, prompts)
        show(f"{what}: small cpu, full, then ssd, which everything comes from", timings, blocks)
        manager.shutdown()


def tier_of(layout: BlockLayout, name: str, driver: str, blocks: int, **options: Any) -> dict[str, Any]:
    """A tier with room for so many blocks, each in whole pages."""
    capacity = blocks * (-(-layout.slot_bytes // 4096) * 4096)
    return {"name": name, "driver": driver, "options": {"capacity": capacity, **options}}


if __name__ == "__main__":
    main()
