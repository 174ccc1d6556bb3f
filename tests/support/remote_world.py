"""A chain of a host pool over a real remote tier, with an engine that waits as ours does."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from flexkv_core import Tier
from flexkv_core.testing import small_layout
from tests.support.chains import World, cpu_tier

LAYOUT = small_layout(num_layers=4, row_bytes=512)
BLOCK = LAYOUT.block_tokens
NAME = "far"
POLICY = {
    "name": NAME,
    "lookup_deadline_s": 0.5,
    "load_deadline_s": 1.0,
    "store_deadline_s": 1.0,
    "breaker_reset_s": 0.2,
    "retries": 1,
}
"""Everything but the driver's own time-outs, which are longer: the core's deadlines are what counts."""

SLACK_S = 0.75
"""What a busy machine may add; less than a second deadline would."""


@dataclass(frozen=True)
class Served:
    """One request.

    Attributes:
        num_tokens: Tokens that came from the tiers, byte for byte right; the rest was computed.
        waited_s: How long it was held up before it could be computed.
        cause: Why its load failed, if one did.
    """

    num_tokens: int
    waited_s: float
    cause: str = ""


class RemoteWorld(World):
    """Serves requests one after the other; what they compute is stored in the background."""

    def __init__(
        self, tier: Tier, *, host_blocks: int = 16, lookup_wait_s: float = 0.05, **policy: Any
    ) -> None:
        """Chain a host pool of ``host_blocks`` over ``tier``; ``policy`` changes ``POLICY``."""
        super().__init__(
            [(cpu_tier(LAYOUT, host_blocks), {"name": "host"}), (tier, POLICY | policy)],
            layout=LAYOUT,
            clock=time.monotonic,  # type: ignore[arg-type]  # any clock will do
            num_slots=4096,
            engine={"lookup_wait_s": lookup_wait_s, "shutdown_deadline_s": 10},
        )
        self.longest_wait_s = lookup_wait_s + self.config.tiers[1].load_deadline_s

    def serve(self, tokens: Sequence[int]) -> Served:
        """Ask, load what is promised, compute and store what is not."""
        began = time.monotonic()
        self._ask(tokens)
        job, slots = self.begin_load(tokens)
        if job is not None:
            self.until(lambda: job.is_over)
        waited = time.monotonic() - began
        loaded = job.num_tokens if job is not None and job.state == "done" else 0
        if loaded:
            self.check(tokens[:loaded], 0, slots)
        if job is not None:
            self.device.free(slots)
        self.compute(tokens)
        return Served(loaded, waited, job.cause if job is not None else "")

    def _ask(self, tokens: Sequence[int]) -> None:
        """Ask the shared tier, and wait no longer for its answer than the engine would."""
        sequence = self.sequence(tokens)
        found = self.chain.lookup(sequence)
        if not found.wants_probe or self.chain.num_probes:
            return
        self.chain.probe(sequence, found.num_tokens // BLOCK)
        end = time.monotonic() + self.config.engine.lookup_wait_s
        while self.chain.num_probes and (left := end - time.monotonic()) > 0:
            self.chain.wait_for_message(left)

    def compute(self, tokens: Sequence[int]) -> None:
        """Store ``tokens`` as an engine does that has just computed them; the cascade goes on behind."""
        job, slots = self.begin_store(tokens)
        if job is not None:
            self.until(lambda: job.is_over)
        self.device.free(slots)

    def empty_host(self) -> None:
        """Forget what lies in the host pool, and what the remote tier said."""
        self.chain.forget_all()

    def serve_until(
        self, condition: Callable[[Served], object], tokens: Sequence[int], deadline_s: float = 30.0
    ) -> None:
        """Serve again and again, from an empty host pool, until an answer is as it should be."""
        end = time.monotonic() + deadline_s
        while True:
            self.empty_host()
            if condition(self.serve(tokens)):
                return
            assert time.monotonic() < end, "it never came back"
            time.sleep(0.02)


def prompt(seed: int, blocks: int = 4) -> list[int]:
    """Tokens of so many whole blocks; another seed shares none of them."""
    return [seed * 1000 + i for i in range(blocks * BLOCK)]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the project logged as a warning or worse."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("flexkv") and record.levelno >= logging.WARNING
    ]


def check_survived(
    world: RemoteWorld, caplog: pytest.LogCaptureFixture, metric: str, cause: str, hint: str
) -> None:
    """Some requests, new ones and repeated ones: none waits long, all is named in few lines, and counted."""
    for seed in (50, 51, 52, 50, 53, 52):
        served = world.serve(prompt(seed))
        assert served.waited_s <= world.longest_wait_s + SLACK_S, served
    assert world.serve(prompt(52)).num_tokens == len(prompt(52)), "the host pool serves on"
    world.until(lambda: world.count(metric, tier=NAME, cause=cause))
    check_named(caplog, hint)


def check_named(caplog: pytest.LogCaptureFixture, hint: str) -> None:
    """A few warnings, each one line of the tier's; one of them says what is wrong."""
    lines = lines_of(caplog)
    assert any(re.search(hint, line) for line in lines), lines
    assert all(line.startswith(f"[FlexKV] tier {NAME}") and "\n" not in line for line in lines), lines
    assert len(lines) <= 8, lines


def check_mended(world: RemoteWorld) -> None:
    """It stores and serves again, by itself."""
    tokens = prompt(60)
    world.serve_until(lambda served: served.num_tokens == len(tokens), tokens)
