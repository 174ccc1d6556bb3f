"""The fault wrapper does what its script says, and the same for the same seed."""

import threading

import pytest

from flexkv_core import MISS, Status, TierUnavailableError
from flexkv_core.testing import (
    FakeClock,
    Fault,
    FaultKind,
    FaultTier,
    MemoryTier,
    SeededFaults,
    aligned_buffer,
    context_for,
    make_value,
    make_values,
    small_layout,
)
from tests.support.waiting import DEADLINE_S

LAYOUT = small_layout()
VALUES = make_values(LAYOUT, 3)
KEYS = [value.key for value in VALUES]
CORRUPTING = [FaultKind.FLIP, FaultKind.TRUNCATE, FaultKind.SWAP, FaultKind.REPLACE]


@pytest.fixture
def tier():
    tier = FaultTier(MemoryTier(context_for(LAYOUT)))
    tier.store(KEYS, [value.view for value in VALUES])
    return tier


def load(tier):
    views = [aligned_buffer(LAYOUT.slot_bytes) for _ in VALUES]
    return tier.load(KEYS, views), views


@pytest.mark.parametrize("kind", CORRUPTING)
def test_spoilt_values_never_verify(tier, kind):
    foreign = make_value(LAYOUT, range(16), parent=bytes(32))
    tier.add("load", Fault(kind, at=(1,), value=bytes(foreign.view)))
    outcomes, views = load(tier)
    assert all(outcome.is_ok for outcome in outcomes)
    read = [view[: outcome.num_bytes] for view, outcome in zip(views, outcomes, strict=True)]
    assert [bool(v.accepts(r)) for v, r in zip(VALUES, read, strict=True)] == [True, False, True]
    outcomes, views = load(tier)
    assert all(value.equals(view) for value, view in zip(VALUES, views, strict=True))


def test_fails_some_keys_and_leaves_the_rest_alone(tier):
    tier.add("load", Fault(FaultKind.FAIL_KEYS, at=(0, 2), status=Status.DENIED))
    outcomes, views = load(tier)
    assert [outcome.status for outcome in outcomes] == [Status.DENIED, Status.OK, Status.DENIED]
    assert VALUES[1].equals(views[1])


def test_raises_until_told_otherwise(tier):
    tier.always("lookup", Fault(FaultKind.RAISE))
    for _ in range(2):
        with pytest.raises(TierUnavailableError):
            tier.lookup(KEYS)
    tier.always("lookup", None)
    assert tier.lookup([bytes(32)]) == [MISS]
    assert tier.calls == [("store", 3), ("lookup", 3), ("lookup", 3), ("lookup", 1)]


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (FaultKind.RETURN_NONE, lambda got: got is None),
        (FaultKind.RETURN_SHORT, lambda got: len(got) == 2),
        (FaultKind.RETURN_LONG, lambda got: len(got) == 4),
        (FaultKind.RETURN_JUNK, lambda got: got == ["ok"] * 3),
    ],
)
def test_returns_nonsense(tier, kind, check):
    tier.add("lookup", Fault(kind))
    assert check(tier.lookup(KEYS))


def test_hangs_until_released(tier):
    tier.add("load", Fault(FaultKind.HANG))
    results = []
    thread = threading.Thread(target=lambda: results.append(load(tier)))
    thread.start()
    tier.wait_hanging()
    assert not results
    tier.release()
    thread.join(DEADLINE_S)
    assert [outcome.is_ok for outcome in results[0][0]] == [True] * 3


def test_a_call_that_is_about_to_hang_is_released_too():
    """It has drawn its fault; on a busy machine its thread may stand still then."""
    is_told, may_go = threading.Event(), threading.Event()

    class Slow(FaultTier):
        def _hang(self, entered: int) -> None:
            is_told.set()
            assert may_go.wait(DEADLINE_S)
            super()._hang(entered)

    tier = Slow(MemoryTier(context_for(LAYOUT)))
    tier.add("lookup", Fault(FaultKind.HANG))
    thread = threading.Thread(target=tier.lookup, args=(KEYS,))
    thread.start()
    assert is_told.wait(DEADLINE_S)
    tier.release()
    may_go.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not tier.num_hanging


def test_delay_passes_on_the_clock():
    clock = FakeClock()
    tier = FaultTier(MemoryTier(context_for(LAYOUT)), clock=clock)
    tier.add("lookup", Fault(FaultKind.DELAY, seconds=3.0))
    results = []
    thread = threading.Thread(target=lambda: results.append(tier.lookup(KEYS)))
    thread.start()
    clock.wait_for_sleepers(1)
    clock.advance(2.9)
    assert not results
    clock.advance(0.2)
    thread.join(DEADLINE_S)
    assert results == [[MISS] * 3]


def test_seed_decides():
    def faults(seed):
        schedule = SeededFaults(seed, rate=0.5)
        return [schedule(op, [key]) for key in KEYS for op in ("load", "store") for _ in range(20)]

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)
    assert any(fault is None for fault in faults(1))
