"""FlexKVRadixCache against a device that lags behind, late copies, and aborts in every phase.

The cures that stand in ``flexkv_sglang`` or the transfer are switched off in some tests (``cured``),
to show that the test sees the hazard: then the model's next pass reads wrong KV.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from flexkv_core import PassedFence
from flexkv_core.testing import Fault, FaultKind
from flexkv_sglang import compat
from tests.support import sglang_dialect as dialect
from tests.support.sglang_world import FAULTY, Job, SglangWorld, cpu, ssd, world
from tests.support.waiting import DEADLINE_S

PAGES = [1, 16]
CURED = pytest.mark.parametrize("cured", [True, False], ids=["cured", "hazard"])
QUICK = {"load_wait_s": 0.002}
WRONG = "wrong KV"


def _no_fences(w: SglangWorld) -> None:
    w.transfer._fence = PassedFence


def _load_back(w: SglangWorld, job: Job) -> tuple[int, object] | None:
    """``init_load_back`` as the scheduler calls it; its answer."""
    return dialect.load_back(job.req, w.cache)


# ---- HS-1, HS-2: copies and queued passes --------------------------------------------------------


@CURED
def test_a_store_waits_for_the_pass_that_writes_its_last_slot(tmp_path: Path, cured: bool) -> None:
    """HS-1, R66: at the end of a request the pass that writes its last token's KV is still queued."""
    with world(tmp_path, overlap=True) as w:
        if not cured:
            _no_fences(w)
        w.stream.lags = True
        job = w.submit(range(40), outputs=8, stop_after=3)
        w.run(job)
        assert job.req.kv is not None
        assert w.stream.done < w.stream.queued, "the overshoot pass should be queued"
        if cured:
            _tick_for(w, 0.05)  # time in which it would be made, were nothing waited for
            assert w.cache._stores.open
        else:
            w.settle()
        w.stream.run()
        w.results.clear()
        w.settle()
        w.stream.lags = False
        assert w.flush()
        turn = w.submit([*job.tokens, 5, 6])
        if cured:
            w.run(turn)
            assert turn.cached == (0, 43, 0)
        else:
            with pytest.raises(AssertionError, match=WRONG):
                w.run(turn)
            w.is_broken = True


def _tick_for(w: SglangWorld, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        w.cache.check_hicache_events()


@CURED
@pytest.mark.parametrize("page", PAGES)
def test_a_chunk_is_stored_when_its_pass_has_run(tmp_path: Path, page: int, cured: bool) -> None:
    """HS-1 for chunks: a chunk is handed over while its own pass is still queued."""
    with world(tmp_path, page=page, overlap=True, chunk=32) as w:
        if not cured:
            _no_fences(w)
        w.stream.lags = True
        job = w.submit(range(128), outputs=1)
        while job is w.chunked or job in w.waiting:
            w.step()
            if not cured:
                w.settle()
        w.stream.lags = False
        w.stream.run()
        w.run(job)
        w.settle()
        assert w.flush()
        again = w.submit([*range(128), 1])
        if cured:
            w.run(again)
            assert again.cached == (0, 128, 0)
        else:
            with pytest.raises(AssertionError, match=WRONG):
                w.run(again)
            w.is_broken = True


@CURED
def test_a_load_waits_for_passes_that_may_write_its_slots(tmp_path: Path, cured: bool) -> None:
    """HS-2, R55: a slot that an ended request gave back is still written by its overshoot pass."""
    engine = {"load_wait_s": 0.05} if cured else {}  # without fences it waits for nothing but the copy
    with world(tmp_path, page=16, overlap=True, engine=engine) as w:
        if not cured:
            _no_fences(w)
        w.ask(range(1000, 1064), outputs=1)
        assert w.flush()
        w.stream.lags = True
        job = w.submit(range(20), outputs=8, stop_after=3)
        w.run(job)
        assert w.stream.done < w.stream.queued
        # Its second page is not whole, so it is free now; the allocator hands it out first.
        again = w.submit([*range(1000, 1064), 3])
        if cured:
            w.run(again)
            assert again.cached == (0, 64, 0)
            w.stream.run()
            w.stream.lags = False
            w.run()
        else:
            with pytest.raises(AssertionError, match=WRONG):
                w.run(again)
            w.is_broken = True


@pytest.mark.parametrize("page", PAGES)
def test_a_pass_is_ordered_behind_its_load(tmp_path: Path, page: int) -> None:
    """On a device with streams nobody waits for the copy: the next pass does, on the device."""
    with world(tmp_path, page=page, engine=QUICK | {"shutdown_deadline_s": 0.1}) as w:
        w.ask(range(64))
        assert w.flush()
        w.transfer.orders = w.transfer.holds_loads = w.stream.lags = True
        job = w.launch([*range(64), 1], outputs=1)
        assert job.cached == (0, 64, 0)
        assert w.cache._ordered.entries
        w.check()
        assert not w.cache.may_flush(), "a flush would give the slots away under the copy"
        w.transfer.holds_loads = False
        w.stream.run()
        w.run(job)
        w.settle()
        assert not w.cache._ordered.entries


def test_rows_are_read_when_the_request_ends(tmp_path: Path) -> None:
    """HS-17: the row of slots is somebody else's as soon as the request is released."""
    with world(tmp_path) as w:
        w.transfer.holds_stores = True
        job = w.submit(range(40), outputs=1)
        w.run(job)
        w.rows.req_to_token[:] = 1
        w.transfer.holds_stores = False
        w.settle()
        assert w.flush()
        assert w.ask([*range(40), 3]).cached == (0, 40, 0)


# ---- HS-3, HS-4, R56, R70: copies that outlive whoever wanted them -------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_late_load_is_given_up_and_its_slots_wait(tmp_path: Path, page: int) -> None:
    """HS-3, R56: the request is computed, the slots are nobody's until the copy has ended."""
    engine = QUICK | {"load_deadline_s": 0.1}
    with world(tmp_path, page=page, engine=engine) as w:
        w.ask(range(64))
        assert w.flush()
        w.transfer.holds_loads = True
        job = w.submit(range(64))
        w.run(job)
        assert job.cached == (0, 0, 0)
        quarantined = w.cache.extra_protected_tokens()
        assert quarantined == 63 // page * page
        free = w.poison_free()
        w.transfer.holds_loads = False
        w.settle()
        assert w.cache.extra_protected_tokens() == 0
        for plane in w.planes:
            assert (plane[free] == 0xAB).all(), "the late copy wrote a slot that was free"
        assert w.count("jobs", kind="load", status="ok") == 0
        assert w.ask(range(64)).cached == (63 // page * page, 0, 0)


@pytest.mark.skipif(not compat.seam().reports_aborts, reason="this SGLang tells nobody: it ends as an orphan")
@pytest.mark.parametrize("page", PAGES)
def test_a_request_aborted_in_its_load_leaves_its_slots_in_quarantine(tmp_path: Path, page: int) -> None:
    """HS-3, R146: nothing is free, nor in the tree, before the copy has ended."""
    with world(tmp_path, page=page, engine=QUICK) as w:
        w.ask(range(64))
        assert w.flush()
        w.transfer.holds_loads = True
        job = w.submit(range(64))
        assert not w.step()
        assert w.cache.extra_protected_tokens() == 63 // page * page
        w.abort(job)
        w.step()
        assert w.cache.extra_protected_tokens() == 63 // page * page
        assert w.allocator.available_size() == w.size - 63 // page * page
        w.transfer.holds_loads = False
        w.settle()
        assert w.allocator.available_size() == w.size
        assert w.ask(range(64)).cached == (0, 63 // page * page, 0)


@CURED
@pytest.mark.parametrize("page", PAGES)
def test_a_store_keeps_its_slots_whatever_becomes_of_the_request(
    tmp_path: Path, page: int, cured: bool
) -> None:
    """HS-4, R68, R70: abort and eviction during a store neither free nor unlock what it reads."""
    with world(tmp_path, page=page, engine={"load_wait_s": 0.001}) as w:
        w.transfer.holds_stores = True
        job = w.submit(range(64), outputs=1)
        w.run(job)
        dialect.leave_queue(job.req, w.cache)
        if not cured:
            for store in w.cache._stores.open:
                w.cache.dec_lock_ref(store.node)
        w.cache.evict(EvictParams(num_tokens=w.size))
        assert w.allocator.available_size() == (w.size - 64 if cured else w.size)
        w.poison_free()
        w.transfer.holds_stores = False
        if not cured:
            w.cache._stores.open.clear()
            assert w.chain.drain(DEADLINE_S)
            job = w.submit([*range(64), 1])
            with pytest.raises(AssertionError, match=WRONG):
                w.run(job)
            w.is_broken = True
            return
        w.settle()
        w.cache.evict(EvictParams(num_tokens=w.size))
        assert w.ask([*range(64), 1]).cached == (0, 64, 0)


@pytest.mark.parametrize("phase", ["queued", "matched", "staging", "copying", "chunk", "decoding", "storing"])
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no prefetch"])
def test_an_abort_in_any_phase_leaves_nothing(tmp_path: Path, phase: str, prefetch: bool) -> None:
    """R146, HS-34, HS-35: the end of the world looks for locks, slots, plans, pins and tasks."""
    disk = ssd(tmp_path / "disk")
    with world(tmp_path, tiers=[cpu(), disk]) as w:
        w.ask(range(100))
    engine = QUICK | {"prefetch": prefetch}
    with world(tmp_path, tiers=[cpu(), disk], wrap=FAULTY, engine=engine, chunk=32) as w:
        job = w.submit(range(100), outputs=20)
        other = w.submit(range(200, 240))
        if phase == "staging":
            w.disk.always("load", Fault(FaultKind.HANG))
            w.step()
            w.step()
            w.wait_hanging()
        if phase == "matched":
            w.match(job)
        if phase == "copying":
            w.transfer.holds_loads = True
            w.run(until=lambda: any(load.slots is not None for load in w.cache._loads.open.values()))
        if phase == "chunk":
            w.manager.reset()
            w.run(until=lambda: w.chunked is job)
        if phase == "decoding":
            w.run(until=lambda: len(job.req.output_ids) > 2)
        if phase == "storing":
            w.transfer.holds_stores = True
            w.run(job)
            assert w.cache._stores.open
            dialect.leave_queue(job.req, w.cache)
        else:
            w.abort(job)
        w.release()
        w.transfer.holds_loads = w.transfer.holds_stores = False
        w.run(other)
        w.run()


def test_unknown_and_repeated_handles_are_ignored(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        job = w.submit(range(20), rid="x")
        w.match(job)
        twin = w.submit(range(40), rid="x")
        w.match(twin)
        for _ in range(2):
            w.abort(job)
            w.waiting.append(job) if job not in w.waiting else None
            w.waiting.remove(job)
            dialect.leave_queue(job.req, w.cache)
        stranger = w.submit(range(30), rid="stranger")
        w.abort(stranger)
        w.run(twin)


@pytest.mark.parametrize("page", PAGES)
def test_a_retracted_request_finds_what_it_had(tmp_path: Path, page: int) -> None:
    """R77: the prompt of a retracted request is in the tiers, and its second attempt starts clean."""
    with world(tmp_path, page=page) as w:
        job = w.submit(range(64), outputs=20)
        w.run(until=lambda: len(job.req.output_ids) > 3)
        w.settle()
        w.retract(job)
        w.cache.evict(EvictParams(num_tokens=w.size))
        assert w.allocator.available_size() == w.size
        w.run(job)
        assert w.count("tokens", kind="load") == 64


# ---- several requests ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("how", ["one after the other", "both at once"])
def test_two_requests_load_one_prefix(tmp_path: Path, page: int, how: str) -> None:
    """HS-44, R60: one path in the tree, no slot without an owner; the steps check it."""
    with world(tmp_path, page=page, engine=QUICK) as w:
        w.ask(range(64), outputs=1)
        assert w.flush()
        w.transfer.holds_loads = True
        first, second = w.submit([*range(64), 1]), w.submit([*range(64), 2])
        for job in (first, second):
            assert w.match(job) == 64
            assert _load_back(w, job) is None
        assert w.cache.extra_protected_tokens() == 128
        w.check()
        w.transfer.holds_loads = False
        if how == "both at once":  # the second one's promise is older than the first one's load
            w.tick(until=lambda: all(w.manager.is_over(load.task) for load in w.cache._loads.open.values()))
            answers = [_load_back(w, job) for job in (first, second)]
            assert [count for count, _ in filter(None, answers)] == [64, 64]
            assert answers[0][1] is answers[1][1]  # type: ignore[index]  # never None here
            assert w.cache.extra_protected_tokens() == 0
            assert w.cache.evictable_size() == 64
            w.check()
        w.run()
        w.settle()
        assert w.allocator.available_size() + w.cache.evictable_size() == w.size


@pytest.mark.parametrize("page", PAGES)
def test_a_load_that_nobody_waits_for_goes_into_the_tree(
    tmp_path: Path, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots would be held for ever otherwise: SGLang has no budget to admit the request with them."""
    monkeypatch.setattr("flexkv_sglang.request_loads._ORPHAN_S", 0.05)
    with world(tmp_path, page=page, engine=QUICK) as w:
        w.ask(range(64), outputs=1)
        assert w.flush()
        w.transfer.holds_loads = True
        job = w.submit([*range(64), 1])
        assert not w.step()
        w.transfer.holds_loads = False
        w.tick(until=lambda: not w.cache._loads.open)
        assert w.cache.evictable_size() == 64
        w.run(job)
        assert job.cached == (64, 0, 0)


@CURED
def test_slow_passes_do_not_end_a_load_that_is_asked_for(
    tmp_path: Path, cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass may take longer than the time after which a load counts as forgotten."""
    monkeypatch.setattr("flexkv_sglang.request_loads._ORPHAN_S", 0.0)
    if not cured:
        monkeypatch.setattr("flexkv_sglang.request_loads._ORPHAN_TICKS", 0)
    with world(tmp_path, tiers=[ssd(tmp_path / "disk")], staging="1MiB", wrap=FAULTY, engine=QUICK) as w:
        w.cache.seam = replace(w.cache.seam, reports_aborts=False)  # elsewhere it is kept in any case
        w.ask(range(64), outputs=1)
        assert w.flush()
        w.disk.add("load", Fault(FaultKind.HANG))
        job = w.submit([*range(64), 1])
        w.run(until=lambda: w.disk.num_hanging)
        for _ in range(5):
            assert not w.step()
        w.release()
        w.run(job)
        assert (w.count("jobs", kind="load", status="cancelled") == 0) is cured
        assert job.cached == (0, 64, 0) or not cured


@pytest.mark.parametrize("page", PAGES)
def test_a_load_larger_than_what_is_left_is_admitted_in_the_end(
    tmp_path: Path, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of a load under way are not counted against its own request for ever."""
    monkeypatch.setattr("flexkv_sglang.request_loads._ORPHAN_S", 0.05)
    with world(tmp_path, page=page, size=160, engine=QUICK) as w:
        w.ask(range(112), outputs=1)
        assert w.flush()
        w.transfer.holds_loads = True
        job = w.submit([*range(112), 1])
        assert not w.step()
        w.transfer.holds_loads = False
        w.run(job)
        assert job.cached is not None
        assert sum(job.cached) == 112


# ---- room on the device -------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_only_the_shortage_is_evicted(tmp_path: Path, page: int) -> None:
    """HS-45, R53."""
    with world(tmp_path, page=page, size=256, engine={"store_running": False}) as w:
        w.ask(range(64), outputs=1)
        assert w.flush()
        for start in range(1000, 1000 + 14 * 16, 16):
            w.ask([*range(start, start + 16)], outputs=1)
        assert w.allocator.available_size() == 32
        job = w.submit([*range(64), 1])
        assert w.match(job) == 64
        assert (_load_back(w, job) or (0,))[0] == 64
        assert w.allocator.available_size() == 0
        assert w.cache.evictable_size() == 256
        w.run(job)


@CURED
def test_the_path_below_which_a_load_hangs_is_not_evicted(tmp_path: Path, cured: bool) -> None:
    """HS-7, R52: the oldest leaf is the prefix itself, and the load needs all other slots."""
    with world(tmp_path, size=64) as w:
        w.ask(range(48), outputs=1)
        assert w.flush()
        w.ask(range(32), outputs=1)
        job = w.submit([*range(48), 1])
        assert w.match(job) == 16
        w.cache.inc_lock_ref = w.cache.inc_lock_ref if cured else lambda _node: None
        dec = w.cache.dec_lock_ref
        w.cache.dec_lock_ref = dec if cured else lambda _node: None
        held = w.allocator.alloc(20)  # 12 are left
        answer = _load_back(w, job)
        w.cache.dec_lock_ref = dec
        w.allocator.free(held)
        if cured:
            assert answer == (0, job.req.best_match_node)
            assert w.count("load_failures", cause="no_device_slots") == 1
            assert w.cache.evictable_size() == 32
            w.check()
        else:
            assert w.cache.evictable_size() == 0, "the prefix itself was evicted"
            w.is_broken = True
        w.abort(job)


@pytest.mark.parametrize("page", PAGES)
def test_no_slots_for_a_load(tmp_path: Path, page: int) -> None:
    """R54, HS-42: the plan is cancelled, the request is computed, nothing stays locked."""
    with world(tmp_path, page=page) as w:
        w.ask(range(64), outputs=1)
        assert w.flush()
        job = w.submit([*range(64), 1])
        assert w.match(job) == 64
        held = w.allocator.alloc(w.allocator.available_size() - 32)
        assert _load_back(w, job) == (0, w.cache.root_node)
        assert w.count("load_failures", cause="no_device_slots") == 1
        w.allocator.free(held)
        w.check()
        w.run(job)
