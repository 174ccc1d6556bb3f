"""A chain over a simulated device, with an engine just big enough to store and load prompts."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from flexkv_core import ChainConfig, Namespace, Tier
from flexkv_core.chain import TierChain
from flexkv_core.chain.jobs import LoadJob, StoreJob
from flexkv_core.chain.receipts import Receipt
from flexkv_core.keys import BlockChain, encode_tokens
from flexkv_core.layout import BlockLayout
from flexkv_core.testing import FakeClock, FakeDevice, FakeTransfer, context_for, small_layout
from flexkv_driver_cpu.config import CpuConfig
from flexkv_driver_cpu.tier import CpuTier
from tests.support.waiting import DEADLINE_S


def cpu_tier(layout: BlockLayout, blocks: int, name: str = "host") -> CpuTier:
    """A real host pool of ``blocks`` slots."""
    return CpuTier(CpuConfig(capacity=blocks * layout.slot_bytes), context_for(layout, name))


class World:
    """A chain, a device, and what an engine does with them."""

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, dict[str, Any]]],
        *,
        layout: BlockLayout | None = None,
        manual: bool = False,
        clock: FakeClock | None = None,
        num_slots: int = 2048,
        **config: Any,
    ) -> None:
        """Chain ``tiers`` (each with its policy fields) over a fresh device."""
        self.layout = layout or small_layout()
        self.clock = clock or FakeClock()
        self.device = FakeDevice(self.layout, num_slots)
        self.transfer = FakeTransfer(self.device, manual=manual)
        self.receipts: list[Receipt] = []
        rows = []
        for number, (_, policy) in enumerate(tiers):
            rows.append({"name": f"tier{number}", "driver": "test", "retries": 0} | policy)
        self.config = ChainConfig.model_validate(
            {"block_tokens": self.layout.block_tokens, "tiers": rows} | config
        )
        self.chain = TierChain(
            config=self.config,
            layout=self.layout,
            tiers=[tier for tier, _ in tiers],
            transfer=self.transfer,
            clock=self.clock,
            wall_clock=self.clock,
            on_receipt=self.receipts.append,
        )
        self.chain.warm_up()
        self.root = Namespace(model="test", layout=self.layout.fingerprint.hex()).digest()

    def sequence(self, tokens: Sequence[int]) -> BlockChain:
        """Tokens under the test's namespace."""
        return BlockChain(self.root, self.layout.block_tokens, encode_tokens(list(tokens)))

    def begin_store(self, tokens: Sequence[int]) -> tuple[StoreJob | None, Sequence[int]]:
        """Compute ``tokens`` on the device and begin to store them; returns the job and its slots."""
        slots = self.device.allocate(len(tokens))
        self.device.forward(slots, tokens)
        job = self.chain.store(self.sequence(tokens), len(tokens), label="s")
        if job is not None:
            wanted = [slot for start, stop in job.plan.ranges() for slot in slots[start:stop]]
            self.chain.launch(job, array("q", wanted), self.transfer.fence())
        return job, slots

    def store(self, tokens: Sequence[int]) -> StoreJob | None:
        """Compute and store ``tokens``, to the end of every cascade; the device slots are free again."""
        job, slots = self.begin_store(tokens)
        self.settle()
        self.device.free(slots)
        return job

    def hit(self, tokens: Sequence[int], start: int = 0) -> int:
        """Tokens of the prefix that the chain promises."""
        return self.chain.lookup(self.sequence(tokens), start=start).num_tokens

    def begin_load(self, tokens: Sequence[int], start: int = 0) -> tuple[LoadJob | None, Sequence[int]]:
        """Begin to load what is promised into fresh device slots."""
        sequence = self.sequence(tokens)
        job = self.chain.load(sequence, self.chain.lookup(sequence, start=start), start=start, label="l")
        if job is None:
            return None, ()
        slots = self.device.allocate(job.num_tokens)
        self.chain.bind(job, slots, self.transfer.fence())
        return job, slots

    def load(self, tokens: Sequence[int], start: int = 0) -> int:
        """Load what is promised and check every byte; returns the tokens loaded (0 on failure)."""
        job, slots = self.begin_load(tokens, start)
        if job is None:
            return 0
        self.settle()
        assert job.is_over
        loaded = job.num_tokens if job.state == "done" else 0
        if loaded:
            self.check(tokens, start, slots)
        self.device.free(slots)
        return loaded

    def check(self, tokens: Sequence[int], start: int, slots: Sequence[int]) -> None:
        """The device slots hold the KV of ``tokens[start:]``."""
        behind = [0] * start + list(slots)
        self.device.check_from(behind, tokens, start)

    def settle(self) -> None:
        """Wait until nothing is under way, and check that nothing was left."""
        assert self.chain.drain(DEADLINE_S), f"still under way: {self.chain.num_under_way}"
        self.assert_idle()

    def until(self, condition: Callable[[], object]) -> None:
        """Take messages in until ``condition`` holds; fails at the deadline."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, "the condition never came true"
            self.chain.wait_for_message(0.005)

    def assert_idle(self) -> None:
        """No pin, no lent slot, no violation, no fault that was only counted."""
        assert self.count("core_faults") == 0
        assert self.chain.index.num_pins == 0
        assert self.chain.host.num_lent == 0
        assert self.chain.host.num_quarantined == 0
        self.device.assert_clean()

    def count(self, name: str, **labels: str) -> int:
        """A counter's value."""
        return int(self.chain.metrics.value(name, **labels))

    def close(self) -> None:
        """Close the chain."""
        self.chain.close()
