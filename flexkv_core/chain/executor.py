"""A tier's queues and worker threads: the only place of the core that has threads for a tier.

Each tier has a load queue and a store queue with threads of their own, so that stores never delay
loads.  A call is submitted by the chain's thread, run by workers, and comes back through one
completion queue that the chain's thread drains.

Every call ends exactly once, with one outcome per key.  One that passes its deadline ends with
``TIMEOUT`` for what is not over; if workers are at it, the buffers of these pieces are ``UNCERTAIN`` and the
call is *adrift* until the last of them returns, which is reported by a second message (``Returned``): only
then may the buffers be used again.

Threads: the chain's thread, apart from what ``Lane`` runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..tier import Tier
from .calls import Call, Completions, Verb
from .lane import Clock, Lane

logger = logging.getLogger(__name__)


class TierWorkers:
    """A tier's lanes: loads, stores with evictions, and where a tier must be asked, lookups."""

    def __init__(
        self,
        name: str,
        tier: Tier,
        *,
        load_threads: int,
        store_threads: int,
        lookup_threads: int = 0,
        completions: Completions,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make threads ``flexkv-<name>-<lane>-<i>``; without any for lookups, these go with loads."""
        self._loads = Lane(f"{name}-load", tier, load_threads, completions, clock)
        self._stores = Lane(f"{name}-store", tier, store_threads, completions, clock)
        self._lookups = self._loads
        if lookup_threads:
            self._lookups = Lane(f"{name}-lookup", tier, lookup_threads, completions, clock)
        self._lanes = list(dict.fromkeys((self._loads, self._stores, self._lookups)))
        self.load_threads = load_threads
        self.store_threads = store_threads

    def start(self) -> None:
        """Start the threads; what was queued before is begun now."""
        for lane in self._lanes:
            lane.start()

    def submit(self, call: Call) -> None:
        """Queue a call; its end comes through the completions."""
        lane = {Verb.LOAD: self._loads, Verb.LOOKUP: self._lookups}.get(call.verb, self._stores)
        lane.submit(call)

    def withdraw(self, call: Call) -> bool:
        """End a load that nobody waits for; its end comes as always.  False if somebody has begun it."""
        return self._loads.withdraw(call)

    def hurry(self, call: Call, deadline: float) -> None:
        """A load that could wait is needed now, and given up at ``deadline`` if nobody has begun it yet."""
        self._loads.hurry(call, deadline)

    @property
    def num_open(self) -> int:
        """Calls that are queued, running or adrift."""
        return sum(lane.num_open for lane in self._lanes)

    @property
    def can_load(self) -> bool:
        """Whether a thread is left for loads: not all of them are lost in the tier."""
        return not self._loads.is_stuck

    @property
    def can_store(self) -> bool:
        """Whether a thread is left for stores."""
        return not self._stores.is_stuck

    @property
    def num_open_stores(self) -> int:
        """The same, of stores and evictions."""
        return self._stores.num_open

    def expire(self, now: float) -> None:
        """End calls whose deadline has passed."""
        for lane in self._lanes:
            lane.expire(now)

    def close(self) -> None:
        """Take no more calls and end the queued ones."""
        for lane in self._lanes:
            lane.close()

    def join(self, deadline: float) -> list[str]:
        """Wait for the threads until ``deadline`` (``time.monotonic``); names of those that hang."""
        return [name for lane in self._lanes for name in lane.join(deadline)]


def run_bounded(name: str, function: Callable[[], None], timeout_s: float) -> bool:
    """Run foreign code that may hang in a thread of its own; False if it has not ended in time.

    What it raises is logged: a driver that fails to close must not keep the others from closing.
    """

    def run() -> None:
        try:
            function()
        except Exception:  # noqa: BLE001 - the thread's top, round a foreign driver
            logger.exception("[FlexKV] %s failed", name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
