"""A faulty tier whose hung threads are known by name, so that a test can wait until nothing moves."""

from __future__ import annotations

import threading
import time

from flexkv_core.chain import TierChain
from flexkv_core.testing import FaultTier
from tests.support.waiting import DEADLINE_S


class GatedTier(FaultTier):
    """A ``FaultTier`` that tells which threads hang in it."""

    hung: set[str]

    def _hang(self, entered: int) -> None:
        name = threading.current_thread().name
        if not hasattr(self, "hung"):
            self.hung = set()
        self.hung.add(name)
        super()._hang(entered)
        self.hung.discard(name)


def wait_until_still(chain: TierChain, deadline_s: float = DEADLINE_S) -> None:
    """Take messages in until every lane is idle or hangs; lanes must have one thread each."""
    end = time.monotonic() + deadline_s
    while any(_moves(link) for link in chain.links) or not chain._completions.is_empty():
        if time.monotonic() > end:
            raise AssertionError("the workers never came to rest")
        chain.wait_for_message(0.001)
    chain.poll()


def _moves(link) -> bool:
    hung = getattr(link.raw, "hung", set())
    return any(
        lane.num_open and not any(thread.name in hung for thread in lane.threads)
        for lane in link.workers._lanes
    )
