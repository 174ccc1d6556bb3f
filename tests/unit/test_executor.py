"""Lanes: every call ends exactly once, late or not, and close never hangs."""

from __future__ import annotations

import threading
import time

import pytest

from flexkv_core.chain.executor import Call, Completed, Completions, Returned, TierWorkers, Verb
from flexkv_core.testing import (
    FakeClock,
    Fault,
    FaultKind,
    FaultTier,
    MemoryTier,
    context_for,
    make_values,
    small_layout,
)
from flexkv_core.tier import BufferState, Status, TierCapabilities
from tests.support.waiting import DEADLINE_S, wait_until

LAYOUT = small_layout()


class Bench:
    """A faulty tier behind lanes of one thread."""

    def __init__(self, *, threads: int = 1, max_batch: int = 64) -> None:
        can = TierCapabilities(max_batch=max_batch)
        self.tier = FaultTier(MemoryTier(context_for(LAYOUT), can))
        self.clock = FakeClock()
        self.completions = Completions()
        self.workers = TierWorkers(
            "t",
            self.tier,
            load_threads=threads,
            store_threads=threads,
            completions=self.completions,
            clock=self.clock,
        )
        self.workers.start()
        self.values = make_values(LAYOUT, 8)

    def call(self, verb=Verb.LOAD, count=1, **kwargs) -> Call:
        values = self.values[:count]
        views = [value.view for value in values] if verb in (Verb.LOAD, Verb.STORE) else []
        return Call(verb, [value.key for value in values], **{"buffers": lambda: views, **kwargs})

    def submit(self, *args, **kwargs) -> Call:
        call = self.call(*args, **kwargs)
        self.workers.submit(call)
        return call

    def take(self, count: int) -> list:
        messages: list = []
        end = time.monotonic() + DEADLINE_S
        while len(messages) < count:
            assert time.monotonic() < end, messages
            messages += self.completions.wait(0.05)
        return messages


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(**kwargs) -> Bench:
        made.append(Bench(**kwargs))
        return made[-1]

    yield make
    for one in made:
        one.workers.close()
        one.tier.release()
        assert one.workers.join(time.monotonic() + DEADLINE_S) == []


def test_calls_end_with_one_outcome_a_key(bench):
    one = bench()
    one.submit(Verb.STORE, 3)
    assert [o.status for o in one.take(1)[0].outcomes] == [Status.OK] * 3
    one.submit(Verb.LOOKUP, 4)
    assert [o.status for o in one.take(1)[0].outcomes] == [Status.OK] * 3 + [Status.MISS]
    one.submit(Verb.EVICT, 1)
    assert one.take(1)[0].call.left == []
    wait_until(lambda: not one.workers.num_open)


def test_stores_do_not_delay_loads(bench):
    one = bench()
    one.tier.add("store", Fault(FaultKind.HANG))
    one.submit(Verb.STORE)
    one.tier.wait_hanging()
    one.submit(Verb.LOAD)
    assert one.take(1)[0].call.verb is Verb.LOAD


def test_a_call_expires_adrift_and_returns_later(bench):
    one = bench()
    one.tier.add("load", Fault(FaultKind.HANG))
    call = one.submit(deadline=one.clock() + 5)
    one.tier.wait_hanging()
    one.workers.expire(one.clock() + 4.9)
    assert one.completions.is_empty()
    one.workers.expire(one.clock() + 5)
    one.workers.expire(one.clock() + 6)
    (end,) = one.take(1)
    assert isinstance(end, Completed)
    assert end.is_adrift
    assert end.is_late
    assert end.outcomes[0].status is Status.TIMEOUT
    assert end.outcomes[0].buffer is BufferState.UNCERTAIN
    assert one.workers.num_open == 1
    assert not one.workers.can_load
    assert one.workers.can_store
    one.tier.release()
    (back,) = one.take(1)
    assert isinstance(back, Returned)
    assert back.call is call
    assert one.workers.can_load
    wait_until(lambda: not one.workers.num_open)


def test_a_queued_call_expires_untouched(bench):
    one = bench()
    one.tier.add("load", Fault(FaultKind.HANG))
    one.submit(deadline=float("inf"))
    one.tier.wait_hanging()
    queued = one.submit(deadline=one.clock() + 1)
    one.workers.expire(one.clock() + 2)
    (end,) = one.take(1)
    assert end.call is queued
    assert not end.is_adrift
    assert end.is_late
    assert end.outcomes[0].buffer is BufferState.UNTOUCHED
    one.tier.release()
    assert [type(message) for message in one.take(1)] == [Completed]
    assert [operation for operation, _ in one.tier.calls] == ["load"]


def test_calls_for_a_lane_whose_threads_all_hang_end_at_once(bench):
    one = bench(threads=2)
    one.tier.add("load", *[Fault(FaultKind.HANG)] * 2)
    one.submit(deadline=one.clock() + 1)
    one.submit(deadline=one.clock() + 1)
    one.tier.wait_hanging(2)
    one.workers.expire(one.clock() + 1)
    assert len(one.take(2)) == 2
    one.submit()
    (end,) = one.take(1)
    assert end.outcomes[0].status is Status.UNAVAILABLE
    assert not end.is_late


@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(1), KeyboardInterrupt()])
def test_a_thread_survives_whatever_is_raised(bench, error, caplog):
    one = bench()

    def fail() -> None:
        raise error

    one.submit(Verb.STORE, buffers=fail)
    (end,) = one.take(1)
    assert end.outcomes[0].status is Status.UNAVAILABLE
    one.submit(Verb.STORE)
    assert one.take(1)[0].outcomes[0].is_ok


def test_evictions_are_cut_and_what_stays_is_told(bench):
    one = bench(max_batch=2)
    one.submit(Verb.STORE, 2)
    one.take(1)
    keys = [value.key for value in one.values[:5]]
    one.tier.add("evict", Fault(FaultKind.FAIL_KEYS, at=(1,)))
    one.submit(Verb.STORE, 1, evict_first=keys)
    (end,) = one.take(1)
    assert end.outcomes[0].is_ok
    assert end.call.left == [keys[1]]
    assert [count for operation, count in one.tier.calls if operation == "evict"] == [2, 2, 1]


def test_evictions_are_told_also_if_the_store_failed_before_them(bench):
    """Sealing may fail: what was to make room then is out of the index, and still there."""
    one = bench()

    def fail() -> None:
        raise ValueError("made by the test")

    keys = [value.key for value in one.values[2:5]]
    one.submit(Verb.STORE, 2, buffers=fail, evict_first=keys)
    (end,) = one.take(1)
    assert not end.is_adrift
    assert list(end.call.left) == keys


@pytest.mark.parametrize("verb", [Verb.EVICT, Verb.STORE])
def test_evictions_that_never_began_are_told(bench, verb):
    one = bench()
    keys = [value.key for value in one.values[:1]]
    one.workers.close()
    one.submit(verb, 1, evict_first=keys)
    (end,) = one.take(1)
    assert list(end.call.left) == keys
    assert end.outcomes[0].status is Status.CANCELLED


def test_close_ends_queued_calls_and_lets_running_ones_run(bench):
    one = bench()
    one.tier.add("load", Fault(FaultKind.HANG))
    running = one.submit()
    one.tier.wait_hanging()
    queued = one.submit()
    one.workers.close()
    one.workers.close()
    (end,) = one.take(1)
    assert end.call is queued
    assert end.outcomes[0].status is Status.CANCELLED
    wait_until(lambda: one.workers.join(0.0) == ["flexkv-t-load-0"], "all but the one that hangs end")
    one.tier.release()
    assert one.take(1)[0].call is running


def test_every_call_ends_exactly_once_under_expiry_from_outside(bench):
    one = bench(threads=3)
    calls = [one.call(Verb.LOOKUP, 2, deadline=one.clock() + number % 3) for number in range(300)]
    for call in calls:
        one.workers.submit(call)
        one.workers.expire(one.clock() + 1)
    ends = [message for message in one.take(300) if isinstance(message, Completed)]
    end = time.monotonic() + DEADLINE_S
    while one.workers.num_open:
        assert time.monotonic() < end
        ends += [message for message in one.completions.wait(0.01) if isinstance(message, Completed)]
    ends += [message for message in one.completions.drain() if isinstance(message, Completed)]
    assert sorted(message.call.number for message in ends) == [call.number for call in calls]
    assert all(len(message.outcomes) == 2 for message in ends)


def test_threads_are_named_after_tier_and_lane(bench):
    bench(threads=2)
    names = {thread.name for thread in threading.enumerate()}
    assert {"flexkv-t-load-0", "flexkv-t-load-1", "flexkv-t-store-0"} <= names
