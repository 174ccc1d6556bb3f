"""FlexKVRadixCache under everything at once: a seeded mix of requests, aborts, pressure and faults."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from flexkv_core.testing import FaultKind, FaultTier, SeededFaults
from tests.support.sglang_world import SglangWorld, cpu, ssd, world

OPERATIONS = 200
KINDS = (FaultKind.RAISE, FaultKind.FLIP, FaultKind.TRUNCATE, FaultKind.FAIL_KEYS, FaultKind.RETURN_SHORT)


class Mix:
    """Random operations on a world."""

    def __init__(self, w: SglangWorld, rng: random.Random) -> None:
        self.w = w
        self.rng = rng
        self.families = [[rng.randrange(-5, 1000) for _ in range(160)] for _ in range(5)]
        self.num_tokens = 0

    def once(self) -> None:
        doing = [
            self.submit,
            self.steps,
            self.abort,
            self.retract,
            self.evict,
            self.gates,
            self.lag,
            self.end,
        ]
        self.rng.choices(doing, [40, 60, 6, 5, 3, 5, 4, 4])[0]()

    def submit(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.families)[: rng.randrange(1, 150)]
        prompt += [rng.randrange(1000) for _ in range(rng.choice([0, 1, 5, 40]))]
        fields = {"cache_salt": "other"} if rng.random() < 0.15 else {}
        outputs = rng.randrange(1, 12)
        self.w.submit(prompt, outputs=outputs, stop_after=rng.randrange(1, 14), **fields)

    def steps(self) -> None:
        for _ in range(self.rng.randrange(1, 8)):
            self.w.step()

    def abort(self) -> None:
        jobs = self.w.open_jobs()
        if jobs:
            self.w.abort(self.rng.choice(jobs))

    def retract(self) -> None:
        jobs = [job for job in self.w.running if not job.req.finished() and not job.req.to_finish]
        if jobs:
            self.w.retract(self.rng.choice(jobs))

    def evict(self) -> None:
        self.w.cache.evict(EvictParams(num_tokens=self.rng.randrange(1, self.w.size)))

    def gates(self) -> None:
        transfer = self.w.transfer
        transfer.holds_loads = self.rng.random() < 0.3 and not transfer.orders
        transfer.holds_stores = self.rng.random() < 0.3

    def lag(self) -> None:
        stream = self.w.stream
        stream.lags = not stream.lags
        if not stream.lags:
            stream.run()

    def end(self) -> None:
        """Run everything to its end, then flush, or change weights."""
        w = self.w
        w.transfer.holds_loads = w.transfer.holds_stores = False
        w.run()
        chance = self.rng.random()
        if chance < 0.6:
            assert w.flush()
        elif chance < 0.8:
            w.update_weights()


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize(("seed", "mode"), [(1, "MP"), (2, "MP"), (3, "IP"), (4, "IP on streams")])
def test_every_restored_row_is_what_was_computed(
    tmp_path: Path, page: int, overlap: bool, seed: int, mode: str
) -> None:
    """In IP mode a pass that waits in vain for a held load aborts its requests; the mix goes on."""
    rng = random.Random(f"{seed} {page} {overlap}")
    print(f"seed {seed}, page {page}, overlap {overlap}")
    faults = SeededFaults(seed, rate=0.15, kinds=KINDS)
    disk = ssd(tmp_path / "disk", "400KiB", breaker_failures=0)
    options = {
        "tiers": [cpu("120KiB"), disk],
        "wrap": {"disk": lambda tier: FaultTier(tier, faults)},
        "engine": {
            "load_wait_s": 0.001,
            "load_deadline_s": 0.2,
            "max_store_tokens": 256,
            "layerwise": mode != "MP",
        },
    }
    with world(tmp_path, page=page, block=32, size=384, overlap=overlap, chunk=64, **options) as w:
        w.transfer.orders = mode == "IP on streams"
        mix = Mix(w, rng)
        for _ in range(OPERATIONS):
            mix.once()
        mix.end()
        w.stream.lags = False
        w.stream.run()
        faults.rate = 0.0
        w.has_time()
        w.settle()
        print(f"{len(w.finished)} requests, {w.manager.metrics.snapshot()}")
        for family in mix.families:  # the chain is as good as new
            w.ask(family)
            assert w.flush()
            before = w.count("tokens", kind="load")
            w.ask(family)
            assert w.count("tokens", kind="load") - before >= 144
