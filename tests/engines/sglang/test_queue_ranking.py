"""A queue that SGLang ranks by what is cached: each pass asks for whole prompts, then for a token less."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from sglang.srt.managers.schedule_policy import CacheAwarePolicy, SchedulePolicy

from flexkv_core.keys import BlockChain
from tests.support.sglang_world import Job, SglangWorld, cpu, ssd, world

POLICIES = [policy.value for policy in CacheAwarePolicy]
TOKENS = range(49)


def rank(w: SglangWorld, policy: str, *jobs: Job) -> None:
    """One pass: the queue is ranked, and then each request is asked for."""
    SchedulePolicy(policy, w.cache, False, False, False).calc_priority([job.req for job in jobs])
    for job in jobs:
        w.match(job)


def put_below(w: SglangWorld) -> None:
    """Leave a prompt on the disk only."""
    w.ask(TOKENS, outputs=1)
    assert w.flush()
    w.chain._parts.capacity.evict(w.chain.links[0], 10_000, is_final=True)
    w.settle()


@pytest.fixture
def below(tmp_path: Path) -> Iterator[SglangWorld]:
    with world(tmp_path, tiers=[cpu(), ssd(tmp_path / "disk")], engine={"prefetch": True}) as w:
        put_below(w)
        yield w


@pytest.mark.parametrize("policy", POLICIES)
def test_where_tokens_came_from_is_not_forgotten(below: SglangWorld, policy: str) -> None:
    """By the time that it is admitted, a prefetch has brought them to the host."""
    job = below.submit(TOKENS)
    rank(below, policy, job)
    below.settle()
    rank(below, policy, job)
    below.run(job)
    assert job.cached == (0, 0, 48)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_prompt_is_read_and_prefetched_once(below: SglangWorld, policy: str, monkeypatch: Any) -> None:
    read: list[int] = []
    asked: list[int] = []
    sequence, prefetch = below.manager.sequence, below.manager.prefetch_async

    def counted(tokens: Any, *args: Any) -> BlockChain:
        if not isinstance(tokens, BlockChain):
            read.append(len(tokens))
        made: BlockChain = sequence(tokens, *args)
        return made

    def prefetched(*args: Any, **kwargs: Any) -> int:
        asked.append(1)
        return int(prefetch(*args, **kwargs))

    monkeypatch.setattr(below.manager, "sequence", counted)
    monkeypatch.setattr(below.manager, "prefetch_async", prefetched)
    job = below.submit(TOKENS)
    for _ in range(5):
        rank(below, policy, job)
    assert (read, asked) == ([49], [1])
    below.run(job)
    assert sum(job.cached or ()) == 48


@pytest.mark.parametrize("policy", POLICIES)
def test_that_it_is_computed_is_told_once(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = ssd(tmp_path / "disk", load_or_recompute="auto")
    with world(tmp_path, tiers=[cpu(), disk], engine={"prefill_tokens_per_s": 1e9}) as w:
        put_below(w)
        w.ask(TOKENS)  # so that the disk's speed is known
        assert w.flush()
        w.chain._parts.capacity.evict(w.chain.links[0], 10_000, is_final=True)
        w.settle()
        caplog.clear()
        job = w.submit(TOKENS, rid="ranked")
        with caplog.at_level(logging.DEBUG, logger="flexkv_sglang"):
            for _ in range(5):
                rank(w, policy, job)
        assert caplog.text.count("status=recompute") == 1
        w.run(job)


@pytest.mark.parametrize(("start", "served"), [(0, 0), (20, 20), (-1, 48)])
def test_tokens_whose_logprobs_are_asked_for_are_computed(
    below: SglangWorld, start: int, served: int
) -> None:
    """Whatever the ranking was promised, which does not know of it."""
    job = below.submit(TOKENS, return_logprob=True)
    job.req.logprob_start_len = start
    rank(below, "lpm", job)
    below.run(job)
    assert sum(job.cached or ()) == served
