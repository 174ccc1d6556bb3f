"""FlexKVRadixCache over tiers that fail, flushes, changing weights, limits, and the end.

Whatever a driver does, the model's passes must read right KV and the scheduler must not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from flexkv_core import EngineError, FlexKVError
from flexkv_core.testing import Fault, FaultKind
from flexkv_sglang.register import build_cache
from tests.support import sglang_dialect as dialect
from tests.support.sglang_world import FAULTY, SglangWorld, cpu, ssd, world
from tests.support.waiting import DEADLINE_S

PAGES = [1, 16]
QUICK = {"load_wait_s": 0.002}


# ---- drivers that misbehave ---------------------------------------------------------------------

BAD = {
    "raises": Fault(FaultKind.RAISE),
    "has a bug": Fault(FaultKind.RAISE, error=ZeroDivisionError("a driver's bug")),
    "returns None": Fault(FaultKind.RETURN_NONE),
    "returns too few": Fault(FaultKind.RETURN_SHORT),
    "returns too many": Fault(FaultKind.RETURN_LONG),
    "returns junk": Fault(FaultKind.RETURN_JUNK),
    "flips a bit": Fault(FaultKind.FLIP),
    "cuts values": Fault(FaultKind.TRUNCATE),
    "swaps values": Fault(FaultKind.SWAP),
    "lies": Fault(FaultKind.LIE),
    "fails one key": Fault(FaultKind.FAIL_KEYS, at=(0,)),
}


@pytest.mark.parametrize("fault", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no prefetch"])
def test_a_load_that_fails_is_computed(tmp_path: Path, fault: Fault, prefetch: bool) -> None:
    """R50, R51, HS-49: all or nothing, never a part, never wrong bytes, and a counter."""
    disk = ssd(tmp_path / "disk", load_threads=1)
    with world(tmp_path, tiers=[cpu(), disk]) as w:
        answer = w.ask(range(100), outputs=4).req.output_ids
    engine = {"prefetch": prefetch}
    with world(tmp_path, tiers=[cpu(), disk | {"breaker_failures": 0}], wrap=FAULTY, engine=engine) as w:
        if fault.kind is FaultKind.SWAP:
            w.disk._seen.update({bytes(32): b"some other value" * 100})
        w.disk.always("load", fault)
        job = w.ask(range(100), outputs=4)
        assert job.req.output_ids == answer
        assert job.cached == (0, 0, 0)
        assert w.count("load_failures", tier="disk") > 0
        w.release()
        assert w.flush()
        again = w.ask(range(100), outputs=4)  # what was computed is there again
        assert sum(again.cached or ()) == 99


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_request_waits_in_vain_once(tmp_path: Path, how: str) -> None:
    """One that stays in the queue after its load has failed is promised nothing more; others are."""
    disk = ssd(tmp_path / "disk", load_threads=1)
    with world(tmp_path, tiers=[cpu(), disk]) as w:
        w.ask(range(100))
    engine = QUICK | {"prefetch": False, "load_deadline_s": 0.3}
    with world(tmp_path, tiers=[cpu(), disk | {"breaker_failures": 0}], wrap=FAULTY, engine=engine) as w:
        w.disk.always("load", Fault(FaultKind.RAISE if how == "fails" else FaultKind.HANG))
        job = w.submit(range(100))
        assert w.match(job) > 0
        verdicts = []
        plain = w.cache.connector.load_failed
        w.cache.connector.load_failed = lambda handle: (plain(handle), verdicts.append(w.match(job)))
        w.run(job)
        assert verdicts == [0]
        w.release()
        w.has_time()
        w.settle()
        assert w.flush()
        assert sum(w.ask(range(100)).cached) == 99


@pytest.mark.parametrize("fault", BAD.values(), ids=BAD.keys())
def test_a_store_that_fails_is_only_counted(tmp_path: Path, fault: Fault) -> None:
    """HS-38, HS-39: locks and pins come back, the host tier serves, the disk is not believed."""
    disk = ssd(tmp_path / "disk", breaker_failures=0)
    with world(tmp_path, tiers=[cpu(), disk], wrap=FAULTY) as w:
        w.disk.always("store", fault)
        w.ask(range(100), outputs=4)
        if fault.kind not in (FaultKind.FLIP, FaultKind.TRUNCATE, FaultKind.SWAP, FaultKind.LIE):
            assert w.count("store_failures", tier="disk") > 0
        assert w.flush()
        assert w.ask(range(100)).cached == (0, 99, 0)
    with world(tmp_path, tiers=[cpu(), disk]) as w:
        w.ask(range(100), outputs=4)  # the passes look at what comes from the disk


@pytest.mark.parametrize("page", PAGES)
def test_a_tier_that_hangs_holds_up_nobody(tmp_path: Path, page: int) -> None:
    """HS-48, R58: others decode on; the request is computed at its deadline; the slots come back."""
    disk = ssd(tmp_path / "disk")
    with world(tmp_path, page=page, tiers=[cpu(), disk]) as w:
        w.ask(range(100))
    with world(tmp_path, page=page, tiers=[cpu(), disk], wrap=FAULTY, engine={"load_wait_s": 0.005}) as w:
        w.disk.always("load", Fault(FaultKind.HANG))
        decoding = w.submit(range(1000, 1020), outputs=60)
        w.step()
        waits = w.waits()
        job = w.submit(range(100))
        w.run(decoding)
        w.wait_hanging()
        assert job in w.waiting
        assert waits
        assert max(waits) <= 0.005
        w.pass_deadline(job)
        w.run(job)
        assert job.cached == (0, 0, 0)
        w.release()


def test_a_driver_that_is_slow_gives_its_blocks_after_all(tmp_path: Path) -> None:
    """The request waits, others do not; a block that comes late is worth having."""
    disk = ssd(tmp_path / "disk")
    with world(tmp_path, tiers=[cpu(), disk]) as w:
        w.ask(range(100))
    with world(tmp_path, tiers=[cpu(), disk], wrap=FAULTY, engine=QUICK) as w:
        w.disk.add("load", Fault(FaultKind.HANG))
        job = w.submit(range(100))
        for _ in range(5):
            w.step()
        w.wait_hanging()
        assert job in w.waiting
        w.release()
        w.run(job)
        assert job.cached == (0, 0, 99)


def test_blocks_that_vanish_between_promise_and_load(tmp_path: Path) -> None:
    """R51: the promise is taken back before anything is held."""
    with world(tmp_path) as w:
        answer = w.ask(range(64)).req.output_ids
        assert w.flush()
        job = w.submit(range(64))
        plain = job.req.init_next_round_input

        def matched(tree: Any = None) -> None:
            plain(tree)
            w.manager.reset()

        job.req.init_next_round_input = matched
        w.run(job)
        assert job.cached == (0, 0, 0)
        assert job.req.output_ids == answer
        assert w.count("promises_broken") == 1


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_copy_that_is_refused(tmp_path: Path, direction: str, caplog: pytest.LogCaptureFixture) -> None:
    """HS-39, R73, R76: logged with the request's id, counted, nothing published; the next one works."""
    with world(tmp_path, engine={"store_running": False}) as w:
        if direction == "load":
            w.ask(range(64))
            assert w.flush()
        w.transfer.refuses = 1
        with caplog.at_level(logging.WARNING):
            job = w.submit(range(64), rid="the-refused-one")
            w.run(job)
            w.settle()
        assert job.cached == (0, 0, 0)
        assert w.count(f"{direction}_failures", tier="device") == 1
        assert any("the-refused-one" in record.getMessage() for record in caplog.records)
        if direction == "store":
            assert w.chain.index.count(0) == 0
            w.ask(range(64))
        assert w.flush()
        assert w.ask(range(64)).cached == (0, 63, 0)


# ---- limits -------------------------------------------------------------------------------------


def test_stores_under_way_are_limited(tmp_path: Path) -> None:
    """HS-40, R71: beyond the limit blocks are left out and counted; allocation never waits for a store."""
    with world(tmp_path, size=256, engine={"max_store_tokens": 64}) as w:
        w.transfer.holds_stores = True
        for start in range(0, 1000, 100):
            w.run(w.submit(range(start, start + 60), outputs=1))
            assert w.chain.stores.tokens_under_way <= 64
            assert w.cache.protected_size() <= 128
        assert w.count("store_dropped_blocks", cause="too_many_under_way") > 0
        w.transfer.holds_stores = False


def test_a_host_pool_that_is_too_small_keeps_the_beginning(tmp_path: Path) -> None:
    """R74: the longest prefix that fits is stored, and served."""
    with world(tmp_path, tiers=[cpu("10KiB")]) as w:
        blocks = w.chain.host_capacity_blocks
        assert 0 < blocks < 6
        w.ask(range(100), outputs=1)
        assert w.flush()
        assert w.ask(range(100), outputs=1).cached == (0, blocks * 16, 0)
        assert w.count("store_dropped_blocks", cause="no_host_slots") > 0


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_stored_twice(tmp_path: Path, page: int) -> None:
    """R75, HS-37: not after its end, not while it is under way, and no record of it stays."""
    with world(tmp_path, page=page) as w:
        w.transfer.holds_stores = True
        for _ in range(3):
            w.run(w.submit(range(64), outputs=1))
        w.transfer.holds_stores = False
        w.settle()
        assert w.count("tokens", kind="store") == 64
        for _ in range(3):
            w.ask(range(64), outputs=1)
        assert w.flush()
        w.ask(range(64), outputs=1)
        assert w.count("tokens", kind="store") == 64
        assert not w.manager._tasks


@pytest.mark.parametrize("store_running", [True, False])
def test_chunks_are_stored_as_they_are_computed(tmp_path: Path, store_running: bool) -> None:
    """HS-46, R77: a long prompt is of use to others before it has ended."""
    with world(tmp_path, chunk=32, size=1024, engine={"store_running": store_running}) as w:
        job = w.submit(range(200), outputs=1)
        w.run(until=lambda: w.chunked is job and dialect.prefix_len(job.req) >= 96)
        w.settle()
        assert w.count("tokens", kind="store") == (96 if store_running else 0)
        w.run(job)


@pytest.mark.parametrize("page", PAGES)
def test_an_aborted_answer_is_stored(tmp_path: Path, page: int) -> None:
    """R77: what a running request had computed when it was aborted."""
    with world(tmp_path, page=page) as w:
        job = w.submit(range(64), outputs=50)
        w.run(until=lambda: len(job.req.output_ids) >= 20)
        w.abort(job)
        w.run(job)
        w.settle()
        assert w.flush()
        assert sum(w.ask([*job.tokens, 1]).cached or ()) >= 80


# ---- flush, weights, sleep ----------------------------------------------------------------------


def test_a_flush_waits_for_copies_or_is_refused(tmp_path: Path) -> None:
    """HS-51, R143: the tree stays as it is until nothing can touch a slot."""
    with world(tmp_path, engine=QUICK | {"shutdown_deadline_s": 0.1}) as w:
        w.transfer.holds_stores = True
        w.run(w.submit(range(64)))
        assert not w.flush()
        assert w.cache.total_size() > 0
        w.check()
        w.has_time()
        w.transfer.holds_stores = False
        assert w.flush()
        assert w.allocator.available_size() == w.size
        assert w.ask(range(64)).cached == (0, 63, 0)


def test_a_reset_that_cannot_wait_publishes_nothing_of_running_stores(tmp_path: Path) -> None:
    """SGLang takes no refusal after a change of weights, and whoever calls ``reset`` itself asks nobody."""
    with world(tmp_path, engine=QUICK | {"shutdown_deadline_s": 0.1}) as w:
        w.transfer.holds_stores = True
        w.run(w.submit(range(64), outputs=1))
        w.reset()
        w.poison_free()
        w.transfer.holds_stores = False
        w.settle()
        assert w.ask(range(64)).cached == (0, 0, 0)
        assert w.flush()
        assert w.ask(range(64)).cached == (0, 63, 0)


def test_a_flush_waits_for_loads_that_were_given_up(tmp_path: Path) -> None:
    with world(tmp_path, engine=QUICK | {"shutdown_deadline_s": 0.1}) as w:
        w.ask(range(64))
        assert w.flush()
        w.transfer.holds_loads = True
        job = w.submit(range(64))
        assert not w.step()
        w.abort(job)
        assert not w.flush()
        assert w.cache.extra_protected_tokens() == 63
        w.has_time()
        w.transfer.holds_loads = False
        assert w.flush()


@pytest.mark.parametrize("tiers", ["cpu", "cpu, ssd", "ssd"])
@pytest.mark.parametrize("page", PAGES)
def test_new_weights_find_nothing_of_the_old_ones(tmp_path: Path, tiers: str, page: int) -> None:
    """HS-11, R144: a flush keeps the tiers, a change of weights empties all of them."""
    disk = ssd(tmp_path / "disk")
    chain = {"cpu": [cpu()], "cpu, ssd": [cpu(), disk], "ssd": [disk]}[tiers]
    with world(tmp_path, page=page, tiers=chain, staging="1MiB") as w:
        w.ask(range(64))
        w.update_weights()
        assert w.ask(range(64)).cached == (0, 0, 0)
        assert w.flush()
        assert sum(w.ask(range(64)).cached or ()) == 63 // page * page


def test_what_the_device_holds_of_either_weights_is_left_alone(tmp_path: Path) -> None:
    """Weights may change without a flush: then nothing is stored or promised until the next one."""
    with world(tmp_path) as w:
        w.ask(range(64))
        w.update_weights(flush=False)
        stored = w.count("jobs", kind="store")
        assert w.ask(range(500, 564)).cached == (0, 0, 0)
        assert w.count("jobs", kind="store") == stored
        job = w.submit([*range(500, 564), *range(600, 620)])
        assert w.match(job) == 0
        w.abort(job)
        assert w.flush()
        assert w.ask(range(500, 564)).cached == (0, 0, 0)
        assert w.flush()
        assert w.ask(range(500, 564)).cached == (0, 63, 0)


@pytest.mark.parametrize("page", PAGES)
def test_weights_change_while_copies_run(tmp_path: Path, page: int) -> None:
    """R145: a running store is not served later, a running load is given up, slots stay where they are."""
    with world(tmp_path, page=page, engine=QUICK) as w:
        w.ask(range(64))
        assert w.flush()
        w.transfer.holds_loads = w.transfer.holds_stores = True
        storing = w.submit(range(300, 364))
        w.run(storing)
        job = w.submit(range(64))
        assert not w.step()
        assert w.cache._stores.open
        assert w.cache._loads.open
        w.update_weights(flush=False)
        w.check()
        assert w.cache.extra_protected_tokens() == 63 // page * page
        assert w.match(job) == 0
        w.transfer.holds_loads = w.transfer.holds_stores = False
        w.run(job)
        assert job.cached == (0, 0, 0)
        w.settle()
        assert w.flush()
        assert w.ask(range(300, 364)).cached == (0, 0, 0)
        assert w.ask(range(64)).cached == (0, 0, 0)


def test_sleep_ends_copies_first(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        w.transfer.holds_stores = True
        w.run(w.submit(range(64)))
        timer = threading.Timer(0.05, lambda: setattr(w.transfer, "holds_stores", False))
        timer.start()
        w.cache.on_sleep()
        assert not w.cache._stores.open
        timer.join()


# ---- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("under_way", ["nothing", "a store", "a load", "a hanging tier"])
def test_the_end_is_bounded_and_may_come_twice(tmp_path: Path, under_way: str) -> None:
    """HS-52, R147: no thread, descriptor or child is left (``conftest`` looks)."""
    engine = QUICK | {"shutdown_deadline_s": 0.3}
    w = SglangWorld(tmp_path, tiers=[cpu(), ssd(tmp_path / "disk")], wrap=FAULTY, engine=engine)
    w.ask(range(64))
    assert w.flush()
    if under_way == "a store":
        w.transfer.holds_stores = True
        w.run(w.submit(range(100, 164)))
    if under_way == "a load":
        w.transfer.holds_loads = True
        w.submit(range(64))
        w.step()
    if under_way == "a hanging tier":
        w.disk.always("store", Fault(FaultKind.HANG))
        w.run(w.submit(range(100, 164)))
        w.wait_hanging()
    began = time.monotonic()
    w.cache.release_host_resources()
    w.cache.release_host_resources()
    assert time.monotonic() - began < DEADLINE_S  # some shutdown deadlines; what hangs would do so for good
    w.cache.check_hicache_events()  # SGLang may tick once more
    w.close()


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The transfer has a thread by then, and the first tier its memory (``conftest`` looks)."""
    (tmp_path / "disk").write_text("not a directory")
    with pytest.raises(FlexKVError, match="disk"):
        SglangWorld(tmp_path, tiers=[cpu(), ssd(tmp_path / "disk")])


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ("is_hybrid_swa", "sliding-window"),
        ("is_hybrid_ssm", "state-space"),
        ("is_dsa", "indexer"),
        ("disable_radix_cache", "radix cache"),
        ("enable_hierarchical_cache", "hierarchical"),
    ],
)
def test_the_factory_refuses(tmp_path: Path, field: str, word: str) -> None:
    """HS-14 to HS-16, HS-55: by name, before anything is opened."""
    with world(tmp_path) as w:
        names = (
            "is_hybrid_swa",
            "is_hybrid_ssm",
            "is_dsa",
            "disable_radix_cache",
            "enable_hierarchical_cache",
        )
        ctx = w.ctx
        for name in names:
            setattr(ctx, name, name == field)
        with pytest.raises(EngineError, match=word):
            build_cache(ctx)


def test_the_factory_refuses_bigram_keys(tmp_path: Path) -> None:
    """HS-14, HS-15."""
    with world(tmp_path) as w:
        for name in ("is_hybrid_swa", "is_hybrid_ssm", "disable_radix_cache", "enable_hierarchical_cache"):
            setattr(w.ctx, name, False)
        w.ctx.params.is_eagle = True
        with pytest.raises(EngineError, match="speculative"):
            build_cache(w.ctx)
