"""Allocation does not fail because of stores: who needs a slot that one still reads waits for it (R71)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from flexkv_sglang.connector import WaitBudget
from tests.support.sglang_world import Job, SglangWorld, world

SIZE = 320


def beside_a_store(w: SglangWorld, *, num_running: int) -> list[Job]:
    """Requests that need almost all slots in the end, and a store under way that locks some of them."""
    prompt = 96 // num_running
    jobs = [
        w.submit(range(1000 * n, 1000 * n + prompt), outputs=192 // num_running) for n in range(num_running)
    ]
    w.run(until=lambda: all(len(job.req.output_ids) > 1 for job in jobs))
    w.settle()
    w.transfer.holds_stores = True
    w.run(w.submit(range(5000, 5050), outputs=1))
    assert w.cache._stores.open
    return jobs


CASES = pytest.mark.parametrize(("page", "num_running"), [(1, 1), (16, 1), (1, 2)])


@pytest.fixture
def tight(tmp_path: Path, page: int) -> Iterator[SglangWorld]:
    with world(tmp_path, page=page, size=SIZE, engine={"load_wait_s": 0.001}) as w:
        yield w


@CASES
def test_a_store_that_ends_soon_costs_nobody_his_answer(
    tight: SglangWorld, num_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang retracts requests for want of slots, and aborts the last one."""
    jobs = beside_a_store(tight, num_running=num_running)
    wait, waits = tight.cache.connector.wait_over, []

    def wait_over(task: int, timeout_s: float | None = None) -> Any:
        waits.append(timeout_s)
        tight.transfer.holds_stores = False
        return wait(task, 60.0)

    monkeypatch.setattr(tight.cache.connector, "wait_over", wait_over)
    tight.run(*jobs)
    assert waits, "there was room enough"
    assert all(len(job.req.output_ids) == 192 // num_running for job in jobs)
    assert all(job.req.retraction_count == 0 for job in jobs)


@CASES
def test_a_store_that_hangs_holds_up_nobody_for_long(
    tight: SglangWorld, num_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tight.cache, "_last_hope", WaitBudget(0.01))
    jobs = beside_a_store(tight, num_running=num_running)
    tight.run(until=lambda: any(job in tight.finished or job.req.retraction_count for job in jobs))
    tight.transfer.holds_stores = False
    tight.run()


@pytest.mark.parametrize("page", [16])
def test_a_pass_that_lacks_nothing_waits_for_no_store(
    tight: SglangWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pages are long, allocation asks for one in each pass; only at the end of a page is it needed."""
    monkeypatch.setattr(tight.cache, "_last_hope", WaitBudget(0.01))
    (job,) = beside_a_store(tight, num_running=1)
    waits = tight.waits()
    tight.run(until=lambda: job in tight.finished)
    assert 0 < len(waits) <= 3, "once, where SGLang would abort"
    tight.transfer.holds_stores = False
    tight.run()
