"""The debug mode that poisons slots: nothing stored carries poison, and what would is found and not kept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.sglang_quiet", reason="sglang is not installed (make setup)")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from flexkv_core import PassedFence
from tests.support.sglang_world import cpu, world

SEED = 20
POISON = {"debug_poison": True}


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("layerwise", [False, True], ids=["MP", "IP"])
def test_poison_is_never_stored(tmp_path: Path, page: int, layerwise: bool) -> None:
    """Rounds of store, evict and restore while other requests decode; the passes look at every byte."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    engine: dict[str, Any] = POISON | {"layerwise": layerwise}
    with world(
        tmp_path, page=page, engine=engine, overlap=True, size=512, tiers=[cpu(capacity="64KiB")]
    ) as w:
        stems = [range(at, at + 100) for at in (0, 200, 400)]
        for turn in range(60):
            stem = rng.choice(stems)
            w.submit([*stem[: rng.randint(5, 100)], 900 + turn], outputs=rng.randint(1, 6))
            w.step()
            if rng.random() < 0.3:
                w.settle()  # or the stores that run would keep all of it from being evicted
                w.cache.evict(EvictParams(num_tokens=rng.randint(1, w.size)))
        w.run()
        w.settle()  # or they may have all host slots
        w.ask(stems[0])
        assert w.flush()
        w.ask(stems[0])  # a restore for certain: in the rounds the stores may have come too late for any
        assert w.count("tokens", kind="load") > 0
        assert w.count("poison_checked_stores") > 20
        assert w.count("poison_found") == 0


def test_a_store_of_poison_is_found_and_not_kept(tmp_path: Path) -> None:
    """HS-1 without its cure: the last slot of the request is read before the pass that writes it."""
    with world(tmp_path, overlap=True, engine=POISON) as w:
        w.transfer._fence = PassedFence
        w.stream.lags = True
        job = w.submit(range(40), outputs=8, stop_after=3)
        w.run(job)
        assert w.stream.done < w.stream.queued
        w.settle()
        assert w.count("poison_found") > 0
        assert w.count("jobs", kind="store", status="failed") > 0
        w.stream.run()
        w.results.clear()
        w.stream.lags = False
        assert w.flush()
        turn = w.submit([*job.tokens, 5, 6])
        w.run(turn)  # the pass looks at what was restored
        assert turn.cached is not None
        assert sum(turn.cached) < 43
