"""The real SGLang 0.5.23, page size 1: what comes back, from where, and that it is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.errors import EngineError
from tests.engines.sglang.server import (
    READY,
    WithoutChain,
    ask_after_flush,
    complaints,
    flags,
    prompt,
    verify,
    wait_for_blocks,
)
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server


def test_the_seeds_quick_start(chained: ServerProcess) -> None:
    tokens = prompt(5, seed=1)
    fresh = ask(chained, tokens)
    assert fresh.cached_tokens == 0
    again = ask_after_flush(chained, tokens)
    assert again.cached_tokens == 4
    assert again.by_tier == {"device": 0, "host": 4}
    assert again.output_ids == fresh.output_ids
    assert READY in chained.log_text()


def test_device_before_host(chained: ServerProcess) -> None:
    tokens = prompt(64, seed=2)
    fresh = ask(chained, tokens)
    device = ask(chained, tokens)
    assert device.by_tier == {"device": 63, "host": 0}
    host = ask_after_flush(chained, tokens)
    assert host.by_tier == {"device": 0, "host": 63}
    assert fresh.output_ids == device.output_ids == host.output_ids


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_lengths_about_a_block(chained: ServerProcess, length: int) -> None:
    tokens = prompt(length, seed=1000 + length)
    fresh = ask(chained, tokens)
    again = ask_after_flush(chained, tokens)
    assert again.tier_tokens == again.cached_tokens == length - 1
    assert again.output_ids == fresh.output_ids


@pytest.mark.parametrize("shared", [1, 50, 64, 100])
def test_a_shared_prefix_hits_inside_a_block(chained: ServerProcess, shared: int) -> None:
    stem = prompt(130, seed=3000 + shared)
    ask(chained, stem)
    tokens = stem[:shared] + prompt(40, seed=4000 + shared)
    cold = ask_after_flush(chained, tokens, extra_key="reference")
    assert cold.cached_tokens == 0
    warm = ask_after_flush(chained, tokens)
    assert warm.by_tier == {"device": 0, "host": shared}
    assert warm.output_ids == cold.output_ids


def test_what_was_generated_is_cached_too(chained: ServerProcess) -> None:
    tokens = prompt(40, seed=5)
    fresh = ask(chained, tokens, new=30)
    longer = [*tokens, *fresh.output_ids, 7]
    again = ask_after_flush(chained, longer)
    # The last generated token was never an input, so it has no KV.
    assert again.by_tier == {"device": 0, "host": 40 + 29}


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_namespaces_never_mix(chained: ServerProcess, field: str) -> None:
    tokens = prompt(80, seed=10 + len(field))
    fresh = ask(chained, tokens, **{field: "tenant-a"})
    for other in ({}, {field: "tenant-b"}, {"extra_key": "x", "cache_salt": "y"}):
        stranger = ask_after_flush(chained, tokens, **other)
        assert stranger.cached_tokens == 0, other
        assert stranger.output_ids == fresh.output_ids
    own = ask_after_flush(chained, tokens, **{field: "tenant-a"})
    assert own.tier_tokens == 79


def test_an_empty_prompt_is_refused_and_survived(chained: ServerProcess) -> None:
    """Ids outside the vocabulary are not tried: a plain SGLang on a CPU dies of them as well."""
    with pytest.raises(EngineError, match="empty"):
        ask(chained, [])
    assert chained.is_alive()
    assert len(ask_after_flush(chained, prompt(20, seed=6)).output_ids) == 8


def test_verify(chained: ServerProcess, without_chain: WithoutChain) -> None:
    """``flexkv verify`` from end to end: a server without the chain, then one with it."""
    without = without_chain.verified
    assert without.returncode == 1, "a server without the chain has no hit to show"
    assert "MISSING HIT" in without.stdout
    assert without.stdout.splitlines()[-1] == "Total mismatches: 0"
    with_chain = verify(chained, "test", without_chain.baseline)
    assert with_chain.returncode == 0, with_chain.stdout + with_chain.stderr
    assert "cached 23/24 (96%) {'device': 0, 'host': 23}" in with_chain.stdout


def test_a_crash_leaves_the_disk_warm(
    start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path], tmp_path: Path
) -> None:
    """After an orderly end it is, too: see the older SGLang's test, and the demonstration's."""
    setup = Setup(tiny_llama, flags(write_chain(disk=tmp_path / "disk")))
    tokens = prompt(150, seed=7)
    with start_server(setup) as first:
        fresh = ask(first, tokens)
        wait_for_blocks(tmp_path / "disk", 3)
        first.kill()
    with start_server(setup) as second:
        warm = ask(second, tokens)
        assert warm.by_tier == {"device": 0, "host": 0, "storage": 149}
        assert warm.output_ids == fresh.output_ids
        promoted = ask_after_flush(second, tokens)
        assert promoted.by_tier == {"device": 0, "host": 149}
        assert promoted.output_ids == fresh.output_ids
        assert complaints(second) == []
