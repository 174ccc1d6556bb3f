"""Tier kit: media that are away, hang, dawdle or break off, and clocks that differ."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from flexkv_core.errors import TierClosedError, TierError
from flexkv_core.tier import Status, Tier

from .kit import Crew
from .tier_kit import (
    Opener,
    TierKit,
    assert_holds,
    assert_never_wrong,
    load,
    load_one,
    store,
    well_formed,
)
from .values import Value

_HELD_S = 1.0
"""So long a medium is disturbed, at most: a tier that waits longer is answered afterwards."""

_SKEW_S = 3600.0


class OutageTests(TierKit):
    """No answer is no miss, a late one is nobody else's, and the tier comes back by itself."""

    def test_unreachable_medium_is_a_failure_and_no_miss(self, opener: Opener) -> None:
        tier = opener.open()
        values = self.values(tier, 2)
        store(tier, values)
        broken = ExitStack()
        try:
            broken.enter_context(self.break_medium(opener.medium))
        except NotImplementedError:
            self.skip("break_medium is not given")
        with broken:
            self._assert_fails(tier, "load")
            self._assert_fails(tier, "store")
        _wait_until_well(tier)
        store(tier, values)
        assert_holds(tier, values)

    def _assert_fails(self, tier: Tier, operation: str) -> None:
        values = self.values(tier, 2)
        keys = [value.key for value in values]
        try:
            if operation == "load":
                outcomes = tier.load(keys, [self.buffer() for _ in keys])
            else:
                outcomes = tier.store(keys, [value.view for value in values])
        except TierClosedError:
            raise
        except TierError:
            return
        for outcome in well_formed(outcomes, 2):
            assert outcome.status not in (Status.OK, Status.MISS), f"{operation} while unreachable: {outcome}"

    @pytest.mark.parametrize("how", ["hung", "slow", "cut"])
    def test_disturbed_medium_gives_no_wrong_answer(self, opener: Opener, how: str) -> None:
        tier = opener.open()
        values = self.values(tier, 4)
        store(tier, values)
        crew, answered = Crew(self.deadline_s), threading.Event()

        def ask(_number: int) -> None:
            try:
                _assert_there_or_failed(tier, values)
            finally:
                answered.set()

        disturbed = ExitStack()
        try:
            disturbed.enter_context(self.disturb_medium(opener.medium, how))
        except NotImplementedError:
            is_given = type(self).disturb_medium is not TierKit.disturb_medium
            self.skip(f"disturb_medium {f'does not know {how!r}' if is_given else 'is not given'}")
        with disturbed:
            crew.start(1, ask)
            answered.wait(_HELD_S)
        crew.join()
        _wait_until_well(tier)
        assert_holds(tier, values[::-1])  # in another order: what comes late would be another key's

    def test_clocks_that_differ(self, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        tier = opener.open()
        values = self.values(tier, 4)
        true_time = time.time
        for skew, mine in ((_SKEW_S, values[:2]), (-_SKEW_S, values[2:])):
            with monkeypatch.context() as here:
                here.setattr(time, "time", lambda skew=skew: true_time() + skew)
                store(tier, mine)
        if tier.capabilities.persistent:
            tier.close()
            tier = opener.open()
        if not tier.capabilities.expires:
            assert_holds(tier, values)
        for value in values:
            assert_never_wrong(value, *load_one(tier, value))


def _assert_there_or_failed(tier: Tier, values: Sequence[Value]) -> None:
    """Load values that are there: each comes as it is, or fails; none is a miss."""
    try:
        got = load(tier, [value.key for value in values], values[0].layout.slot_bytes)
    except TierClosedError:
        raise
    except TierError:
        return
    for value, (outcome, view) in zip(values, got, strict=True):
        assert outcome.status is not Status.MISS, "what could not be looked at was told to be a miss"
        assert assert_never_wrong(value, outcome, view) or not outcome.is_ok, f"told to be whole: {outcome}"


def _wait_until_well(tier: Tier) -> None:
    """A client may need a call or two to find out that it may connect again."""
    for _ in range(3):
        try:
            return tier.check_health()
        except Exception as exc:  # noqa: BLE001 - whatever is left of the outage
            last = exc
    raise AssertionError("the medium is back, the tier is not") from last
