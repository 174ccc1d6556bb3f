"""The real SGLang 0.5.23, page size 1: what comes back, from where, and that it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.errors import EngineError
from tests.engines.sglang.server import (
    READY,
    ask_after_flush,
    complaints,
    flags,
    prompt,
    wait_until_steady,
)
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server


@dataclass
class Served:
    """A server, and what another one over the same chain needs."""

    server: ServerProcess
    setup: Setup
    disk: Path


@pytest.fixture(scope="module")
def served(
    start_server: StartServer,
    tiny_llama: Path,
    write_chain: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    disk = tmp_path_factory.mktemp("disk")
    setup = Setup(tiny_llama, flags(write_chain(disk=disk)))
    with start_server(setup) as server:
        yield Served(server, setup, disk)
        assert complaints(server) == []


def test_the_seeds_quick_start(served: Served) -> None:
    tokens = prompt(5, seed=1)
    fresh = ask(served.server, tokens)
    assert fresh.cached_tokens == 0
    again = ask_after_flush(served.server, tokens)
    assert again.cached_tokens == 4
    assert again.by_tier == {"device": 0, "host": 4}
    assert again.output_ids == fresh.output_ids
    assert READY in served.server.log_text()


def test_device_before_host(served: Served) -> None:
    tokens = prompt(64, seed=2)
    fresh = ask(served.server, tokens)
    device = ask(served.server, tokens)
    assert device.by_tier == {"device": 63, "host": 0}
    host = ask_after_flush(served.server, tokens)
    assert host.by_tier == {"device": 0, "host": 63}
    assert fresh.output_ids == device.output_ids == host.output_ids


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_lengths_about_a_block(served: Served, length: int) -> None:
    tokens = prompt(length, seed=1000 + length)
    fresh = ask(served.server, tokens)
    again = ask_after_flush(served.server, tokens)
    assert again.tier_tokens == again.cached_tokens == length - 1
    assert again.output_ids == fresh.output_ids


@pytest.mark.parametrize("shared", [1, 50, 64, 100])
def test_a_shared_prefix_hits_inside_a_block(served: Served, shared: int) -> None:
    stem = prompt(130, seed=3000 + shared)
    ask(served.server, stem)
    tokens = stem[:shared] + prompt(40, seed=4000 + shared)
    cold = ask_after_flush(served.server, tokens, extra_key="reference")
    assert cold.cached_tokens == 0
    warm = ask_after_flush(served.server, tokens)
    assert warm.by_tier == {"device": 0, "host": shared}
    assert warm.output_ids == cold.output_ids


def test_what_was_generated_is_cached_too(served: Served) -> None:
    tokens = prompt(40, seed=5)
    fresh = ask(served.server, tokens, new=30)
    longer = [*tokens, *fresh.output_ids, 7]
    again = ask_after_flush(served.server, longer)
    # The last generated token was never an input, so it has no KV.
    assert again.by_tier == {"device": 0, "host": 40 + 29}


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_namespaces_never_mix(served: Served, field: str) -> None:
    tokens = prompt(80, seed=10 + len(field))
    fresh = ask(served.server, tokens, **{field: "tenant-a"})
    for other in ({}, {field: "tenant-b"}, {"extra_key": "x", "cache_salt": "y"}):
        stranger = ask_after_flush(served.server, tokens, **other)
        assert stranger.cached_tokens == 0, other
        assert stranger.output_ids == fresh.output_ids
    own = ask_after_flush(served.server, tokens, **{field: "tenant-a"})
    assert own.tier_tokens == 79


def test_an_empty_prompt_is_refused_and_survived(served: Served) -> None:
    """Ids outside the vocabulary are not tried: a plain SGLang on a CPU dies of them as well."""
    with pytest.raises(EngineError, match="empty"):
        ask(served.server, [])
    assert served.server.is_alive()
    assert len(ask_after_flush(served.server, prompt(20, seed=6)).output_ids) == 8


def test_restart_and_crash_leave_the_disk_warm(
    served: Served, start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path]
) -> None:
    disk = served.disk.parent / f"{served.disk.name}-restarted"
    setup = Setup(tiny_llama, flags(write_chain(disk=disk)))
    tokens, late = prompt(150, seed=7), prompt(70, seed=8)
    with start_server(setup) as first:
        fresh = ask(first, tokens)
        first.stop()
        assert complaints(first) == []
    with start_server(setup) as second:
        warm = ask(second, tokens)
        assert warm.by_tier == {"device": 0, "host": 0, "storage": 149}
        assert warm.output_ids == fresh.output_ids
        promoted = ask_after_flush(second, tokens)
        assert promoted.by_tier == {"device": 0, "host": 149}
        fresh_late = ask_after_flush(second, late)
        second.client.flush()
        wait_until_steady(disk)
        second.kill()
    with start_server(setup) as third:
        for prompt_tokens, expected in ((tokens, fresh), (late, fresh_late)):
            warm = ask(third, prompt_tokens)
            assert warm.by_tier == {"device": 0, "host": 0, "storage": len(prompt_tokens) - 1}
            assert warm.output_ids == expected.output_ids
        assert complaints(third) == []
