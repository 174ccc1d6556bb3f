"""The tier interface: what a driver's author gets for nothing."""

from __future__ import annotations

import dataclasses

import pytest

from flexkv_core import (
    DONE,
    MISS,
    BufferState,
    DirectTier,
    Outcome,
    Status,
    Tier,
    TierCapabilities,
    TierContext,
    UnsupportedOperationError,
    failed,
    loaded,
)


class Bare(Tier):
    """The five methods that a tier must have, and no more."""

    capabilities = TierCapabilities(capacity_bytes=7)
    closed = 0

    def lookup(self, keys):
        self.asked = list(keys)
        return [MISS] * len(keys)

    def load(self, keys, into):
        return [MISS] * len(keys)

    def store(self, keys, values):
        return [failed(Status.NO_SPACE, "full")] * len(keys)

    def evict(self, keys):
        return [MISS] * len(keys)

    def close(self):
        self.closed += 1


def test_defaults():
    tier = Bare()
    assert (tier.usage().num_blocks, tier.usage().used_bytes, tier.usage().capacity_bytes) == (-1, -1, 7)
    with pytest.raises(UnsupportedOperationError):
        tier.list_blocks()
    tier.register(None)
    tier.check_health()
    assert tier.asked == [bytes(32)]


def test_context_manager_closes_also_after_an_error():
    tier = Bare()
    with pytest.raises(ZeroDivisionError), tier:
        raise ZeroDivisionError
    assert tier.closed == 1


@pytest.mark.parametrize("method", ["lookup", "load", "store", "evict", "close"])
def test_a_tier_without_one_of_the_five_cannot_be_made(method):
    with pytest.raises(TypeError, match=method):
        type("Partial", (Bare,), {method: getattr(Tier, method)})()


def test_direct_tier_asks_for_more():
    with pytest.raises(TypeError, match="borrow"):
        type("Half", (Bare, DirectTier), {})()


def test_outcomes():
    assert DONE.is_ok
    assert loaded(5) == Outcome(Status.OK, 5, BufferState.COMPLETE)
    bad = failed(Status.TIMEOUT, "late", BufferState.UNCERTAIN)
    assert not bad.is_ok
    assert (bad.buffer, bad.num_bytes, bad.reason) == (BufferState.UNCERTAIN, 0, "late")
    assert [status for status in Status if Outcome(status).is_ok] == [Status.OK]
    assert MISS.buffer is BufferState.UNTOUCHED


def test_records_are_frozen():
    for record, field in ((MISS, "status"), (TierCapabilities(), "shared")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


def test_capabilities_and_context_are_written_by_name():
    """Fields may be added: nobody may count on their order."""
    with pytest.raises(TypeError):
        TierCapabilities(True)
    with pytest.raises(TypeError):
        TierContext("name", 1, 1)


def test_capabilities_promise_nothing_by_default():
    has = TierCapabilities()
    assert not any((has.persistent, has.shared, has.direct_slots, has.can_list, has.expires))
    assert has.alignment_bytes == 1
