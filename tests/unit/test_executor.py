"""Lanes: every call ends exactly once, late or not, and close never hangs."""

from __future__ import annotations

import threading
import time

import pytest

from flexkv_core.chain.calls import Call, Completed, Completions, Faltered, Returned, Verb
from flexkv_core.chain.executor import TierWorkers
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
from flexkv_core.tier import MISS, BufferState, Status, TierCapabilities
from tests.support.waiting import DEADLINE_S, wait_until

LAYOUT = small_layout()


class Bench:
    """A faulty tier behind lanes of one thread."""

    def __init__(self, *, threads: int = 1, max_batch: int = 64) -> None:
        can = TierCapabilities(max_batch=max_batch)
        self.tier = FaultTier(MemoryTier(context_for(LAYOUT), can))
        self.clock = FakeClock()
        self.completions = Completions()
        self.told: list[Faltered] = []
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
        given = {"buffers": lambda first, last: views[first:last]} | kwargs
        return Call(verb, [value.key for value in values], **given)

    def submit(self, *args, **kwargs) -> Call:
        call = self.call(*args, **kwargs)
        self.workers.submit(call)
        return call

    def wait_pieces(self, call: Call, count: int) -> None:
        """Until so many pieces of a call are over."""
        wait_until(lambda: call.num_pieces >= count)

    def take(self, count: int, kind: type | None = None) -> list:
        """The next ends of calls, or messages of a kind; ``told`` keeps what comes before an end."""
        messages: list = []
        end = time.monotonic() + DEADLINE_S
        while len(messages) < count:
            assert time.monotonic() < end, messages
            for message in self.completions.wait(0.05):
                if isinstance(message, Faltered):
                    self.told.append(message)
                if isinstance(message, kind) if kind else not isinstance(message, Faltered):
                    messages.append(message)
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

    def fail(*_: int) -> None:
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

    def fail(*_: int) -> None:
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


@pytest.mark.parametrize("piece", [0, 1])
def test_every_call_ends_exactly_once_under_expiry_from_outside(bench, piece):
    one = bench(threads=3)
    calls = [
        one.call(Verb.LOOKUP, 2, piece=piece, deadline=one.clock() + number % 3) for number in range(300)
    ]
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


# ---- pieces -------------------------------------------------------------------------------------


def sizes(one: Bench, operation: str) -> list[int]:
    return [count for name, count in one.tier.calls if name == operation]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("piece", [1, 2, 3, 5, 8])
def test_workers_cut_a_call_that_ends_once(bench, threads, piece):
    one = bench(threads=threads)
    one.submit(Verb.STORE, 5, piece=piece)
    (end,) = one.take(1)
    assert [outcome.status for outcome in end.outcomes] == [Status.OK] * 5
    assert sorted(sizes(one, "store")) == sorted([piece] * (5 // piece) + [5 % piece] * (5 % piece > 0))
    one.tier.add("load", Fault(FaultKind.FAIL_KEYS, at=(0,)))
    for value in one.values:
        value.view[:] = bytes(len(value.view))
    call = one.submit(Verb.LOAD, 5, piece=piece)
    (end,) = one.take(1)
    (bad,) = end.bad
    assert [outcome.is_ok for outcome in end.outcomes] == [i != bad for i in range(5)]
    assert bad % piece == 0
    assert call.num_pieces == len(sizes(one, "load"))
    wait_until(lambda: not one.workers.num_open)


def test_what_does_not_come_is_told_before_the_call_is_over(bench):
    """Once for each piece that goes wrong, and of loads only: nobody waits for a store."""
    one = bench()
    one.tier.add("load", Fault(FaultKind.FAIL_KEYS, at=(1,), status=Status.CORRUPT), Fault(FaultKind.HANG))
    call = one.submit(Verb.LOAD, 6, piece=2)
    one.tier.wait_hanging()
    (told,) = one.take(1, Faltered)
    assert (told.call, told.first) == (call, 0)
    assert [outcome.status for outcome in told.outcomes] == [Status.MISS, Status.CORRUPT]
    one.tier.release()
    one.take(1)
    assert [message.first for message in one.told[1:]] == [2], "the end itself tells of the last piece"
    one.told.clear()
    one.tier.add("store", Fault(FaultKind.FAIL_KEYS, at=(0,)))
    one.submit(Verb.STORE, 6, piece=2)
    one.take(1)
    assert one.told == []


def test_all_threads_are_at_one_call(bench):
    one = bench(threads=3)
    one.tier.add("load", *[Fault(FaultKind.HANG)] * 3)
    one.submit(Verb.LOAD, 8, piece=2)
    one.tier.wait_hanging(3)
    assert sizes(one, "load") == [2, 2, 2]
    one.tier.release()
    assert len(one.take(1)[0].outcomes) == 8
    assert sizes(one, "load") == [2, 2, 2, 2]


def test_what_is_over_before_the_deadline_counts(bench):
    """Of two threads one hangs: what the other one has brought is good, the rest is told apart."""
    one = bench(threads=2)
    one.submit(Verb.STORE, 8)
    one.take(1)
    one.tier.add("load", Fault(FaultKind.HANG))
    call = one.submit(Verb.LOAD, 8, piece=1, deadline=one.clock() + 5)
    one.tier.wait_hanging()
    one.wait_pieces(call, 7)
    one.workers.expire(one.clock() + 5)
    (end,) = one.take(1)
    assert (end.is_adrift, end.is_late) == (True, True)
    (late,) = end.bad
    assert end.outcomes[late].status is Status.TIMEOUT
    assert end.outcomes[late].buffer is BufferState.UNCERTAIN
    assert sum(outcome.is_ok for outcome in end.outcomes) == 7
    assert one.workers.can_load, "one thread is left"
    one.tier.release()
    assert isinstance(one.take(1)[0], Returned)
    wait_until(lambda: not one.workers.num_open)


def test_what_nobody_has_begun_is_untouched(bench):
    """Both threads hang: a call is adrift until the last one is back, and is heard of once."""
    one = bench(threads=2)
    one.tier.add("load", *[Fault(FaultKind.HANG)] * 2)
    call = one.submit(Verb.LOAD, 8, piece=2, deadline=one.clock() + 5)
    one.tier.wait_hanging(2)
    one.workers.expire(one.clock() + 5)
    (end,) = one.take(1)
    untouched, uncertain = BufferState.UNTOUCHED, BufferState.UNCERTAIN
    assert [outcome.buffer for outcome in end.outcomes] == [uncertain] * 4 + [untouched] * 4
    assert {outcome.status for outcome in end.outcomes} == {Status.TIMEOUT}
    assert not one.workers.can_load
    one.tier.release()
    (back,) = one.take(1)
    assert (type(back), back.call) == (Returned, call)
    assert one.workers.can_load
    assert sizes(one, "load") == [2, 2]
    assert one.completions.is_empty()


def test_a_call_that_is_given_up_between_two_pieces_is_not_adrift(bench):
    """No worker is at it then, so nobody touches its buffers."""
    one = bench()
    idle = TierWorkers(
        "idle", one.tier, load_threads=1, store_threads=1, completions=one.completions, clock=one.clock
    )
    call = one.call(Verb.LOAD, 3, piece=1, deadline=one.clock() + 5)
    idle.submit(call)
    lane = idle._loads
    lane._take_in(lane._next(), [MISS], 0.1)
    idle.expire(one.clock() + 5)
    (end,) = one.take(1)
    assert (end.is_adrift, end.is_late) == (False, True)
    assert [outcome.status for outcome in end.outcomes] == [Status.MISS] + [Status.TIMEOUT] * 2
    assert [outcome.buffer for outcome in end.outcomes] == [BufferState.UNTOUCHED] * 3
    assert idle.num_open == 0
    assert lane._next() is None


def test_a_piece_that_breaks_spoils_no_other(bench):
    one = bench()
    one.submit(Verb.LOAD, 2, piece=1, buffers=_fails_at(1, one))
    (end,) = one.take(1)
    assert [outcome.status for outcome in end.outcomes] == [Status.MISS, Status.UNAVAILABLE]


def _fails_at(position: int, one: Bench):
    def buffers(first: int, last: int) -> list[memoryview]:
        if first == position:
            raise ValueError("made by the test")
        return [value.view for value in one.values[first:last]]

    return buffers


def test_closing_lets_pieces_end_that_were_begun(bench):
    one = bench()
    one.tier.add("store", Fault(FaultKind.HANG))
    keys = [value.key for value in one.values[5:8]]
    call = one.submit(Verb.STORE, 3, piece=1, evict_first=keys)
    one.tier.wait_hanging()
    one.workers.close()
    assert one.completions.is_empty()
    one.tier.release()
    (end,) = one.take(1)
    assert end.call is call
    assert [outcome.status for outcome in end.outcomes] == [Status.OK] + [Status.CANCELLED] * 2
    assert [outcome.buffer for outcome in end.outcomes][1:] == [BufferState.UNTOUCHED] * 2
    assert list(call.left) == keys[1:]


def test_each_piece_makes_its_own_room(bench):
    """Nothing is removed long before something takes its place, and the last piece removes the rest."""
    one = bench()
    one.submit(Verb.STORE, 8)
    one.take(1)
    one.tier.calls.clear()
    gone = [value.key for value in one.values[3:8]]
    one.tier.add("evict", Fault(FaultKind.FAIL_KEYS, at=(0,)))
    call = one.submit(Verb.STORE, 3, piece=2, evict_first=gone)
    one.take(1)
    assert one.tier.calls == [("evict", 2), ("store", 2), ("evict", 3), ("store", 1)]
    assert call.left == gone[:1]


def test_a_prefetch_that_is_needed_now_goes_first_in_the_middle(bench):
    one = bench()
    one.tier.add("load", Fault(FaultKind.HANG))
    first = one.submit(Verb.LOAD, 2, piece=1, can_wait=True)
    one.tier.wait_hanging()
    one.submit(Verb.LOAD, 1, can_wait=True)
    one.workers.hurry(first, one.clock() + 100)
    one.tier.release()
    ends = one.take(2)
    assert ends[0].call is first
    wait_until(lambda: not one.workers.num_open)
