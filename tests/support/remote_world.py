"""A chain of a host pool over a real remote tier, with an engine that waits as ours does."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from flexkv_core import Tier
from flexkv_core.testing import FakeClock, make_value, small_layout
from tests.support.chains import World, cpu_tier
from tests.support.waiting import wait_until

LAYOUT = small_layout(num_layers=4, row_bytes=512)
BLOCK = LAYOUT.block_tokens
NAME = "far"
DRIVER_S = 60.0
"""The driver's own time-outs: nobody waits for one where the core's deadlines do what they are for."""

POLICY = {
    "name": NAME,
    "lookup_deadline_s": 0.5,
    "load_deadline_s": 1.0,
    "store_deadline_s": 1.0,
    "breaker_reset_s": 5.0,
    "retries": 1,
}
"""On the world's clock, which stands unless a test lets it go."""

SLACK_S = 20.0
"""What a busy machine may add to a wait; far less than a driver's time-out.  That deadlines are kept to the
tenth of a second is shown by a clock that the test moves (``test_hung_and_broken_tiers``)."""


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


class StandingClock(FakeClock):
    """Stands, so that no deadline passes because a machine is slow; goes as real time does where it may."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._since: float | None = None

    def __call__(self) -> float:
        since = self._since
        return super().__call__() + (time.monotonic() - since if since is not None else 0.0)

    @contextmanager
    def going(self) -> Iterator[None]:
        """Real time passes meanwhile."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            passed_s, self._since = time.monotonic() - self._since, None
            self.advance(passed_s)


class RemoteWorld(World):
    """Serves requests one after the other; what they compute is stored in the background."""

    def __init__(
        self, tier: Tier, *, host_blocks: int = 16, lookup_wait_s: float = 0.05, **policy: Any
    ) -> None:
        """Chain a host pool of ``host_blocks`` over ``tier``; ``policy`` changes ``POLICY``."""
        super().__init__(
            [(cpu_tier(LAYOUT, host_blocks), {"name": "host"}), (tier, POLICY | policy)],
            layout=LAYOUT,
            clock=StandingClock(),
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

    def serve_until(self, condition: Callable[[Served], object], tokens: Sequence[int]) -> None:
        """Serve again and again, from an empty host pool, until an answer is as it should be."""

        def is_so() -> bool:
            self.clock.advance(self.config.tiers[1].breaker_reset_s)
            self.empty_host()
            return bool(condition(self.serve(tokens)))

        wait_until(is_so, "it comes back")


OpenWorld = Callable[..., RemoteWorld]


def world_over(stack: ExitStack, tier: Tier, **policy: Any) -> RemoteWorld:
    """A world over ``tier``, closed before what was started earlier."""
    world = RemoteWorld(tier, **policy)
    stack.callback(world.close)
    return world


def forget_and_ask(world: RemoteWorld, tokens: Sequence[int]) -> None:
    """Leave the remote tier as the only place of a prompt, and known as one."""
    world.empty_host()
    world.chain.probe(world.sequence(tokens), 0)
    world.settle()


def foreign() -> bytes:
    """A whole and good value, of another model's layout."""
    return bytes(make_value(small_layout(block_tokens=BLOCK), range(16)).view)


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


def check_waited(world: RemoteWorld, served: Served) -> None:
    """It waited no longer than the configured deadlines let it."""
    assert served.waited_s <= world.longest_wait_s + SLACK_S, served


def check_survived(
    world: RemoteWorld, caplog: pytest.LogCaptureFixture, metric: str, cause: str, hint: str
) -> None:
    """Some requests, new ones and repeated ones: none waits long, all is named in few lines, and counted."""
    for seed in (50, 51, 52, 50, 53, 52):
        served = world.serve(prompt(seed))
        check_waited(world, served)
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
