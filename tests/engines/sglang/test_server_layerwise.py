"""The real server in IP mode: every load is awaited layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from tests.engines.sglang.server import (
    LAYERWISE,
    READY,
    WithoutChain,
    ask_after_flush,
    complaints,
    flags,
    prompt,
    verify,
)
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server


@pytest.fixture(scope="module", params=[1, 64], ids=["page 1", "page 64"])
def page(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path], page: int
) -> Iterator[ServerProcess]:
    options = ["--page-size", str(page), "--chunked-prefill-size", "128"]
    setup = Setup(tiny_llama, flags(write_chain(), *options), LAYERWISE)
    with start_server(setup) as running:
        yield running
        assert complaints(running) == []
        log = running.log_text()
        assert "LAYERWISE transfer request:" in log
        assert "H2D transfer request:" not in log


def test_the_ready_line_tells_the_mode(server: ServerProcess) -> None:
    (line,) = [line for line in server.log_text().splitlines() if READY in line]
    assert "layerwise=True, prefetch=True" in line


@pytest.mark.parametrize("length", [64, 65, 129, 300])
def test_a_restored_prompt_gives_the_same_tokens(server: ServerProcess, page: int, length: int) -> None:
    tokens = prompt(length, seed=length)
    fresh = ask(server, tokens)
    again = ask_after_flush(server, tokens)
    assert again.tier_tokens == again.cached_tokens == (length - 1) // page * page
    assert again.output_ids == fresh.output_ids


def test_several_loads_at_once(server: ServerProcess, page: int) -> None:
    """HS-5 on the real scheduler: requests that arrive together share passes."""
    prompts = [prompt(200 + n, seed=1000 + n) for n in range(6)]
    fresh = [ask(server, tokens).output_ids for tokens in prompts]
    server.client.flush()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda tokens: ask(server, tokens), prompts))
    assert [answer.output_ids for answer in answers] == fresh
    assert all(
        answer.cached_tokens == (len(tokens) - 1) // page * page
        for answer, tokens in zip(answers, prompts, strict=True)
    )


def test_verify(server: ServerProcess, page: int, without_chain: WithoutChain) -> None:
    """R155 in IP mode: tokens are those of a server without the chain, and there are hits."""
    found = verify(server, "test", without_chain.baseline)
    assert "Total mismatches: 0" in found.stdout, found.stdout + found.stderr
    if page == 1:  # the prompts of verify are shorter than a page of 64
        assert found.returncode == 0, found.stdout + found.stderr
