"""Qwen3 at page size 16 with prompts prefilled in chunks, switched on by ``--enable-flexkv`` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from tests.engines.sglang.server import READY, ask_after_flush, complaints, prompt
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server

PAGE = 16


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, tiny_qwen3: Path, write_chain: Callable[..., Path]
) -> Iterator[ServerProcess]:
    options = ["--page-size", str(PAGE), "--chunked-prefill-size", "32"]
    setup = Setup(tiny_qwen3, ["--enable-flexkv", "--flexkv-config-file", str(write_chain()), *options])
    with start_server(setup) as running:
        yield running
        assert complaints(running) == []


def test_it_is_the_same_backend(server: ServerProcess) -> None:
    assert READY in server.log_text()


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 63, 64, 65, 200])
def test_whole_pages_come_back(server: ServerProcess, length: int) -> None:
    tokens = prompt(length, seed=length)
    fresh = ask(server, tokens)
    again = ask_after_flush(server, tokens)
    assert again.tier_tokens == again.cached_tokens == (length - 1) // PAGE * PAGE
    assert again.output_ids == fresh.output_ids


def test_a_shared_prefix_ends_at_a_page(server: ServerProcess) -> None:
    stem = prompt(100, seed=1)
    ask(server, stem)
    tokens = stem[:75] + prompt(20, seed=2)
    cold = ask_after_flush(server, tokens, extra_key="reference")
    warm = ask_after_flush(server, tokens)
    assert warm.by_tier == {"device": 0, "host": 64}
    assert warm.output_ids == cold.output_ids
