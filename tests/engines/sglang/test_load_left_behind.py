"""A request that is admitted without the load that was begun for it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from flexkv_core.testing import Fault, FaultKind
from tests.support.sglang_world import FAULTY, cpu, ssd, world

TOKENS = range(100)


@pytest.mark.parametrize("page", [1, 16])
def test_a_request_that_runs_holds_nothing_of_a_load_that_it_did_not_need(tmp_path: Path, page: int) -> None:
    """Somebody else has computed its prompt meanwhile: for all of its answer nothing is kept for it."""
    disk = ssd(tmp_path / "disk")
    with world(tmp_path, tiers=[cpu(), disk], page=page) as w:
        w.ask(TOKENS, outputs=1)
    engine = {"load_wait_s": 0.002, "prefetch": False}
    with world(tmp_path, tiers=[cpu(), disk], wrap=FAULTY, engine=engine, page=page) as w:
        w.disk.always("load", Fault(FaultKind.HANG))
        waiting = w.submit(TOKENS, outputs=200)
        w.run(until=lambda: w.disk.num_hanging)
        computed = w.submit(TOKENS, return_logprob=True)
        computed.req.logprob_start_len = 0
        w.run(computed)
        w.run(until=lambda: len(waiting.req.output_ids) > 2)
        assert waiting not in w.finished
        assert not w.cache._loads.open
        w.release()
        w.settle()
        assert w.chain.index.num_pins == 0
        w.run()
