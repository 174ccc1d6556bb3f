"""The task API: one end for each task, whatever the caller does and in whatever order."""

from __future__ import annotations

import gc
import weakref
from array import array

import numpy as np
import pytest

from flexkv_core import ChainConfig, Namespace
from flexkv_core.manager import NO_TASK, KVManager, KVResponseStatus, Scope
from flexkv_core.testing import FakeClock, FakeDevice, FakeTransfer, small_layout
from flexkv_core.tier import Status

LAYOUT = small_layout(block_tokens=4)
BLOCK = LAYOUT.block_tokens
OK, UNREADY, CANCELLED = KVResponseStatus.SUCCESS, KVResponseStatus.UNREADY, KVResponseStatus.CANCELLED


class Engine:
    """A manager over one host tier and a simulated device."""

    def __init__(self, *, manual: bool = True, blocks: int = 16, **config) -> None:
        self.device = FakeDevice(LAYOUT, 256)
        self.transfer = FakeTransfer(self.device, manual=manual)
        self.clock = FakeClock()
        tiers = [{"name": "host", "driver": "cpu", "options": {"capacity": blocks * LAYOUT.slot_bytes}}]
        self.manager = KVManager(
            ChainConfig.model_validate({"block_tokens": BLOCK, "tiers": tiers} | config),
            layout=LAYOUT,
            namespace=Namespace(model="test"),
            transfer=self.transfer,
            clock=self.clock,
        )

    def compute(self, tokens):
        slots = self.device.allocate(len(tokens))
        self.device.forward(slots, tokens)
        return slots

    def put(self, tokens, **kwargs):
        """Plan a store of computed tokens: (task, slots that it wants)."""
        slots = self.compute(tokens)
        task, mask = self.manager.put_match(tokens, **kwargs)
        return task, array("q", [slot for slot, wanted in zip(slots, mask, strict=True) if wanted])

    def store(self, tokens, **kwargs):
        task, slots = self.put(tokens, **kwargs)
        if len(slots):
            self.manager.launch([task], [slots])
            self.transfer.run_all()
        return self.manager.wait([task])[task]

    @property
    def is_idle(self) -> bool:
        chain = self.manager.chain
        return not (chain.num_under_way or chain.index.num_pins or chain.host.num_lent)


@pytest.fixture
def engine():
    made = Engine()
    made.manager.start()
    yield made
    made.manager.shutdown()


def tokens(count: int, seed: int = 0) -> list[int]:
    return [seed * 100 + i for i in range(count)]


def test_round_trip(engine):
    prompt = tokens(10)
    answer = engine.store(prompt)
    assert answer.status is OK
    assert answer.return_mask.tolist() == [True] * 10
    mask = np.array([False] * 3 + [True] * 7)
    before = mask.copy(), list(prompt)
    task, found = engine.manager.get_match(prompt, mask)
    assert (mask.tolist(), prompt) == (before[0].tolist(), before[1])
    assert found.tolist() == [False] * 3 + [True] * 7
    slots = engine.device.allocate(7)
    engine.manager.launch([task], [slots])
    assert engine.manager.try_wait([task]) == {}
    engine.transfer.run_all()
    assert engine.manager.wait([task])[task].status is OK
    engine.device.check_from([0] * 3 + list(slots), prompt, 3)
    assert engine.is_idle


@pytest.mark.parametrize("kind", [list, lambda t: array("q", t), lambda t: np.array(t, dtype=np.int64)])
def test_tokens_of_every_kind_mean_the_same(engine, kind):
    engine.store(tokens(9))
    assert engine.manager.lookup(kind(tokens(9))).num_tokens == 9


def test_a_sequence_is_looked_up_as_it_is(engine):
    engine.store(tokens(9))
    assert engine.manager.lookup(engine.manager.sequence(tokens(9))).num_tokens == 9


def test_nothing_to_do_has_ended(engine):
    missed, mask = engine.manager.get_match(tokens(8))
    assert not mask.any()
    empty, mask = engine.manager.put_match([])
    assert not len(mask)
    engine.store(tokens(8))
    again, mask = engine.manager.put_match(tokens(8))
    assert not mask.any()
    answers = engine.manager.wait([missed, empty, again])
    assert [answer.status for answer in answers.values()] == [OK, OK, OK]


def test_an_end_is_delivered_once(engine):
    task, slots = engine.put(tokens(8))
    engine.manager.launch([task], [slots])
    engine.transfer.run_all()
    assert engine.manager.wait([task, task])[task].status is OK
    assert engine.manager.wait([task])[task].status is KVResponseStatus.NOT_FOUND
    assert engine.manager.is_over(task)


def test_waiting_answers_for_every_id_and_leaves_late_tasks_alone(engine):
    task, slots = engine.put(tokens(8))
    planned, _ = engine.put(tokens(8, seed=1))
    engine.manager.launch([task], [slots])
    answers = engine.manager.wait([task, planned, 10**9], timeout=0.0)
    assert [answers[i].status.value for i in (task, planned, 10**9)] == ["timeout", "unready", "not_found"]
    assert not engine.manager.is_over(task)
    engine.transfer.run_all()
    assert engine.manager.wait([task])[task].status is OK


@pytest.mark.parametrize("kind", ["get", "put"])
@pytest.mark.parametrize("when", ["planned", "launched", "copied", "ended"])
def test_cancel_gives_everything_back(engine, kind, when):
    manager = engine.manager
    if kind == "get":
        engine.store(tokens(8))
        task, _ = manager.get_match(tokens(8))
        slots = engine.device.allocate(8)
    else:
        task, slots = engine.put(tokens(8))
    if when != "planned":
        manager.launch([task], [slots])
    if when in ("copied", "ended"):
        engine.transfer.run_all()
    if when == "ended":
        manager.poll()
    manager.cancel([task])
    manager.cancel([task])
    if when == "launched":
        assert not manager.is_over(task)
        engine.transfer.run_all()
    wanted = OK if when == "ended" else CANCELLED
    assert manager.wait([task])[task].status is wanted
    assert engine.is_idle
    assert engine.store(tokens(8)).status is OK
    assert manager.lookup(tokens(8)).num_tokens == 8


@pytest.mark.parametrize("kind", ["get", "put"])
def test_launching_what_was_cancelled_copies_nothing(engine, kind):
    if kind == "get":
        engine.store(tokens(8))
        task, _ = engine.manager.get_match(tokens(8))
        slots = engine.device.allocate(8)
    else:
        task, slots = engine.put(tokens(8))
    engine.manager.cancel([task])
    engine.manager.launch([task], [slots])
    assert engine.transfer.pending == []
    assert engine.manager.wait([task])[task].status is CANCELLED
    assert engine.is_idle


def test_a_refused_launch_starts_nothing(engine):
    good, slots = engine.put(tokens(8))
    short, more = engine.put(tokens(8, seed=1))
    for ids, mappings in [
        ([good, short], [slots, more[:-1]]),
        ([good, good], [slots, slots]),
        ([good, 10**9], [slots, slots]),
        ([good], []),
    ]:
        with pytest.raises(ValueError):
            engine.manager.launch(ids, mappings)
    assert engine.transfer.pending == []
    engine.manager.launch([good, short], [slots, more])
    with pytest.raises(ValueError):
        engine.manager.launch([good], [slots])
    engine.transfer.run_all()
    assert {answer.status for answer in engine.manager.wait([good, short]).values()} == {OK}


def test_a_batch_is_over_when_all_of_it_is(engine):
    manager = engine.manager
    first, slots = engine.put(tokens(8))
    second, more = engine.put(tokens(4, seed=1))
    (batch,) = manager.launch([first, second], [slots, more], as_batch=True)
    assert batch not in (first, second)
    engine.transfer.step()
    manager.poll()
    assert not manager.is_over(batch)
    assert manager.try_wait([batch]) == {}
    engine.transfer.run_all()
    manager.poll()
    assert manager.is_over(batch)
    answer = manager.wait([batch])[batch]
    assert answer.status is OK
    assert [mask.sum() for mask in answer.return_mask] == [8, 4]
    assert manager.wait([batch])[batch].status is KVResponseStatus.NOT_FOUND


def test_a_batch_fails_with_its_worst_part_and_can_be_cancelled(engine):
    manager = engine.manager
    first, slots = engine.put(tokens(8))
    second, more = engine.put(tokens(4, seed=1))
    (batch,) = manager.launch([first, second], [slots, more], as_batch=True)
    engine.transfer.step()
    manager.poll()
    manager.cancel([batch])
    assert not manager.is_over(batch)
    engine.transfer.run_all()
    assert manager.wait([batch])[batch].status is CANCELLED
    assert engine.is_idle


def test_a_plan_that_nobody_launches_is_given_up_with_a_warning(engine, caplog):
    task, _ = engine.put(tokens(8))
    engine.clock.advance(59)
    engine.manager.poll()
    assert not engine.manager.is_over(task)
    engine.clock.advance(2)
    engine.manager.poll()
    assert "never launched" in caplog.text
    assert engine.is_idle
    assert engine.manager.wait([task])[task].status is CANCELLED


def test_a_running_copy_never_expires(engine):
    task, slots = engine.put(tokens(8))
    engine.manager.launch([task], [slots])
    for _ in range(5):
        engine.clock.advance(3600)
        engine.manager.poll()
    assert not engine.manager.is_over(task)
    engine.transfer.run_all()
    assert engine.manager.wait([task])[task].status is OK


def test_tasks_that_nobody_waits_for_are_forgotten(engine, monkeypatch):
    monkeypatch.setattr("flexkv_core.manager.tasks._ENDED_KEPT", 5)
    engine.store(tokens(8))
    for number in range(20):
        task, _ = engine.manager.get_match(tokens(8))
        engine.manager.launch([task], [engine.device.allocate(8)])
        engine.transfer.run_all()
        engine.manager.get_match(tokens(8, seed=number + 5))
        engine.clock.advance(61)
        engine.manager.poll()
    assert len(engine.manager._tasks) <= 6
    assert engine.manager._tasks.num_leases <= 1


@pytest.mark.parametrize("kind", ["get", "put"])
@pytest.mark.parametrize("end", [OK, CANCELLED, KVResponseStatus.FAILED])
def test_of_a_task_that_nobody_waits_for_only_its_end_is_kept(engine, kind, end):
    manager = engine.manager
    engine.store(tokens(8))
    if kind == "get":
        task, _ = manager.get_match(tokens(8))
        slots = engine.device.allocate(8)
    else:
        task, slots = engine.put(tokens(8, seed=1))
    job = weakref.ref(manager._tasks.get(task).job)
    if end is CANCELLED:
        manager.cancel([task])
    else:
        if end is KVResponseStatus.FAILED:
            engine.transfer.fail_next()
        manager.launch([task], [slots])
        engine.transfer.run_all()
    for _ in range(2):
        manager.poll()
        engine.clock.advance(61)
    manager.poll()
    engine.transfer.history.clear()
    gc.collect()
    assert job() is None
    assert manager.is_over(task)
    assert manager.ticket(task) is None
    manager.cancel([task])
    if end is CANCELLED:
        manager.launch([task], [slots])
    answer = manager.wait([task])[task]
    assert answer.status is end
    assert answer.return_mask.all() == (end is OK) == (not answer.cause)
    assert engine.is_idle


def test_ids_are_never_used_twice(engine):
    ids = [engine.manager.get_match(tokens(3))[0] for _ in range(50)]
    assert sorted(set(ids)) == ids


@pytest.mark.parametrize(
    ("mask", "stored"),
    [(None, 8), ([1] * 8, 8), ([1] * 5 + [0] * 3, 5), ([0] * 8, 0), ([1] * 7, -1), ([0] + [1] * 7, -1)],
)
def test_the_mask_of_a_store(engine, mask, stored):
    if stored < 0:
        with pytest.raises(ValueError):
            engine.manager.put_match(tokens(8), mask)
        return
    _, wanted = engine.manager.put_match(tokens(8), mask)
    assert wanted.sum() == stored


@pytest.mark.parametrize("mask", [[1, 0, 1, 1], [1, 1, 1], [0, 1, 1, 0]])
def test_the_mask_of_a_load(engine, mask):
    with pytest.raises(ValueError):
        engine.manager.get_match(tokens(4), mask)


def test_all_that_the_engine_has_is_no_load(engine):
    engine.store(tokens(8))
    task, mask = engine.manager.get_match(tokens(8), [0] * 8)
    assert not mask.any()
    assert engine.manager.wait([task])[task].status is OK


def test_invalidation_hides_everything_at_once(engine):
    engine.store(tokens(8))
    running, slots = engine.put(tokens(8, seed=1))
    engine.manager.launch([running], [slots])
    engine.manager.invalidate()
    assert engine.manager.lookup(tokens(8)).num_tokens == 0
    engine.transfer.run_all()
    assert engine.manager.wait([running])[running].status is OK
    assert engine.manager.lookup(tokens(8, seed=1)).num_tokens == 0
    assert engine.manager.chain.index.count(0) == 2  # the running one's, under the old weights
    engine.manager.reset()
    assert engine.manager.chain.index.count(0) == 0


def test_a_version_that_both_know_matches_again(engine):
    engine.manager.invalidate("7")
    before = engine.manager.namespace
    engine.manager.invalidate("8")
    engine.manager.invalidate("7")
    assert engine.manager.namespace == before


def test_scopes_share_nothing(engine):
    engine.store(tokens(8), scope=Scope(cache_salt="a"))
    assert engine.manager.lookup(tokens(8), scope=Scope(cache_salt="a")).num_tokens == 8
    for other in (Scope(), Scope(cache_salt="b"), Scope(extra_key="a"), Scope(adapter="a")):
        assert engine.manager.lookup(tokens(8), scope=other).num_tokens == 0


def test_without_a_salt_nothing_is_shared_where_one_is_required():
    engine = Engine(namespace={"require_salt": True})
    engine.manager.start()
    assert engine.store(tokens(8)).return_mask.any() == np.False_
    assert engine.manager.lookup(tokens(8)).why == "no_salt"
    assert not engine.manager.get_match(tokens(8))[1].any()
    assert engine.manager.prefetch_async(tokens(8)) == NO_TASK
    assert engine.store(tokens(8), scope=Scope(cache_salt="s")).return_mask.all()
    engine.manager.shutdown()


def test_shutdown_with_open_tasks_is_quick_and_idempotent(engine):
    engine.store(tokens(8))
    planned, _ = engine.put(tokens(4, seed=1))
    unbound, _ = engine.manager.get_match(tokens(8))
    engine.manager.shutdown()
    engine.manager.shutdown()
    assert {engine.manager.wait([i])[i].status for i in (planned, unbound)} == {CANCELLED}


def test_before_start():
    engine = Engine()
    assert not engine.manager.is_ready()
    assert engine.manager.faults() == ["it is not started"]
    engine.manager.poll()
    with pytest.raises(RuntimeError):
        engine.manager.lookup(tokens(3))
    engine.manager.shutdown()
    engine.transfer.close()


def test_ready_means_that_every_tier_can_be_used_now(engine):
    manager = engine.manager
    assert manager.is_ready()
    breaker = manager.chain.links[0].wrapped.breaker
    for _ in range(5):
        breaker.report(Status.TIMEOUT, "the deadline passed")
    assert not manager.is_ready()
    assert manager.faults() == ["tier host is down: the deadline passed"]
    engine.manager.shutdown()
    assert manager.faults() == ["the chain is closed"]
    assert not manager.is_ready()


@pytest.mark.parametrize("start", [0, 3, 8, 9, 100])
@pytest.mark.parametrize("length", [0, 1, 8, 9])
@pytest.mark.parametrize("limit", [None, -1, 0, 5, 100])
def test_any_start_and_limit_is_answered(engine, start, length, limit):
    engine.store(tokens(8))
    found = engine.manager.lookup(tokens(length), start=start, max_tokens=limit)
    reach = min(8, length, max(0, limit) if limit is not None else length)
    assert found.num_tokens == max(start, reach)
    task, mask = engine.manager.get_match(tokens(length), start=start, max_tokens=limit)
    assert mask.sum() == max(0, reach - start)
    engine.manager.cancel([task])
    engine.manager.wait([task])
    assert engine.is_idle


@pytest.mark.parametrize("wrong", [[1 << 64], ["a"], [1.5], np.zeros((2, 2), dtype=np.int64), np.zeros(2)])
def test_token_ids_that_are_none_are_refused(engine, wrong):
    for call in (engine.manager.lookup, engine.manager.get_match, engine.manager.put_match):
        with pytest.raises(ValueError):
            call(wrong)
    assert engine.is_idle


def test_a_negative_start_is_refused(engine):
    engine.store(tokens(8))
    with pytest.raises(ValueError):
        engine.manager.get_match(tokens(8), start=-1)
    assert engine.is_idle


def test_ids_at_the_ends_of_their_range_are_kept_apart(engine):
    low, high = [-(1 << 63)] * 4, [(1 << 63) - 1] * 4
    engine.store(low)
    assert engine.manager.lookup(low).num_tokens == 4
    assert engine.manager.lookup(high).num_tokens == 0
