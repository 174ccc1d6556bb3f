"""The real server in IP mode: every load is awaited layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from tests.engines.sglang.server import READY, ask_after_flush, complaints, flags, prompt
from tests.engines.sglang.test_server_verify import verify
from tests.support.server import OLDER, Setup, StartServer, ask

pytestmark = pytest.mark.server

SWITCH = {"FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1"}


@pytest.fixture(scope="module")
def baseline(
    start_server: StartServer, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """What a server without the chain says, for a page size."""

    def ask_plain(page: int) -> Path:
        file = tmp_path_factory.mktemp("baseline") / "baseline.json"
        with start_server(Setup(tiny_llama, ["--page-size", str(page)])) as plain:
            assert verify(plain, "baseline", file).returncode == 0
        return file

    return ask_plain


@pytest.fixture(scope="module", params=[1, 64], ids=["page 1", "page 64"])
def page(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path], page: int
) -> Iterator[ServerProcess]:
    options = ["--page-size", str(page), "--chunked-prefill-size", "128"]
    setup = Setup(tiny_llama, flags(write_chain(), *options), SWITCH)
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


def test_verify(server: ServerProcess, page: int, baseline: Callable[[int], Path]) -> None:
    """R155 in IP mode: tokens are those of a server without the chain, and there are hits."""
    file = baseline(page)
    found = verify(server, "test", file)
    assert "Total mismatches: 0" in found.stdout, found.stdout + found.stderr
    if page == 1:  # the prompts of verify are shorter than a page of 64
        assert found.returncode == 0, found.stdout + found.stderr


def test_an_older_sglang(
    start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path]
) -> None:
    setup = Setup(tiny_llama, flags(write_chain()), SWITCH, version=OLDER)
    with start_server(setup) as older:
        tokens = prompt(200, seed=5)
        fresh = ask(older, tokens)
        again = ask_after_flush(older, tokens)
        assert again.output_ids == fresh.output_ids
        assert again.tier_tokens == 199
        assert complaints(older) == []
        assert "LAYERWISE transfer request:" in older.log_text()
