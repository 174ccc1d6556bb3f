"""After a fault of ours: what was under way ends, and nobody is answered from what was not there."""

from __future__ import annotations

import threading

import pytest

from flexkv_core import EngineError

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from tests.support import sglang_dialect as dialect
from tests.support.sglang_device import LAYERS
from tests.support.sglang_world import SglangWorld, world


def _trip(w: SglangWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the next lookup."""
    monkeypatch.setattr(type(w.cache), "fails_open", True)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(w.cache.connector, "lookup_kv", broken)
    w.ask([7] * 20)
    assert w.cache.is_broken


@pytest.mark.parametrize("under_way", ["stores", "loads"])
def test_what_was_under_way_at_a_fault_still_ends(tmp_path, monkeypatch, under_way):
    """Its locks and slots come back: the device would be full of them otherwise."""
    with world(tmp_path, engine={"load_wait_s": 0.002}) as w:
        w.ask(range(64))
        assert w.flush()
        w.transfer.holds_stores, w.transfer.holds_loads = under_way == "stores", under_way == "loads"
        job = w.submit(range(100, 164) if under_way == "stores" else range(64))
        w.run(until=lambda: bool(w.cache._stores.open or w.cache.extra_protected_tokens()))
        monkeypatch.setattr(w, "settle", w.cache.check_hicache_events)
        _trip(w, monkeypatch)
        w.run(job)
        assert w.cache.protected_size() > 0
        w.transfer.holds_stores = w.transfer.holds_loads = False
        monkeypatch.undo()
        w.settle()
        assert w.cache.protected_size() == 0


def test_a_step_that_fails_does_not_keep_the_others_from_ending(tmp_path, monkeypatch, caplog):
    with world(tmp_path) as w:
        w.transfer.holds_stores = True
        w.run(w.submit(range(64)))
        monkeypatch.setattr(w, "settle", w.cache.check_hicache_events)

        def broken() -> None:
            raise ZeroDivisionError("another bug")

        w.cache._endings[0] = broken
        _trip(w, monkeypatch)
        w.transfer.holds_stores = False
        monkeypatch.undo()
        w.settle()
        assert w.cache.protected_size() == 0
        assert caplog.text.count("another bug") == 2  # one trace, with its source line
        w.cache._endings.append(w.cache._loads.give_up_all)


def test_a_late_failure_still_ends_the_engine_after_a_fault(tmp_path, monkeypatch):
    """Its slots were used by a pass that was ordered behind the copy."""
    with world(tmp_path, engine={"layerwise": False}) as w:
        w.ask(range(64))
        assert w.flush()
        w.transfer.orders = w.transfer.holds_loads = w.stream.lags = True
        w.transfer.fails_at = 0
        w.launch([*range(64), 1], outputs=1)
        assert w.cache._ordered.entries
        monkeypatch.setattr(type(w.cache), "fails_open", True)
        w.cache.switch_off("test", ZeroDivisionError("a bug"))
        w.transfer.holds_loads = False
        w.is_broken = True
        with pytest.raises(EngineError, match="after its slots were used"):
            w.tick(until=lambda: False)


@pytest.mark.parametrize("what", ["abort_failed", "visible", "keeps_out"])
def test_a_fault_where_a_failed_load_is_dealt_with(tmp_path, monkeypatch, what):
    """The scheduler goes on, and nobody is answered from what the load has left."""
    engine = {"layerwise": True, "load_deadline_s": 0.2}
    with world(tmp_path, engine=engine) as w:
        w.ask(range(64))
        assert w.flush()
        layerwise = w.cache._layerwise
        monkeypatch.setattr(type(w.cache), "fails_open", True)
        w.transfer.layers = 0

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        if what == "abort_failed":
            monkeypatch.setattr(layerwise, what, broken)
        first = w.submit([*range(64), 1], outputs=2)
        w.run(first)
        if what != "abort_failed":
            assert layerwise.has_dead
            monkeypatch.setattr(layerwise, what, broken)
            w.run(w.submit([*range(64), 2], outputs=2))  # its passes look at what they build on
        assert first.req.finished_reason.to_json()["type"] == "abort"
        assert w.cache.is_broken
        monkeypatch.undo()
        w.transfer.layers = LAYERS
        w.settle()


def test_passes_after_a_fault_wait_for_all_loads(tmp_path, monkeypatch):
    """Nobody says any more which loads they read; what the spoilt pass read is not what they read."""
    with world(tmp_path, engine={"layerwise": True}) as w:
        w.ask(range(64))
        assert w.flush()
        w.poison_free()
        monkeypatch.setattr(type(w.cache), "fails_open", True)
        layerwise = w.cache._layerwise
        w.transfer.layers = 0
        first = w.submit([*range(64), 1])
        w.waiting.remove(first)
        w.match(first)
        assert dialect.load_back(first.req, w.cache) is not None
        assert not layerwise.is_idle

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(layerwise._waits, "fail_unasked", broken)
            w.run(w.submit(range(700, 740), outputs=1))  # reads no load
        assert w.cache.is_broken
        comes = threading.Timer(0.1, setattr, (w.transfer, "layers", LAYERS))
        comes.start()
        second = w.submit([*range(64), 2])
        w.run(second)  # its passes look at what they build on
        comes.join()
        assert second.cached == (64, 0, 0)
        w.waiting.append(first)
        w.run(first)


def test_slots_are_not_in_the_tree_before_passes_wait_for_them(tmp_path, monkeypatch):
    with world(tmp_path, engine={"layerwise": True}) as w:
        w.ask(range(64))
        assert w.flush()
        monkeypatch.setattr(type(w.cache), "fails_open", True)

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(w.cache._layerwise._waits, "open", broken)
        w.transfer.layers = 0
        job = w.submit([*range(64), 1], outputs=2)
        w.run(job)  # its passes look at what they build on
        assert job.cached == (0, 0, 0)
        assert w.cache.is_broken
        w.transfer.layers = LAYERS
        w.settle()


@pytest.mark.parametrize("copies", ["stores", "loads"])
def test_memory_does_not_go_under_a_running_copy(tmp_path, copies):
    with world(tmp_path, engine={"load_wait_s": 0.002, "shutdown_deadline_s": 0.1}) as w:
        w.ask(range(64))
        assert w.flush()
        w.transfer.holds_stores, w.transfer.holds_loads = copies == "stores", copies == "loads"
        job = w.submit(range(100, 164) if copies == "stores" else range(64))
        w.run(until=lambda: bool(w.cache._stores.open or w.cache.extra_protected_tokens()))
        with pytest.raises(EngineError, match="about to go"):
            w.cache.on_sleep()
        w.has_time()
        w.transfer.holds_stores = w.transfer.holds_loads = False
        w.run(job)
        w.cache.on_sleep()
