"""Threads as they run: a random engine over chains whose tiers take their time, hang and fail.

``test_chain_model`` has one thread a lane and goes on when all is still.  Here several threads a lane are
at work while the engine goes on.  What it does and what goes wrong follow from the seed, a step's choices
from the seed and its number; in which order threads run does not.
"""

from __future__ import annotations

import os
import random
import time
from array import array

import pytest

from flexkv_core.chain.jobs import LoadJob
from flexkv_core.models import CodecConfig
from flexkv_core.testing import Fault, FaultKind, FaultTier, MemoryTier, context_for, small_layout
from flexkv_core.tier import Status, TierCapabilities
from flexkv_core.wrappers.encoding import stored_bytes
from tests.support.chains import World, cpu_tier
from tests.support.places import check_places

SEEDS = range(240 if os.environ.get("FLEXKV_TEST_HYPOTHESIS") == "thorough" else 24)
NUM_STEPS = 600
CHAINS = ["host own", "host shared", "own own", "own shared", "host own own", "host own shared"]
CHAINS += ["own own shared", "host own own shared"]
ORDERS = ["lru", "lfu", "slru", "fifo", "mru", "filo"]
ZSTD = CodecConfig(compress="zstd")
CODECS = [CodecConfig(), CodecConfig(), CodecConfig() if ZSTD.missing_extras() else ZSTD]
LIMITS = [{}, {}, {"store": {"operations_per_s": 1000, "burst_s": 0.02}}]
KINDS = [FaultKind.RAISE, FaultKind.FLIP, FaultKind.TRUNCATE, FaultKind.SWAP, FaultKind.FAIL_KEYS]
KINDS += [FaultKind.HANG, FaultKind.HANG, FaultKind.RETURN_SHORT, FaultKind.RETURN_NONE]
STATUSES = [Status.UNAVAILABLE, Status.TIMEOUT, Status.CORRUPT, Status.DENIED, Status.NO_SPACE, Status.MISS]
STEPS = {"new_prompt": 15, "store": 18, "load": 22, "bind": 5, "cancel": 3, "ask_shared": 4}
STEPS |= {"copy": 30, "wait": 2, "forget": 1, "break_a_tier": 4, "break_the_copy": 1, "release": 5}
"""What an engine does and what goes wrong, and how often."""


def jitter(seed: str):
    """A schedule without faults, in which some calls begin a little later."""
    chance = random.Random(seed)
    return lambda _operation, _keys: time.sleep(chance.random() * 0.002) if chance.random() < 0.3 else None


class Engine:
    """An engine that stores and loads prompts which share beginnings, over a chain drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.layout = small_layout(block_tokens=4, page_tokens=self.rng.choice([1, 1, 2, 4]))
        self.faulty: list[FaultTier] = []
        self.owned: dict[int, MemoryTier] = {}
        kinds = self.rng.choice(CHAINS).split()
        rows = [self.draw_tier(number, kind) for number, kind in enumerate(kinds)]
        self.draw_writes(kinds, [policy for _, policy in rows])
        print(f"seed {seed}:", *zip(kinds, [policy for _, policy in rows], strict=True), sep="\n  ")
        engine = {"shutdown_deadline_s": 2.0, "prefetch_host_share": self.rng.choice([0.3, 1.0])}
        sizes = {"staging": 6 * self.layout.slot_bytes, "num_slots": 512}
        self.world = World(rows, layout=self.layout, manual=True, engine=engine, **sizes)
        self.chain = self.world.chain
        self.prompts: list[list[int]] = [[]]
        self.stored: list[list[int]] = [[]]
        self.jobs: dict[object, list[int]] = {}  # every open job and its device slots
        self.planned: dict[object, list[int]] = {}  # jobs that have not got them yet
        self.loads: dict[object, tuple[list[int], int]] = {}

    def draw_tier(self, number: int, kind: str):
        choice, policy = self.rng.choice, {}
        if kind != "shared":
            policy |= {"ttl_s": choice([None, None, 20.0])}
            policy |= {"eviction": {"policy": choice(ORDERS), "ratio": choice([0, 0.3])}}
            policy["eviction"]["start_threshold"] = choice([1.0, 0.8])
        if kind == "host":
            return cpu_tier(self.layout, choice([2, 4, 8, 12])), policy
        codec = choice(CODECS)
        policy |= {"codec": codec.model_dump(), "limits": choice(LIMITS), "breaker_reset_s": 2.0}
        policy |= {lane: choice([1, 2, 3]) for lane in ("load_threads", "store_threads")}
        policy |= {"breaker_failures": choice([0, 3])}
        can = {"max_batch": choice([2, 3]), "max_concurrency": 8}
        if kind == "shared":
            policy |= {"promote": choice(["always", "never"]), "store_tails": choice([None, True])}
            can |= {"shared": True}
        else:
            policy |= {"promote": choice(["always", "never", 2])}
            size = choice([3, 6, 10, 20]) * stored_bytes(codec, self.layout)
            can |= {"can_list": True, "capacity_bytes": size}
        inner = MemoryTier(context_for(self.layout), TierCapabilities(**can))
        if kind == "own":
            self.owned[number] = inner
        self.faulty.append(FaultTier(inner, jitter(f"{self.seed} {number}")))
        return self.faulty[-1], policy

    def draw_writes(self, kinds, policies) -> None:
        """Nothing that would be refused: ``back`` wants a host tier above, which keeps what is stored."""
        writes = ["through", "around"]
        if kinds[0] == "host":
            policies[0]["write"] = self.rng.choice(["through", "through", "through", "around", "never"])
            writes += ["back"] * (policies[0]["write"] == "through")
        policies[kinds[0] == "host"]["write"] = self.rng.choice(writes)

    def new_prompt(self, rng) -> None:
        head = rng.choice(self.prompts)[: rng.randrange(31)]
        self.prompts = [*self.prompts[-11:], head + [rng.randrange(2) for _ in range(rng.randrange(14))]]

    def store(self, rng) -> None:
        tokens, device = rng.choice(self.prompts), self.world.device
        if device.num_free <= len(tokens):
            return
        slots = list(device.allocate(len(tokens)))
        device.forward(slots, tokens)
        job = self.chain.store(self.world.sequence(tokens), len(tokens), with_tail=rng.random() < 0.6)
        if job is None:
            device.free(slots)
            return
        self.stored.append(tokens)
        self.jobs[job] = slots
        self.planned[job] = [slot for start, stop in job.plan.ranges() for slot in slots[start:stop]]
        if rng.random() < 0.8:
            self.bind(rng)

    def load(self, rng) -> None:
        tokens, chain, device = rng.choice(self.prompts), self.chain, self.world.device
        start, sequence = min(rng.randrange(9), len(tokens)), self.world.sequence(tokens)
        found = chain.lookup(sequence, start=start)
        shared = [len(os.path.commonprefix([tokens, other])) for other in self.stored]
        assert found.num_tokens <= max(start, *shared), "promised, and never stored"
        if rng.random() < 0.1:  # between a promise and its load
            self.world.clock.advance(rng.choice([0, 0.1, 25]))
        if rng.random() < 0.3:
            chain.prefetch(sequence, found, start=start)
            return
        job = chain.load(sequence, found, start=start)
        if job is None:
            return
        if device.num_free < job.num_tokens:
            chain.cancel(job)
            return
        slots = list(device.allocate(job.num_tokens))
        self.jobs[job], self.loads[job], self.planned[job] = slots, (tokens, start), slots
        if rng.random() < 0.8:
            self.bind(rng)

    def bind(self, _rng) -> None:
        if self.planned:
            job, slots = self.planned.popitem()
            begin = self.chain.bind if isinstance(job, LoadJob) else self.chain.launch
            begin(job, array("q", slots), self.world.transfer.fence())

    def cancel(self, rng) -> None:
        prefetches = [job for job in self.chain.loads._active.values() if job.is_prefetch]
        if self.jobs or prefetches:
            self.chain.cancel(rng.choice([*self.jobs, *prefetches]))

    def ask_shared(self, rng) -> None:
        self.chain.probe(self.world.sequence(rng.choice(self.prompts)), 0)

    def copy(self, rng) -> None:
        self.world.transfer.step(rng.choice([None, None, 1]))

    def wait(self, rng) -> None:
        self.world.clock.advance(rng.choice([0.1, 3.0, 11.0, 31.0]))

    def forget(self, _rng) -> None:
        self.chain.forget_all()

    def break_a_tier(self, rng) -> None:
        tier, operation = rng.choice(self.faulty), rng.choice(["load", "load", "store", "evict", "lookup"])
        fault = Fault(rng.choice(KINDS), status=rng.choice(STATUSES), bit=rng.randrange(1 << 16))
        if operation != "evict" or fault.status is not Status.MISS:  # that would be a lie
            tier.add(operation, *[fault] * rng.randrange(1, 3))

    def break_the_copy(self, rng) -> None:
        self.world.transfer.fail_next(after_layers=rng.randrange(2))

    def release(self, _rng=None) -> None:
        for tier in self.faulty:
            tier.release()

    def run(self) -> None:
        for step in range(NUM_STEPS):
            rng = random.Random(f"{self.seed} {step}")
            (name,) = rng.choices(list(STEPS), list(STEPS.values()))
            getattr(self, name)(rng)
            if rng.random() < 0.7:
                self.chain.poll()
            else:
                self.chain.wait_for_message(0.001)
            self.collect()
            for link in self.chain.links:
                most = link.capacity_blocks
                assert most is None or self.chain.index.count(link.number) <= most, link.name
            self.world.device.assert_clean()

    def collect(self) -> None:
        """Every byte that a load has brought is right; what failed says why."""
        for job, slots in list(self.jobs.items()):
            if not job.is_over:
                continue
            assert job.state == "done" or job.cause
            if job.state == "done" and job in self.loads:
                tokens, start = self.loads[job]
                self.world.check(tokens[: start + len(slots)], start, slots)
            self.world.device.free(slots)
            del self.jobs[job]
            self.planned.pop(job, None)
            self.loads.pop(job, None)

    def repair(self) -> None:
        for tier in self.faulty:
            tier._once.clear()
        self.release()
        self.world.transfer.run_all()

    def finish(self) -> None:
        """Everything comes to its end."""
        for job in list(self.planned):
            self.chain.cancel(job)

        def is_quiet() -> bool:
            self.repair()
            return not self.chain.num_under_way

        self.world.until(is_quiet)
        self.collect()
        self.world.settle()  # no pin, lent or quarantined slot, violation
        assert not self.jobs

    def check_what_is_left(self) -> None:
        chain, host = self.chain, self.chain.host
        published = len(host.direct._published) if host.direct is not None else 0
        assert host.pool.num_free + published == host.pool.capacity, "slots are lost"
        assert (chain.fills.prefetched._coming, chain._parts.capacity.num_leaving) == (0, 0)
        for link in chain.links:
            check_places(chain.index._tiers[link.number])
            assert (link.backlog_bytes, link.num_loading, link.num_removing) == (0, 0, 0), link.name
            assert not any([link.waiting, link.storing, link.leaving]), link.name
        for number, tier in self.owned.items():
            link, kept, known = chain.links[number], set(tier.medium.values), set(chain.index.keys(number))
            assert kept - known <= {*link.strays, *link.doomed}, f"{link.name}: room that nobody will free"
            assert known <= kept, f"{link.name}: promised, and not there"


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_wrong_or_left_however_threads_run(seed):
    engine = Engine(seed)
    try:
        engine.run()
        engine.finish()
        engine.check_what_is_left()
    finally:  # a failing seed must not leave threads for the next
        engine.repair()
        engine.world.close()
