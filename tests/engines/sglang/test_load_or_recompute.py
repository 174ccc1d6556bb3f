"""Load or recompute, and prefetches that are given up, as the scheduler sees them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from flexkv_core.cli._receipt_lines import read_log
from flexkv_core.testing import FakeClock, Fault, FaultKind
from flexkv_sglang.prefill import PrefillTimes
from tests.support.sglang_world import FAULTY, SglangWorld, cpu, ssd, world

AUTO = {"load_or_recompute": "auto"}


def put_below(w: SglangWorld, *prompts: range) -> None:
    """Serve prompts, and leave them on the disk only."""
    for tokens in prompts:
        w.ask(tokens, outputs=1)
    assert w.flush()
    w.chain._parts.capacity.evict(w.chain.links[0], 10_000, is_final=True)
    w.settle()


@pytest.mark.parametrize(("tokens_per_s", "served"), [(1e9, 0), (0.001, 48)])
@pytest.mark.parametrize("prefetch", [True, False])
def test_the_faster_way_is_taken_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokens_per_s: float, served: int, prefetch: bool
) -> None:
    engine = {"prefill_tokens_per_s": tokens_per_s, "prefetch": prefetch}
    with world(tmp_path, tiers=[cpu(), ssd(tmp_path / "disk", **AUTO)], engine=engine) as w:
        put_below(w, range(49), range(1000, 1049))
        w.ask(range(1000, 1049))  # so that the disk's speed is known
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="flexkv_sglang"):
            job = w.ask(range(49), rid="asked")
        host, storage = job.cached[1:]
        assert host + storage == served
        choices = read_log(caplog.text.splitlines()).choices
        action = "load" if served else "recompute"
        assert ("asked", action) in choices, choices
        choice = choices["asked", action]
        assert (choice.tier, choice.facts["tokens"]) == ("disk", "48")
        assert choice.facts["why"] == ("sooner" if served else "slower")
        assert w.count("promises_broken") == 0


@pytest.mark.parametrize("waits", [False, True])
def test_a_pass_that_waits_for_a_copy_tells_nothing_of_computing(tmp_path: Path, waits: bool) -> None:
    with world(tmp_path, tiers=[cpu(), ssd(tmp_path / "disk", **AUTO)]) as w:
        told: list[int] = []
        w.manager.note_prefill = lambda num_tokens, _seconds: told.append(num_tokens)
        if waits:
            w.cache._ordered.entries.append((1, None))
        w.cache.on_pass_begins(100)
        w.cache._ordered.entries.clear()
        w.cache.on_pass_ends()
        assert told == ([] if waits else [100])


def test_a_decision_is_told_once_however_often_a_request_is_ranked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world(
        tmp_path, tiers=[cpu(), ssd(tmp_path / "disk", **AUTO)], engine={"prefill_tokens_per_s": 1e9}
    ) as w:
        put_below(w, range(49), range(1000, 1049))
        w.ask(range(1000, 1049))
        job = w.submit(range(49), rid="asked")
        with caplog.at_level(logging.DEBUG, logger="flexkv_sglang"):
            for _ in range(5):
                assert w.match(job) == 0
        assert caplog.text.count("status=recompute") == 1
        assert w.count("jobs", kind="load", status="recompute") == 1
        w.run(job)


def test_the_adapter_tells_how_fast_the_engine_is(tmp_path: Path) -> None:
    with world(tmp_path, tiers=[cpu(), ssd(tmp_path / "disk", **AUTO)]) as w:
        assert w.cache.times_prefill
        w.cache._prefill = PrefillTimes(clock := FakeClock())
        for tokens in (1000, 0, 3000):
            w.cache.on_pass_begins(tokens)
            clock.advance(0.01 + tokens / 2000)
            w.cache.on_pass_ends()
        assert w.chain.weighing.tokens_per_s == pytest.approx(2000)
    for tiers, engine in (([cpu()], {}), ([cpu()], {"prefill_tokens_per_s": 5.0})):
        with world(tmp_path, tiers=tiers, engine=engine) as w:
            assert not w.cache.times_prefill, "nobody asks"


def test_passes_that_overlap_are_timed_from_the_end_of_the_one_before() -> None:
    times = PrefillTimes(clock := FakeClock())
    times.begins(100)
    clock.advance(1.0)
    times.begins(200)
    clock.advance(1.0)
    assert times.ends() == (100, 2.0)
    clock.advance(3.0)
    assert times.ends() == (200, 3.0)
    assert times.ends() is None
    times.begins(0)
    assert times.ends() is None
    for _ in range(20):
        times.begins(7)  # launches that raised
    assert [times.ends() for _ in range(5)][-1] is None


def test_what_is_prefetched_for_a_request_that_goes_away_is_not_read(tmp_path: Path) -> None:
    with world(
        tmp_path,
        tiers=[cpu(), ssd(tmp_path / "disk", load_threads=1)],
        wrap=FAULTY,
        size=1024,
    ) as w:
        put_below(w, range(400))
        w.disk.calls.clear()
        w.disk.add("load", Fault(FaultKind.HANG))
        job = w.submit(range(400))
        assert w.match(job) > 300
        w.wait_hanging()
        w.abort(job)
        w.release()
        w.settle()
        assert [count for operation, count in w.disk.calls if operation == "load"] == [8]
        assert w.count("jobs", kind="prefetch", status="cancelled") == 1
