"""The border to the engine: a fault of ours switches the cache off; waiting has one budget a pass."""

from __future__ import annotations

import time

import pytest

from flexkv_core import EngineError

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from flexkv_sglang.connector import WaitBudget  # noqa: E402 - after the check above
from flexkv_sglang.handover import Loaded  # noqa: E402
from tests.support.sglang_world import cpu, world  # noqa: E402


def tokens(seed: int, length: int) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


@pytest.mark.parametrize("method", ["lookup_kv", "start_load_kv", "store_kv", "begin_pass"])
def test_a_fault_of_ours_ends_the_cache_and_not_the_scheduler(tmp_path, monkeypatch, caplog, method):
    with world(tmp_path, tiers=[cpu()]) as sgl:
        prompt = tokens(1, 100)
        sgl.ask(prompt)
        assert sgl.flush()
        monkeypatch.setattr(type(sgl.cache), "fails_open", True)

        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(sgl.cache.connector, method, broken)
        job = sgl.ask(prompt)
        assert job.cached is not None
        assert job.cached[1:] == ((99, 0) if method == "store_kv" else (0, 0))
        assert sgl.cache.is_broken
        assert "the cache is off, serving goes on" in caplog.text
        sgl.ask(tokens(2, 50))


def test_an_error_that_means_wrong_answers_is_not_swallowed(tmp_path, monkeypatch):
    with world(tmp_path, tiers=[cpu()]) as sgl:
        monkeypatch.setattr(type(sgl.cache), "fails_open", True)

        def fatal(*_: object, **__: object) -> None:
            raise EngineError("a restore failed on the device after its slots were used")

        monkeypatch.setattr(sgl.cache.connector, "begin_pass", fatal)
        with pytest.raises(EngineError):
            sgl.cache.check_hicache_events()


def test_a_short_load_is_no_load(tmp_path, caplog):
    """SGLang takes all that was promised or nothing: anything else ends its scheduler (HS-49)."""
    with world(tmp_path, tiers=[cpu()]) as sgl:
        prompt = tokens(1, 100)
        first = sgl.ask(prompt)
        assert sgl.flush()
        plain = sgl.cache.on_load_back

        def short(*args: object, **kwargs: object) -> object:
            found = plain(*args, **kwargs)
            return Loaded(found.node, found.slots[:-1]) if isinstance(found, Loaded) else found

        sgl.cache.on_load_back = short
        again = sgl.ask(prompt)
        assert again.cached == (0, 0, 0)
        assert again.req.output_ids == first.req.output_ids
        assert "loaded 98 of 99 promised tokens" in caplog.text


def test_all_who_wait_in_one_pass_share_one_budget():
    budget = WaitBudget(0.05)
    with budget.spending() as left:
        assert left == 0.05
        end = time.monotonic() + 0.06
        while time.monotonic() < end:
            pass
    with budget.spending() as left:
        assert left == 0.0
    budget.renew()
    with budget.spending() as left:
        assert left == 0.05
