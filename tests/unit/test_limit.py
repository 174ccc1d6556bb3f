"""Rate limits, by a clock that moves when the test says so."""

from __future__ import annotations

import threading

import pytest

from flexkv_core.metrics import Metrics
from flexkv_core.models import LimitsConfig, TierConfig
from flexkv_core.testing import FakeClock, FaultTier, MemoryTier, context_for, make_values, small_layout
from flexkv_core.tier import Status
from flexkv_core.wrappers import wrap
from flexkv_core.wrappers.deadline import within
from flexkv_core.wrappers.limit import Allowance, LimitedTier
from tests.support.waiting import DEADLINE_S

LAYOUT = small_layout()
VALUES = make_values(LAYOUT, 4)
KEYS = [value.key for value in VALUES]
SIZE = len(VALUES[0].view)


def views(count: int) -> list[memoryview]:
    return [memoryview(bytearray(LAYOUT.slot_bytes)) for _ in range(count)]


class Timed:
    """A limited tier over a clock whose ``sleep`` moves it on, and how long each call took."""

    def __init__(self, **limits):
        self.clock, self.metrics = FakeClock(), Metrics()
        self.inner = FaultTier(MemoryTier(context_for(LAYOUT)))
        self.tier = LimitedTier(
            self.inner,
            LimitsConfig.model_validate(limits),
            name="t",
            metrics=self.metrics,
            clock=self.clock,
            sleep=self.clock.advance,
        )

    def store(self, count=1, deadline_s=1e9):
        with within(self.clock() + deadline_s, self.clock):
            began = self.clock()
            got = self.tier.store(KEYS[:count], [value.view[:SIZE] for value in VALUES[:count]])
            return got[0].status, round(self.clock() - began, 6)

    def load(self, count=1, deadline_s=1e9):
        with within(self.clock() + deadline_s, self.clock):
            began = self.clock()
            got = self.tier.load(KEYS[:count], views(count))
            return got[0].status, round(self.clock() - began, 6)


def test_an_allowance_grows_to_its_burst_and_no_further():
    clock = FakeClock()
    allowance = Allowance(10, 2.0, clock)
    assert allowance.take(20, 0) == 0, "a burst passes at once"
    assert allowance.take(5, 10) == 0.5
    assert allowance.take(5, 10) == 1.0, "behind the one before"
    assert allowance.take(5, 1.0) is None, "its turn comes too late"
    clock.advance(100)
    assert allowance.take(20, 0) == 0
    assert allowance.take(40, 2.0) == 2.0, "more than a burst waits for a whole one, and is owed"
    clock.advance(2.0)
    assert allowance.take(1, 100) == pytest.approx(2.1)


def test_stores_keep_to_bytes_a_second():
    timed = Timed(store={"bytes_per_s": SIZE, "burst_s": 1})
    assert [timed.store() for _ in range(4)] == [
        (Status.OK, 0),
        (Status.OK, 1),
        (Status.OK, 1),
        (Status.OK, 1),
    ]


def test_operations_are_values():
    timed = Timed(store={"operations_per_s": 4}, load={"operations_per_s": 2})
    assert timed.store(4) == (Status.OK, 0)
    assert timed.store(4) == (Status.OK, 1)
    assert timed.load(2) == (Status.OK, 0)
    assert timed.load(1) == (Status.OK, 0.5)


def test_directions_are_apart():
    timed = Timed(store={"operations_per_s": 1})
    timed.store()
    assert [timed.load()[1] for _ in range(5)] == [0] * 5
    assert timed.store() == (Status.OK, 1)


def test_a_store_beyond_its_deadline_is_dropped_and_counted_and_takes_no_turn():
    timed = Timed(store={"operations_per_s": 1})
    timed.store()
    assert timed.store(2, deadline_s=0.5) == (Status.LIMITED, 0)
    assert timed.metrics.value("limited_blocks", tier="t", operation="store") == 2
    assert timed.store(1, deadline_s=1.5) == (Status.OK, 1), "what was refused is not owed"


def test_a_load_is_settled_with_what_it_brought():
    timed = Timed(load={"bytes_per_s": SIZE, "burst_s": 1})
    assert timed.load() == (Status.MISS, 0)
    timed.store()
    assert timed.load() == (Status.OK, 0), "a miss cost nothing"
    assert timed.load() == (Status.OK, 1), "and this one what it read, not what the buffer could hold"


def test_a_turn_that_leaves_no_time_for_the_call_is_none():
    timed = Timed(load={"operations_per_s": 1})
    timed.store()
    load = timed.inner.load

    def slow(keys, into):
        timed.clock.advance(0.4)
        return load(keys, into)

    timed.inner.load = slow
    for _ in range(30):
        assert timed.load()[0] is Status.OK
    assert timed.load(deadline_s=0.8) == (Status.LIMITED, 0), "0.6 s of waiting, and 0.4 s of reading"
    assert timed.load(deadline_s=1.1) == (Status.OK, 1.0)


def test_a_limited_load_reaches_no_driver_and_no_breaker():
    clock, states = FakeClock(), []
    inner = FaultTier(MemoryTier(context_for(LAYOUT)))
    config = TierConfig.model_validate(
        {
            "name": "t",
            "driver": "x",
            "retries": 3,
            "breaker_failures": 1,
            "limits": {"load": {"operations_per_s": 1}},
        }
    )
    metrics = Metrics()
    wrapped = wrap(inner, config, LAYOUT, metrics, lambda s, _: states.append(s), clock, sleep=clock.advance)
    wrapped.tier.store(KEYS, [value.view for value in VALUES])
    inner.calls.clear()
    with within(clock() + 0.5, clock):
        assert wrapped.tier.load(KEYS[:1], views(1))[0].is_ok
        assert wrapped.tier.load(KEYS[:1], views(1))[0].status is Status.LIMITED
    assert len(inner.calls) == 1
    assert (wrapped.breaker.is_up, states) == (True, [])


def test_threads_take_turns_without_going_over():
    clock = FakeClock()
    inner = MemoryTier(context_for(LAYOUT))
    tier = LimitedTier(
        inner,
        LimitsConfig.model_validate({"store": {"operations_per_s": 1}}),
        name="t",
        metrics=Metrics(),
        clock=clock,
        sleep=clock.sleep,
    )
    threads = [
        threading.Thread(target=tier.store, args=([key], [value.view]))
        for key, value in zip(KEYS, VALUES, strict=True)
    ]
    for thread in threads:
        thread.start()
    clock.wait_for_sleepers(3)
    assert len(inner.medium.values) <= 1, "one passes at once, and it may not have got there yet"
    clock.advance(2.9)
    clock.wait_for_sleepers(1)
    assert len(inner.medium.values) <= 3
    clock.advance(0.1)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(inner.medium.values) == 4


def test_interrupting_ends_what_waits():
    clock = FakeClock()
    tier = LimitedTier(
        MemoryTier(context_for(LAYOUT)),
        LimitsConfig.model_validate({"store": {"operations_per_s": 0.001}}),
        name="t",
        metrics=Metrics(),
        clock=clock,
    )
    tier.store(KEYS[:1], [VALUES[0].view])
    got = []
    thread = threading.Thread(target=lambda: got.extend(tier.store(KEYS[1:2], [VALUES[1].view])))
    thread.start()
    tier.interrupt()
    thread.join(DEADLINE_S)
    assert [outcome.status for outcome in got] == [Status.LIMITED]
