"""The chain against a plain list of what was stored: random work, faults, cancels and restarts.

Whatever happens below, a load brings exactly the bytes that were stored or fails with a cause, nobody
is promised what was never stored, and when all is quiet nothing is pinned, lent or lost.
"""

from __future__ import annotations

import os
from array import array

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexkv_core.chain.jobs import LoadJob
from flexkv_core.testing import Fault, FaultKind, Medium, MemoryTier, context_for, small_layout
from flexkv_core.tier import Status, TierCapabilities
from tests.support.chains import World, cpu_tier
from tests.support.gated import GatedTier, wait_until_still
from tests.support.places import check_places

BLOCK = 4
LOAD_FAULTS = [FaultKind.RAISE, FaultKind.FLIP, FaultKind.TRUNCATE, FaultKind.SWAP, FaultKind.FAIL_KEYS]
NONSENSE = [FaultKind.RETURN_NONE, FaultKind.RETURN_SHORT, FaultKind.RETURN_LONG, FaultKind.RETURN_JUNK]
STATUSES = [Status.UNAVAILABLE, Status.TIMEOUT, Status.CORRUPT, Status.DENIED, Status.NO_SPACE, Status.MISS]


def common(a, b) -> int:
    """How many leading tokens two lists share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class ChainMachine(RuleBasedStateMachine):
    """An engine that stores and loads prompts which share beginnings."""

    @initialize(
        host=st.sampled_from([0, 1, 2, 4, 6]),
        host_write=st.sampled_from(["through", "through", "through", "around", "never"]),
        below=st.sampled_from([0, 3, 5, 8]),
        write=st.sampled_from(["through", "through", "around", "back"]),
        shared=st.booleans(),
        promote=st.sampled_from(["always", "never", 2]),
        policy=st.sampled_from(["lru", "lfu", "slru", "fifo", "mru", "filo"]),
        ratio=st.sampled_from([0.0, 0.5]),
        page=st.sampled_from([1, 2, 4]),
        ttl=st.sampled_from([None, None, 20.0]),
    )
    def start(self, host, host_write, below, write, shared, promote, policy, ratio, page, ttl):
        self.layout = small_layout(block_tokens=BLOCK, page_tokens=page)
        self.host, self.below, self.shared = host, below, shared
        write = "through" if write == "back" and (not host or host_write != "through") else write
        common_policy = {"eviction": {"policy": policy, "ratio": ratio}, "ttl_s": ttl}
        one = {"load_threads": 1, "store_threads": 1, "breaker_failures": 3}
        self.policies = [
            common_policy | {"write": host_write},
            common_policy | one | {"write": write, "promote": promote},
            one | ({} if promote == 2 else {"promote": promote}),
        ]
        self.media = [Medium(), Medium()]
        self.stored: list[list[int]] = []
        self.prompts: list[list[int]] = [[]]
        self.labels: set[str] = set()
        self.open()

    def open(self) -> None:
        layout = self.layout
        context = context_for(layout)
        size = self.below * layout.slot_bytes
        can = TierCapabilities(persistent=True, can_list=True, max_batch=2, capacity_bytes=size)
        self.tier = GatedTier(MemoryTier(context, can, self.media[0]))
        self.faulty = [self.tier]
        rows = [(self.tier, self.policies[1])]
        if self.host:
            rows.insert(0, (cpu_tier(layout, self.host), self.policies[0]))
        if self.shared:
            far = GatedTier(MemoryTier(context, TierCapabilities(shared=True, max_batch=3), self.media[1]))
            self.faulty.append(far)
            rows.append((far, self.policies[2]))
        self.world = World(
            rows,
            layout=layout,
            manual=True,
            staging=6 * layout.slot_bytes,
            num_slots=256,
            engine={"shutdown_deadline_s": 0.2},
        )
        self.jobs: dict[object, list[int]] = {}  # every open job and its device slots
        self.planned: dict[object, tuple] = {}  # jobs without device slots yet
        self.loads: dict[object, tuple[list[int], int]] = {}

    # ---- what an engine does -------------------------------------------------------------------

    @rule(base=st.integers(0, 5), cut=st.integers(0, 30), more=st.lists(st.integers(0, 2), max_size=13))
    def new_prompt(self, base, cut, more):
        head = self.prompts[base % len(self.prompts)][:cut]
        self.prompts = [*self.prompts[-5:], head + more]

    @rule(at=st.integers(0, 5), with_tail=st.booleans(), launch=st.booleans())
    def store(self, at, with_tail, launch):
        tokens = self.prompts[at % len(self.prompts)]
        world = self.world
        if world.device.num_free <= len(tokens):
            return
        slots = list(world.device.allocate(len(tokens)))
        world.device.forward(slots, tokens)
        job = world.chain.store(world.sequence(tokens), len(tokens), with_tail=with_tail)
        if job is None:
            world.device.free(slots)
            return
        self.stored.append(tokens)
        self.jobs[job] = slots
        self.planned[job] = tuple(slot for start, stop in job.plan.ranges() for slot in slots[start:stop])
        if launch:
            self.bind()

    @rule(at=st.integers(0, 5), start=st.integers(0, 9), bind=st.booleans(), prefetch=st.booleans())
    def load(self, at, start, bind, prefetch):
        tokens = self.prompts[at % len(self.prompts)]
        chain, sequence = self.world.chain, self.world.sequence(tokens)
        start = min(start, len(tokens))
        found = chain.lookup(sequence, start=start)
        assert found.num_tokens <= max(start, self.bound(tokens))
        if prefetch:
            chain.prefetch(sequence, found, start=start)
            return
        job = chain.load(sequence, found, start=start)
        if job is None:
            return
        assert job.num_tokens <= found.num_tokens - start
        if self.world.device.num_free < job.num_tokens:
            chain.cancel(job)
            return
        slots = list(self.world.device.allocate(job.num_tokens))
        self.jobs[job], self.loads[job], self.planned[job] = slots, (tokens, start), tuple(slots)
        if bind:
            self.bind()

    @precondition(lambda self: self.planned)
    @rule()
    def bind(self):
        job, slots = self.planned.popitem()
        chain, fence = self.world.chain, self.world.transfer.fence()
        (chain.bind if isinstance(job, LoadJob) else chain.launch)(job, array("q", slots), fence)

    @precondition(lambda self: self.jobs)
    @rule(at=st.integers(0, 9))
    def cancel(self, at):
        self.world.chain.cancel(list(self.jobs)[at % len(self.jobs)])

    @rule(at=st.integers(0, 5))
    def ask_shared(self, at):
        self.world.chain.probe(self.world.sequence(self.prompts[at % len(self.prompts)]), 0)

    @rule(at=st.integers(0, 5), start=st.integers(0, 9))
    def look(self, at, start):
        tokens = self.prompts[at % len(self.prompts)]
        before = self.world.chain.metrics.snapshot(), self.world.chain.host.num_lent
        found = [self.world.hit(tokens, start=start) for _ in range(3)]
        assert found[0] == found[1] == found[2] <= max(start, self.bound(tokens))
        assert before == (self.world.chain.metrics.snapshot(), self.world.chain.host.num_lent)

    @rule(layers=st.sampled_from([None, None, 1]))
    def copy(self, layers):
        self.world.transfer.step(layers)

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0, 31.0]))
    def wait(self, seconds):
        self.world.clock.advance(seconds)

    @rule()
    def forget(self):
        self.world.chain.forget_all()

    # ---- what goes wrong -----------------------------------------------------------------------

    @rule(
        which=st.integers(0, 1),
        operation=st.sampled_from(["load", "load", "store", "evict", "lookup"]),
        kind=st.sampled_from([*LOAD_FAULTS, *NONSENSE, FaultKind.HANG]),
        status=st.sampled_from(STATUSES),
        bit=st.integers(0, 1 << 16),
        count=st.integers(1, 3),
    )
    def break_a_tier(self, which, operation, kind, status, bit, count):
        tier = self.faulty[which % len(self.faulty)]
        tier.add(operation, *[Fault(kind, status=status, bit=bit)] * count)

    @rule(refuse=st.booleans(), after=st.integers(0, 1))
    def break_the_copy(self, refuse, after):
        if refuse:
            self.world.transfer.refuse_next()
        else:
            self.world.transfer.fail_next(after_layers=after)

    @rule()
    def release(self):
        for tier in self.faulty:
            tier.release()

    @rule()
    def restart(self):
        self.finish()
        self.world.close()
        self.open()

    @rule(quiet=st.sampled_from([True, True, False]))
    def close_at_work(self, quiet):
        """Close with whatever is under way; every job has ended then, and nothing is held."""
        if quiet:  # copies that run would be waited for
            self.world.transfer.run_all()
        for tier in self.faulty:
            tier._once.clear()
            tier.release()
        chain = self.world.chain
        self.world.close()
        assert all(job.is_over for job in self.jobs)
        self.collect()
        assert not chain.index.num_pins
        assert not chain.host.num_lent
        assert not chain.num_under_way
        self.open()

    # ---- what must hold ------------------------------------------------------------------------

    def bound(self, tokens) -> int:
        return max((common(tokens, other) for other in self.stored), default=0)

    @invariant()
    def holds(self):
        if not hasattr(self, "world"):
            return
        wait_until_still(self.world.chain)
        self.collect()
        self.check_index()
        self.check_slots()
        self.world.device.assert_clean()

    def collect(self) -> None:
        for job, slots in list(self.jobs.items()):
            if not job.is_over:
                continue
            if job in self.loads and job.state == "done":
                tokens, start = self.loads[job]
                self.world.check(tokens[: start + len(slots)], start, slots)
            elif job.state != "done":
                assert job.cause
            self.world.device.free(slots)
            del self.jobs[job]
            self.planned.pop(job, None)
            self.loads.pop(job, None)

    def check_index(self) -> None:
        index = self.world.chain.index
        pins = 0
        for link in self.world.chain.links:
            places = index._tiers[link.number]
            check_places(places)
            pins += places.num_pins
            assert link.capacity_blocks is None or len(places) <= link.capacity_blocks
            assert link.backlog_bytes >= 0
        assert pins == index.num_pins

    def check_slots(self) -> None:
        chain = self.world.chain
        pool, host = chain.host.pool, chain.host
        taken = len(pool._taken)
        assert pool.num_free + taken == pool.capacity
        published = len(host.direct._published) if host.direct is not None else 0
        assert published + host.num_lent == taken
        if host.direct is not None:
            places = chain.index._tiers[0]
            assert set(host.direct._published) == {key for key in places if places.get(key).is_ready}
        under_way = sum(job.num_tokens for job in chain.stores._active.values())
        assert chain.stores.tokens_under_way == under_way

    def finish(self) -> None:
        """Everything comes to its end; nothing is left."""
        for tier in self.faulty:
            tier._once.clear()
        for job in list(self.planned):
            self.world.chain.cancel(job)
        self.planned.clear()

        def push() -> bool:
            for tier in self.faulty:
                tier.release()
            self.world.transfer.run_all()
            return not self.world.chain.num_under_way

        self.world.until(push)
        self.collect()
        self.world.settle()
        assert not self.jobs
        chain = self.world.chain
        for link in chain.links:
            assert link.backlog_bytes == 0
            assert not link.waiting
            assert not link.storing
        link = chain.links[-2 if self.shared else -1]
        kept = set(self.media[0].values)
        assert kept - set(chain.index.keys(link.number)) <= {*link.strays, *link.doomed}
        assert set(chain.index.keys(link.number)) <= kept
        ended = len(self.world.receipts)
        assert ended == chain.metrics.value("jobs")

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.finish()
        finally:  # a failing example must not leave threads and memory for the next
            for tier in self.faulty:
                tier.release()
            self.world.close()


TestChainMachine = ChainMachine.TestCase
_THOROUGH = os.environ.get("FLEXKV_TEST_HYPOTHESIS") == "thorough"
# Examples with threads shrink slowly: the quick profile shows a failure as it was found.
TestChainMachine.settings = settings(
    max_examples=1000 if _THOROUGH else 60,
    stateful_step_count=60 if _THOROUGH else 40,
    deadline=None,
    phases=list(Phase) if _THOROUGH else [Phase.generate],
)
