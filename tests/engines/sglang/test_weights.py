"""Weights and adapters that change while requests are served, through the hooks on SGLang's calls.

What was stored before is never served again; and whatever the call did, the cache works again as soon as
the device holds nothing of other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from flexkv_sglang import scheduler_hooks
from flexkv_sglang.weights import BEGIN, END, WeightChanges
from tests.support.sglang_world import SglangWorld, cpu, world

DISK, TENSOR = "update_weights_from_disk", "update_weights_from_tensor"
OLD, OTHER = range(64), range(500, 564)


class Scheduler:
    """What SGLang's calls that change weights do to the device."""

    def __init__(self, w: SglangWorld) -> None:
        self.w = w
        self.flushes = 0
        self._engine_paused = False

    def is_fully_idle(self, **_: Any) -> bool:
        return not self.w.open_jobs()

    def flush_cache(self, **_: Any) -> bool:
        self.flushes += 1
        return self.w.flush()

    def change(self, call: str, *, is_ok: bool = True, changes: bool = True, flush: bool = False) -> None:
        """Call it through our hook."""

        def original(_manager: Any) -> Any:
            self.w.weights += changes
            return SimpleNamespace(success=is_ok and (not flush or self.flush_cache()))

        scheduler_hooks._around_weights(call)(original, SimpleNamespace(scheduler=self))


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    with world(tmp_path, tiers=[cpu()]) as w:
        monkeypatch.setattr(scheduler_hooks._watched, "cache", lambda: w.cache)
        w.ask(OLD)
        yield Scheduler(w)


def works_again(w: SglangWorld) -> None:
    """Nothing of the old weights is found, and what is computed now is kept."""
    assert w.ask(OLD).cached == (0, 0, 0)
    assert w.flush()
    assert w.ask(OLD).cached == (0, 63, 0)
    assert w.count("weights_suspect") == 0


def test_a_change_that_flushes(served: Scheduler) -> None:
    served.change(DISK, flush=True)
    assert served.flushes == 1
    works_again(served.w)


@pytest.mark.parametrize("changes", [True, False], ids=["half written", "rolled back"])
def test_a_change_that_fails_is_followed_by_a_flush(served: Scheduler, changes: bool) -> None:
    served.change(DISK, is_ok=False, changes=changes)
    assert served.flushes == 1
    works_again(served.w)


def test_a_change_that_raises_is_not_hidden(served: Scheduler) -> None:
    def original(_manager: Any) -> Any:
        raise ZeroDivisionError("a broken file")

    with pytest.raises(ZeroDivisionError):
        scheduler_hooks._around_weights(DISK)(original, SimpleNamespace(scheduler=served))
    works_again(served.w)


def test_a_fault_of_ours_in_a_change_ends_the_cache(
    served: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is served any more, so nothing wrong is; SGLang's call goes on."""
    w = served.w

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(type(w.cache), "fails_open", True)
    monkeypatch.setattr(w.cache.connector, "invalidate", broken)
    served.change(DISK, flush=True)
    assert w.cache.is_broken
    assert w.count("adapter_faults", method="on_weights_changed") == 1
    for _ in range(2):
        assert w.ask(OLD).cached == (0, 0, 0)
        assert w.flush()
    w.is_broken = True


def test_a_failed_change_waits_for_those_that_run(served: Scheduler) -> None:
    """Nothing is stored or served until then."""
    w = served.w
    running = w.submit(OTHER, outputs=20)
    w.run(until=lambda: len(running.req.output_ids) > 3)
    w.settle()
    served.change(DISK, is_ok=False, changes=False)
    assert served.flushes == 0
    stored = w.count("jobs", kind="store")
    w.run(running)
    assert w.count("jobs", kind="store") == stored
    w.cache.check_hicache_events()
    assert served.flushes == 1
    works_again(w)


def test_a_change_without_a_flush_is_left_alone(served: Scheduler) -> None:
    """Whoever forbids the flush wants what the device has; the tiers wait for the next one."""
    w = served.w
    served.change(DISK)
    for _ in range(5):
        w.cache.check_hicache_events()
    assert served.flushes == 0
    assert w.count("weights_suspect") == 1
    stored = w.count("jobs", kind="store")
    assert w.ask(OTHER).cached == (0, 0, 0)
    assert w.count("jobs", kind="store") == stored
    assert w.flush()
    works_again(w)


def test_a_session_of_changes(served: Scheduler) -> None:
    """The flush comes with the tensors, before the session's end: requests in between are of neither."""
    w = served.w
    served.change(BEGIN, changes=False)
    served.change(TENSOR, flush=True)
    stored = w.count("jobs", kind="store")
    w.ask(OTHER)
    assert w.count("jobs", kind="store") == stored, "weights are still being written"
    served.change(END)
    assert served.flushes == 2
    assert w.ask(OTHER).cached == (0, 0, 0)
    works_again(w)


def test_a_session_that_writes_from_outside(served: Scheduler) -> None:
    """Nobody says that it flushes: SGLang's caller does, after the end."""
    w = served.w
    served.change(BEGIN, changes=False)
    served.change(BEGIN, is_ok=False, changes=False)  # "a session is already open"
    assert served.flushes == 0
    w.ask(OTHER)
    assert w.count("weights_suspect") == 1
    served.change(END)
    assert w.flush()
    works_again(w)


def test_the_end_of_no_session(served: Scheduler) -> None:
    served.change(END, is_ok=False, changes=False)
    works_again(served.w)


def test_changes_without_a_device() -> None:
    changes = WeightChanges()
    assert not changes.are_suspect
    changes.ended(DISK, is_ok=False)
    assert not changes.want_flush, "nothing was announced"
    changes.begins()
    assert changes.want_flush
    changes.flushed()
    assert not changes.are_suspect


def test_an_adapter_that_comes_back_with_another_content(tmp_path: Path) -> None:
    """SGLang keeps the id of an adapter that it puts out to make room, and so its device tree's entries."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    with world(tmp_path, tiers=[cpu()]) as w:
        refs = {"id": SimpleNamespace(lora_path=str(folder))}
        runner = SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=refs))
        w.cache._stale.adapters._worker = SimpleNamespace(model_runner=runner)
        w.cache.on_adapter_loaded("id")
        w.ask(OLD, lora_id="id")
        weights.write_bytes(b"other")  # not loaded yet: what serves is the first content
        assert w.flush()
        assert w.ask(OLD, lora_id="id").cached == (0, 63, 0)
        w.cache.on_adapter_loaded("id")
        stored = w.count("jobs", kind="store")
        job = w.submit(OLD, lora_id="id")
        assert w.match(job) == 0
        w.run(job)
        w.settle()
        assert w.count("jobs", kind="store") == stored, "the device may hold KV of the first content"
        assert w.ask(OTHER).cached == (0, 0, 0)
        assert w.count("jobs", kind="store") > stored, "others go on"
        assert w.flush()
        assert w.ask(OLD, lora_id="id").cached == (0, 0, 0)
        w.cache.on_adapter_loaded("id")
        assert w.flush()
        assert w.ask(OLD, lora_id="id").cached == (0, 63, 0), "the same content again changes nothing"
