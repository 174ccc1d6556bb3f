"""Tier kit: several callers at once, and closing while they work."""

from __future__ import annotations

import os
import threading
import time
import warnings
from functools import partial

from flexkv_core.errors import TierError
from flexkv_core.tier import Outcome, Tier

from .kit import Crew, spin
from .tier_kit import Opener, TierKit, assert_holds, assert_never_wrong, load_one, store
from .values import Value

CLOSINGS = 5
"""How often a tier is closed under its callers, at another moment each time."""

ROUNDS = 12
"""Enough for threads to meet in every order on the small set of keys, quick for real media."""


class ThreadTests(TierKit):
    """Up to ``max_concurrency`` calls at once."""

    def _crew(self, tier: Tier) -> tuple[Crew, int]:
        if tier.capabilities.max_concurrency < 2:
            self.skip("the tier takes one call at a time")
        return Crew(self.deadline_s), min(tier.capabilities.max_concurrency, 8)

    def test_threads_on_keys_of_their_own(self, tier: Tier) -> None:
        crew, count = self._crew(tier)
        values = self.values(tier, count * 3)

        def work(number: int) -> None:
            mine = values[number * 3 : number * 3 + 3]
            for _ in range(ROUNDS):
                store(tier, mine)
                assert_holds(tier, mine)
                tier.evict([mine[0].key])

        crew.start(count, work)
        crew.join()
        assert_holds(tier, [value for at, value in enumerate(values) if at % 3])

    def test_threads_on_the_same_keys(self, tier: Tier) -> None:
        crew, count = self._crew(tier)
        editions = [self.values(tier, 3, seed=seed) for seed in range(3)]

        def work(number: int) -> None:
            chance = self.random()
            chance.seed(self.seed + number)
            for _ in range(ROUNDS * 3):
                at = chance.randrange(3)
                act = chance.choice(["store", "load", "load", "evict"])
                if act == "store":
                    store(tier, [chance.choice(editions)[at]], check=False)
                elif act == "evict":
                    tier.evict([editions[0][at].key])
                else:
                    self._check_one(tier, [edition[at] for edition in editions])

        crew.start(count, work)
        crew.join()

    def _check_one(self, tier: Tier, editions: list[Value]) -> None:
        outcome, view = load_one(tier, editions[0])
        is_served = assert_never_wrong(editions[0], outcome, view, *editions)
        assert is_served or not outcome.is_ok, "a torn or foreign value was told to be OK"

    def test_close_during_work(self, opener: Opener) -> None:
        chance = self.random()
        for _ in range(CLOSINGS):
            tier = opener.open()
            crew, count = self._crew(tier)
            values = self.values(tier, 4)
            store(tier, values)
            at_work = threading.Barrier(count + 1)
            crew.start(count, partial(self._work_until_closed, tier, values, at_work))
            at_work.wait(self.deadline_s)
            spin(chance.random() * 2e-3)
            tier.close()
            crew.join()

    def _work_until_closed(
        self, tier: Tier, values: list[Value], at_work: threading.Barrier, number: int
    ) -> None:
        value = values[number % 4]
        at_work.wait(self.deadline_s)
        until = time.monotonic() + self.deadline_s
        while time.monotonic() < until:
            try:
                outcome, view = load_one(tier, value)
                assert_never_wrong(value, outcome, view)
                store(tier, [value], check=False)
            except TierError:
                return
        raise AssertionError("the tier goes on working after close")

    def test_close_from_two_threads(self, opener: Opener) -> None:
        tier = opener.open()
        crew = Crew(self.deadline_s)
        crew.start(2, lambda _: tier.close())
        crew.join()

    def test_forked_child_does_not_disturb(self, opener: Opener) -> None:
        tier = opener.open()
        self.require(tier, "shared")
        values = self.values(tier, 4)
        store(tier, values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads and fork
            pid = os.fork()
        if pid == 0:  # pragma: no cover - the child leaves at once, as one that execs would
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert_holds(tier, values)
        outcomes: list[Outcome] = store(tier, self.values(tier, 4, first=4))
        assert len(outcomes) == 4
