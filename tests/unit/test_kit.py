"""The kit finds what it is there to find: each broken tier fails the test that is meant for it."""

from __future__ import annotations

import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from flexkv_core import DONE, MISS, BufferState, Outcome, Status, TierCapabilities, loaded
from flexkv_core.testing import Medium, MemoryTier, TierTests, context_for, overrides_kit
from flexkv_core.testing.crash import Writer
from flexkv_core.testing.kit import Crew
from flexkv_core.testing.leaks import Snapshot
from flexkv_core.testing.tier_corruption import DAMAGES
from flexkv_core.testing.tier_kit import Opener
from tests.support.waiting import DEADLINE_S


class Unsorted(MemoryTier):
    """Outcomes stand in the order of the store, not of the keys."""

    def lookup(self, keys):
        return sorted(super().lookup(keys), key=lambda outcome: not outcome.is_ok)


class Forgetful(MemoryTier):
    def evict(self, keys):
        return [DONE] * len(keys)


class Scribbling(MemoryTier):
    """A miss writes into the buffer all the same."""

    def load(self, keys, into):
        for view in into:
            view[:4] = b"oops"
        return super().load(keys, into)


class Truncating(MemoryTier):
    """Keeps no more than a page."""

    def _store_one(self, key, value):
        return super()._store_one(key, value[:4096])


class Keeping(MemoryTier):
    """Keeps the caller's memory and not the bytes in it."""

    def _store_one(self, key, value):
        self.medium.values[key] = value
        return Outcome(Status.OK, len(value))


class Overfull(MemoryTier):
    """Has room without end, whatever it says."""

    def _store_one(self, key, value):
        self.medium.values[key] = bytes(value)
        return Outcome(Status.OK, len(value))


class Torn(MemoryTier):
    """Writes its first value in two halves, with a reader in between; nobody else may change that value."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.torn = None
        self.was_read = threading.Event()

    def _load_one(self, key, view):
        outcome = super()._load_one(key, view)
        if key == self.torn:
            self.was_read.set()
        return outcome

    def _store_one(self, key, value):
        if self.torn is None:
            self.torn, half = key, len(value) // 2
            self.medium.values[key] = bytes(value[:half]) + bytes(len(value) - half)
            self.medium.lock.release()
            assert self.was_read.wait(DEADLINE_S)
            self.medium.lock.acquire()
            self.medium.values[key] = bytes(value)
        elif key != self.torn:
            return super()._store_one(key, value)
        return Outcome(Status.OK, len(value))

    def evict(self, keys):
        return [DONE if key == self.torn else super(Torn, self).evict([key])[0] for key in keys]


class Blind(MemoryTier):
    """Believes any bytes to be whatever was asked for: gives another key's value."""

    def _load_one(self, key, view):
        for value in self.medium.values.values():
            view[: len(value)] = value
            return loaded(len(value))
        return MISS


class AfterLife(MemoryTier):
    def close(self):
        return


class Threaded(MemoryTier):
    """Leaves a thread behind."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gate = threading.Event()
        self.thread = threading.Thread(target=self.gate.wait, name="left-behind")
        self.thread.start()
        MADE.append(self)


class Unready(MemoryTier):
    """Says that a value was found, and not that the buffer is complete."""

    def load(self, keys, into):
        return [replace(outcome, buffer=BufferState.UNTOUCHED) for outcome in super().load(keys, into)]


class Punctual(MemoryTier):
    """Believes no value that was stored later than now."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stored_at = {}

    def store(self, keys, values):
        self.stored_at.update(dict.fromkeys(keys, time.time()))
        return super().store(keys, values)

    def load(self, keys, into):
        outcomes = super().load(keys, into)
        return [
            o if self.stored_at[key] <= time.time() else MISS for key, o in zip(keys, outcomes, strict=True)
        ]


class Vague(MemoryTier):
    def store(self, keys, values):
        return [Outcome(Status.INVALID) for _ in keys]


class Lost(MemoryTier):
    """Persistent, it says; every opening begins anew."""

    def __init__(self, context, capabilities, medium):
        super().__init__(context, capabilities, Medium())


class Untold(MemoryTier):
    """Lists all but one."""

    def list_blocks(self):
        return iter([rows[1:] for rows in super().list_blocks()])


MADE: list[Threaded] = []

PLAIN = TierCapabilities(can_list=True)
BOUNDED = replace(PLAIN, capacity_bytes=10 * TierTests.layout.slot_bytes)
PERSISTENT = replace(PLAIN, persistent=True)

FOUND = [
    (Unsorted, "test_outcomes_stand_in_the_order_of_the_keys", PLAIN),
    (Forgetful, "test_evicted_values_are_misses", PLAIN),
    (Scribbling, "test_empty_tier_misses_and_leaves_buffers_alone", PLAIN),
    (Truncating, "test_round_trip_at_edge_sizes", PLAIN),
    (Truncating, "test_blocks_of_every_fill_verify", PLAIN),
    (Keeping, "test_callers_memory_is_its_own_after_the_call", PLAIN),
    (Overfull, "test_full_tier_says_so_and_eviction_makes_room", BOUNDED),
    (Forgetful, "test_room_comes_back_whole", BOUNDED),
    (Torn, "test_threads_on_the_same_keys", PLAIN),
    (AfterLife, "test_close_twice_and_use_after_close", PLAIN),
    (Unready, "test_round_trip_at_edge_sizes", PLAIN),
    (Punctual, "test_clocks_that_differ", PLAIN),
    (Vague, "test_blocks_of_every_fill_verify", PLAIN),
    (Lost, "test_values_outlive_a_restart", PERSISTENT),
    (Untold, "test_list_is_complete_with_heads", PERSISTENT),
    (Blind, "test_storing_again_replaces_the_value_or_leaves_the_old", PLAIN),
]


def run(tier_class, name, capabilities):
    """Run one test of the kit against a tier."""

    class Case(TierTests):
        capacity_values = 10

        def open_tier(self, context, medium):
            return tier_class(context, capabilities, medium)

    case = Case()
    opener = Opener(case, context_for(case.layout), Medium())
    test = getattr(case, name)
    wants = test.__code__.co_varnames[1 : test.__code__.co_argcount]
    given = {"tier": opener.open, "opener": lambda: opener, "context": lambda: opener.context}
    given["monkeypatch"] = pytest.MonkeyPatch
    try:
        test(**{want: given[want]() for want in wants})
    finally:
        opener.close()


@pytest.mark.parametrize(("tier_class", "name", "capabilities"), FOUND)
def test_broken_tier_is_found(tier_class, name, capabilities):
    run(MemoryTier, name, capabilities)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(tier_class, name, capabilities)


def test_a_miss_while_the_medium_hangs_is_found():
    hung, was_asked = threading.Event(), threading.Event()

    class Evasive(MemoryTier):
        def load(self, keys, into):
            if not hung.is_set():
                return super().load(keys, into)
            was_asked.set()
            return [MISS] * len(keys)

    class Case(TierTests):
        def open_tier(self, context, medium):
            return Evasive(context, PLAIN, medium)

        @contextmanager
        def disturb_medium(self, medium, how):
            hung.set()
            yield
            assert was_asked.wait(DEADLINE_S)
            hung.clear()

    case = Case()
    opener = Opener(case, context_for(case.layout), Medium())
    with closing(opener), pytest.raises(AssertionError, match="told to be a miss"):
        case.test_disturbed_medium_gives_no_wrong_answer(opener, "hung")


@pytest.mark.parametrize(
    ("name", "test", "how"),
    [
        ("break_medium", "test_unreachable_medium_is_a_failure_and_no_miss", []),
        ("disturb_medium", "test_disturbed_medium_gives_no_wrong_answer", ["slow"]),
    ],
)
def test_a_context_manager_that_does_not_know_a_disturbance_skips(monkeypatch, name, test, how):
    @contextmanager
    def unknown(self, medium, *how):
        raise NotImplementedError
        yield

    class Case(TierTests):
        def open_tier(self, context, medium):
            return MemoryTier(context, PLAIN, medium)

    monkeypatch.setattr(Case, name, unknown)
    case = Case()
    opener = Opener(case, context_for(case.layout), Medium())
    with closing(opener), pytest.raises(pytest.skip.Exception, match=name):
        getattr(case, test)(opener, *how)


def test_left_thread_is_found(monkeypatch):
    monkeypatch.setattr(Snapshot.wait_until_back, "__defaults__", (0.05,))
    try:
        with pytest.raises(AssertionError, match="left-behind"):
            run(Threaded, "test_leaves_no_thread_descriptor_or_process", PLAIN)
    finally:
        for tier in MADE:
            tier.gate.set()
            tier.thread.join(DEADLINE_S)
        MADE.clear()


def test_snapshot_sees_descriptors_and_children(tmp_path):
    before = Snapshot.take()
    file = (tmp_path / "x").open("wb")
    assert ["descriptor" in line for line in before.left_since()] == [True]
    file.close()
    assert before.left_since() == []


class TestMarks:
    def test_unmarked_override_is_refused(self):
        with pytest.raises(
            TypeError, match="test_empty_batch overrides the kit's test: mark it @overrides_kit"
        ):

            class Mine(TierTests):
                def test_empty_batch(self):
                    """Quietly easier."""

    def test_marked_override_is_taken(self):
        class Mine(TierTests):
            @overrides_kit
            def test_empty_batch(self):
                """This tier refuses empty batches."""

            def test_of_its_own(self):
                """Not the kit's."""

        assert Mine.test_empty_batch is not TierTests.test_empty_batch

    def test_mark_on_a_name_that_the_kit_no_longer_has_is_refused(self):
        with pytest.raises(TypeError, match="no such test, did you mean test_empty_batch"):

            class Mine(TierTests):
                @overrides_kit
                def test_empty_batches(self):
                    """Renamed in the kit since."""

    def test_subclass_of_a_subclass_may_not_override_unmarked_either(self):
        class Mine(TierTests):
            pass

        with pytest.raises(TypeError, match="overrides"):

            class Yours(Mine):
                def test_empty_batch(self):
                    """Quietly easier."""


class TestCrew:
    def test_errors_of_threads_reach_the_test(self):
        crew = Crew()
        crew.start(2, lambda number: [1, 2][number + 1])
        with pytest.raises(IndexError):
            crew.join()

    def test_hanging_threads_are_told(self):
        crew, gate = Crew(0.05), threading.Event()
        crew.start(1, lambda _: gate.wait())
        with pytest.raises(AssertionError, match="still running"):
            crew.join()
        gate.set()


class Unwritable(TierTests):
    """Its tier takes nothing: the child must say so."""

    def open_tier(self, context, medium):
        return Vague(context)


def test_writer_that_dies_is_told_with_its_reason(tmp_path):
    with Writer(Unwritable(), tmp_path, 60.0) as writer, pytest.raises(AssertionError, match="store failed"):
        writer.wait_for_stores(1)


def test_medium_that_cannot_be_sent_is_told():
    with pytest.raises(TypeError, match="Medium cannot be sent"):
        Writer(Unwritable(), Medium(), 60.0)


def test_every_damage_differs_from_the_value():
    import random

    from flexkv_core.testing.tier_corruption import damaged

    raw, other = bytes(range(256)) * 32, bytes(8192)
    for how in DAMAGES:
        assert damaged(how, raw, other, random.Random(1)) != raw, how
