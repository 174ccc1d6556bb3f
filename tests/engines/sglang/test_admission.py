"""Requests whose loads are not over are passed over: who overtakes them, and what is kept for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from flexkv_core.testing import Fault, FaultKind
from flexkv_core.transfer import Ticket
from flexkv_sglang import compat
from flexkv_sglang.admission import MOST_PASSED_OVER
from flexkv_sglang.connector import WaitBudget
from flexkv_sglang.request_loads import _ORPHAN_TICKS
from tests.support import sglang_dialect as dialect
from tests.support.sglang_world import FAULTY, Job, SglangWorld, cpu, ssd, world
from tests.support.waiting import DEADLINE_S

PAGES = [1, 16]
QUICK = {"load_wait_s": 0.002, "prefetch": False}


@contextmanager
def hanging(tmp_path: Path, *prompts: range, **options: Any) -> Iterator[SglangWorld]:
    """A world whose disk has these prompts, and hangs on loads until ``release``."""
    disk = ssd(tmp_path / "disk", load_threads=16)
    with world(tmp_path, tiers=[cpu(), disk], size=4096) as w:
        for tokens in prompts:
            w.ask(tokens, outputs=1)
    with world(tmp_path, tiers=[cpu(), disk], wrap=FAULTY, engine=QUICK, **options) as w:
        w.disk.always("load", Fault(FaultKind.HANG))
        yield w


@contextmanager
def held(
    tmp_path: Path, size: int = 160, engine: dict[str, Any] = QUICK, **options: Any
) -> Iterator[tuple[SglangWorld, Job]]:
    """A world whose copies to the device are held, and a request of which 112 tokens are in host slots."""
    with world(tmp_path, size=size, engine=engine, **options) as w:
        w.ask(range(112), outputs=1)
        assert w.flush()
        w.transfer.holds_loads = True
        yield w, w.submit([*range(112), 1])


def tokens_held(w: SglangWorld, job: Job) -> int:
    """Device slots that are held for a request's load."""
    return w.cache.tokens_held_for(compat.request_handle(job.req))


def admit_for_others(w: SglangWorld, job: Job) -> None:
    """Ask for the admission of a request for which others were retracted; its pass is not launched."""
    w.match(job)
    adder = w.new_adder()
    adder.preempt_list.append(object())
    dialect.admit(adder, job.req, has_chunked=False)
    assert job.req in adder.can_run_list
    w.is_broken = True


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("overlap", [False, True])
def test_who_needs_nothing_overtakes_a_load_that_hangs(tmp_path: Path, page: int, overlap: bool) -> None:
    """It is answered while the load waits; the load comes, and nothing of its request is lost."""
    with hanging(tmp_path, range(100), page=page, overlap=overlap) as w:
        waiting, other = w.submit(range(100)), w.submit(range(1000, 1050), outputs=4)
        w.run(other)
        assert waiting in w.waiting
        assert waiting.cached is None
        w.release()
        w.run(waiting)
        assert waiting.cached == (0, 0, 99 // page * page)


def test_who_waits_is_computed_at_its_deadline_and_others_run(tmp_path: Path) -> None:
    with hanging(tmp_path, range(100)) as w:
        waiting, other = w.submit(range(100), outputs=3), w.submit(range(1000, 1050))
        w.run(other)
        assert waiting in w.waiting
        w.pass_deadline(waiting)
        w.run(waiting)
        assert waiting.cached == (0, 0, 0)
        w.release()
        assert w.flush()
        assert w.ask(range(1000, 1050)).req.output_ids == other.req.output_ids


@pytest.mark.parametrize("others", [True, False])
def test_a_load_holds_the_scheduler_up_in_its_first_pass_only(tmp_path: Path, others: bool) -> None:
    """Whoever decodes would stand still for ``load_wait_s`` in every pass; an idle scheduler may wait."""
    with hanging(tmp_path, range(100)) as w:
        decoding = w.submit(range(1000, 1010), outputs=30)
        w.step()
        if not others:
            w.run(decoding)
        w.submit(range(100))
        times = w.waits()
        for _ in range(4):
            w.step()
        assert times[0] > 0
        assert [time > 0 for time in times[1:]] == [not others] * 3
        w.release()
        w.run()


def test_loads_share_one_wait_for_their_copies_to_be_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU can be told to wait for a copy only then: while others decode, in the first pass and together."""
    prompts = [range(1000 * n, 1000 * n + 60) for n in range(1, 4)]
    waited: list[float] = []

    def order_behind(_ticket: Ticket, timeout_s: float) -> bool:
        waited.append(timeout_s)
        time.sleep(timeout_s)
        return False

    monkeypatch.setattr(Ticket, "order_behind", order_behind)
    with world(tmp_path, tiers=[cpu("8MiB")], size=1024) as w:
        for tokens in prompts:
            w.ask(tokens, outputs=1)
        assert w.flush()
        w.transfer.holds_loads = True
        limit_s = 1.0
        w.cache.connector._load_wait = WaitBudget(limit_s)
        w.submit(range(90_000, 90_010), outputs=100)
        w.step()
        for tokens in prompts:
            w.submit([*tokens, 1])
        w.step()
        assert waited
        assert sum(waited) <= limit_s
        w.run(until=lambda: all(load.slots is not None for load in w.cache._loads.open.values()))
        waited.clear()
        w.step()
        assert waited == [0.0] * len(prompts)
        w.transfer.holds_loads = False
        w.run()


def test_a_load_that_has_come_is_first_in_line(tmp_path: Path) -> None:
    """The next pass has it, whoever came behind it in the meantime."""
    with hanging(tmp_path, range(100)) as w:
        waiting = w.submit(range(100))
        for start in range(1000, 1500, 100):
            w.submit(range(start, start + 20), outputs=1)
            w.step()
        assert w.waiting == [waiting]
        w.release()
        (load,) = w.cache._loads.open.values()
        w.tick(until=lambda: w.manager.is_staged(load.task))
        w.cache.connector._load_wait = WaitBudget(DEADLINE_S)
        behind = w.submit(range(2000, 2020), outputs=1)
        w.step()
        assert w.waiting == []
        assert waiting.cached == (0, 0, 99)
        w.run(waiting, behind)


@pytest.mark.parametrize("more", [0, 1])
def test_only_so_many_are_passed_over(tmp_path: Path, more: int) -> None:
    """Beyond that a pass ends as SGLang would end it, and no further load is begun."""
    prompts = [range(1000 * n, 1000 * n + 20) for n in range(MOST_PASSED_OVER + 3 * more)]
    with hanging(tmp_path, *prompts, size=1024) as w:
        jobs = [w.submit(tokens) for tokens in prompts]
        other = w.submit(range(50_000, 50_020), outputs=1)
        w.step()
        assert len(w.cache._loads.open) == MOST_PASSED_OVER + more
        assert (other in w.waiting) is bool(more)
        for _ in range(3):
            w.waiting.reverse()  # whatever order a policy gives the queue
            w.step()
        assert len(w.cache._loads.open) <= MOST_PASSED_OVER + 1
        w.release()
        w.run(*jobs, other)


@pytest.mark.parametrize("page", PAGES)
def test_tokens_are_kept_for_who_waits(tmp_path: Path, page: int) -> None:
    """What overtakes it gets what it leaves; and not even an idle server takes itself for full."""
    with hanging(tmp_path, range(96), page=page, size=192) as w:
        waiting = w.submit([*range(96), 1], outputs=4)
        large, small = w.submit(range(1000, 1090)), w.submit(range(2000, 2010), outputs=30)
        w.step()
        assert w.waiting == [waiting, large, small], "it would have taken what was kept"
        assert not w.is_full
        w.waiting.remove(large)
        w.step()
        assert w.waiting == [waiting]
        w.release()
        w.run(waiting)
        assert small in w.running or small in w.finished
        assert sum(waiting.cached) == 96
        w.waiting.append(large)
        w.run()


def test_a_row_is_kept_for_who_waits(tmp_path: Path) -> None:
    with hanging(tmp_path, range(96)) as w:
        taken = w.rows.free_slots[2:]
        w.rows.free_slots = w.rows.free_slots[:2]
        waiting = w.submit([*range(96), 1])
        first, second = (w.submit(range(start, start + 10), outputs=100) for start in (1000, 2000))
        w.step()
        w.step()
        assert w.waiting == [waiting, second]
        assert w.running == [first]
        w.release()
        w.run(waiting)
        assert first in w.running
        w.rows.free_slots += taken
        w.run()


@pytest.mark.parametrize("page", PAGES)
def test_the_slots_of_its_own_load_are_not_asked_for_twice(
    tmp_path: Path, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.5.22 an idle server that has once said "no token" asks nobody any more."""
    monkeypatch.setattr("flexkv_sglang.request_loads._ORPHAN_S", 600.0)
    with held(tmp_path, page=page) as (w, job):
        for _ in range(3):
            w.step()
            assert not w.is_full
        assert tokens_held(w, job) == 112
        w.transfer.holds_loads = False
        w.run(job)
        assert job.cached == (0, 112, 0)


@pytest.mark.parametrize("page", PAGES)
def test_no_token_is_not_said_while_slots_come_back_by_themselves(tmp_path: Path, page: int) -> None:
    """A store locks what it reads; nobody ends by whom SGLang would be told that there is room again."""
    with world(tmp_path, page=page, size=160, engine=QUICK) as w:
        w.transfer.holds_stores = True
        w.run(w.submit(range(96), outputs=1))
        assert w.cache._stores.open
        job = w.submit(range(1000, 1100))
        for _ in range(3):
            w.step()
        assert job in w.waiting
        w.transfer.holds_stores = False
        w.run(job)


def test_a_given_up_load_is_not_lent_to_its_request(tmp_path: Path) -> None:
    """Its slots are in quarantine: a request that is computed instead needs others, or waits for these."""
    with held(tmp_path, engine=QUICK | {"load_deadline_s": 0.1}) as (w, job):
        w.run(until=lambda: not w.cache._loads.open and bool(w.cache._quarantine.entries))
        for _ in range(3):
            w.step()
        assert job in w.waiting
        w.transfer.holds_loads = False
        w.run(job)
        assert job.cached is not None


def test_the_deadline_counts_from_the_first_question(tmp_path: Path) -> None:
    """Another promise, or another load, gives no more time."""
    with hanging(tmp_path, range(100)) as w:
        waiting = w.submit(range(100))
        w.step()
        part = w.submit(range(32), outputs=1)
        w.match(part)
        w.cache.connector.load_failed(compat.request_handle(part.req))
        w.run(part)  # it is computed: a part of the prefix is on the device now
        w.step()
        assert waiting in w.waiting
        assert [load.have for load in w.cache._loads.open.values()] == [32]
        w.pass_deadline(waiting)
        w.step()
        assert waiting not in w.waiting
        assert waiting.cached == (32, 0, 0)
        w.release()
        w.run(waiting)


def test_who_had_others_retracted_does_not_wait(tmp_path: Path) -> None:
    """They would have been retracted for nothing, and before 0.5.22 lost, were nobody admitted."""
    with hanging(tmp_path, range(100)) as w:
        job = w.submit(range(100))
        admit_for_others(w, job)
        assert dialect.prefix_len(job.req) == 0
        assert not w.cache._loads.open


def test_who_had_others_retracted_takes_no_slots_for_a_copy_that_may_last(tmp_path: Path) -> None:
    """Given up, they are in quarantine, and there is no room to compute the prompt instead."""
    with held(tmp_path) as (w, job):
        admit_for_others(w, job)
        assert not w.cache.extra_protected_tokens()


@pytest.mark.parametrize("size", [160, 512])
def test_who_had_others_retracted_waits_for_a_copy_whose_slots_it_needs(tmp_path: Path, size: int) -> None:
    """It was asked for before.  Where there is room besides, it does not wait."""
    with held(tmp_path, size) as (w, job):
        w.run(until=lambda: tokens_held(w, job) == 112)
        connector = w.cache.connector
        plain, times = connector._wait, list[float]()

        def wait(is_so: Callable[[], bool], timeout_s: float) -> bool:
            times.append(timeout_s)
            w.transfer.holds_loads = timeout_s < 1
            return plain(is_so, timeout_s)

        connector._wait = wait
        admit_for_others(w, job)
        assert dialect.prefix_len(job.req) == (112 if size == 160 else 0)
        assert (max(times) > 1) is (size == 160)


@pytest.mark.parametrize("how", ["aborted", "flushed"])
def test_who_is_passed_over_may_go(tmp_path: Path, how: str) -> None:
    with hanging(tmp_path, range(100)) as w:
        waiting, other = w.submit(range(100)), w.submit(range(1000, 1010))
        w.run(other)
        assert waiting in w.waiting
        w.release()
        if how == "aborted":
            w.abort(waiting)
            w.run()
            return
        assert w.cache.may_flush()  # a paused engine is flushed although requests wait
        w.reset()
        w.run(waiting)
        assert sum(waiting.cached) == 99


def test_chunks_of_another_do_not_end_a_load(tmp_path: Path) -> None:
    """A long prompt that overtakes keeps its chunks; who waits comes in when its load does."""
    with hanging(tmp_path, range(100), chunk=32, size=1024) as w:
        waiting, long = w.submit(range(100)), w.submit(range(1000, 1200))
        w.run(until=lambda: w.chunked is long)
        assert waiting in w.waiting
        w.release()
        w.run(waiting, long)
        assert sum(waiting.cached) == 99


def _not_asked(w: SglangWorld) -> None:
    """Have so many ticks as make an orphan of a load that nobody asks for (with no time at all)."""
    for _ in range(_ORPHAN_TICKS + 1):
        w.cache.check_hicache_events()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_load_is_kept_while_its_request_is_not_asked(
    tmp_path: Path, is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of another may spend each pass; where nobody tells of aborts, it looks like one left over."""
    monkeypatch.setattr("flexkv_sglang.request_loads._ORPHAN_S", 0.0)
    with hanging(tmp_path, range(100), chunk=32, size=1024) as w:
        waiting, long = w.submit(range(100)), w.submit(range(1000, 1200))
        w.run(until=lambda: w.chunked is long)
        _not_asked(w)
        assert passed_over(w, waiting) is w.cache.seam.reports_aborts
        w.release()
        if is_aborted:
            w.abort(waiting)
        w.run()
        assert is_aborted or sum(waiting.cached) == 99
        assert w.count("jobs", kind="load", status="ok") == (not is_aborted)


def test_a_load_whose_request_is_not_asked_makes_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in front of it now could begin none of their own before its deadline."""
    monkeypatch.setattr("flexkv_sglang.request_loads._ORPHAN_S", 0.0)
    prompts = [range(1000 * n, 1000 * n + 20) for n in range(MOST_PASSED_OVER + 1)]
    with hanging(tmp_path, *prompts, size=1024) as w:
        jobs = [w.submit(tokens) for tokens in prompts]
        w.step()
        assert len(w.cache._loads.open) == MOST_PASSED_OVER + 1
        _not_asked(w)
        assert len(w.cache._loads.open) == (MOST_PASSED_OVER if w.cache.seam.reports_aborts else 0)
        w.release()
        w.run(*jobs)


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_load_has_brought_is_kept_while_its_request_is_not_asked(
    tmp_path: Path, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are the tree's then; while its copy runs they stay its own."""
    monkeypatch.setattr("flexkv_sglang.request_loads._ORPHAN_S", 0.0)
    with held(tmp_path, size=256) as (w, job):
        w.run(until=lambda: tokens_held(w, job) == 112)
        (load,) = w.cache._loads.open.values()
        w.transfer.holds_loads = not comes
        if comes:
            assert w.cache.connector.wait_over(load.task, DEADLINE_S)
        _not_asked(w)
        assert tokens_held(w, job) == (0 if comes else 112)
        assert w.cache.evictable_size() == (112 if comes else 0)
        w.check()
        w.transfer.holds_loads = False
        w.run(job)
        assert sum(job.cached) == 112


def passed_over(w: SglangWorld, job: Job) -> bool:
    """Whether a request still waits for its load."""
    return job in w.waiting and compat.request_handle(job.req) in w.cache._loads.open


@pytest.mark.parametrize("page", PAGES)
def test_running_requests_are_retracted_while_one_waits(tmp_path: Path, page: int) -> None:
    """Decoding runs out of memory: what is kept for who waits is not the device's."""
    with hanging(tmp_path, range(64), page=page, size=160) as w:
        waiting = w.submit([*range(64), 1])
        jobs = [w.submit(range(start, start + 16), outputs=40) for start in (1000, 2000)]
        w.run(*jobs)
        assert passed_over(w, waiting)
        w.release()
        w.run(waiting)
