"""The real SGLang while its weights change: nothing of the old ones is served, and hits come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._serving import Answer
from tests.engines.sglang.server import ask_after_flush, complaints, flags, post, prompt, wait_for
from tests.support.models import write_tiny_model
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server

PROMPTS = [prompt(100, seed=71), prompt(130, seed=72), prompt(90, seed=73)]


@dataclass
class Weights:
    """Two sets of weights, and what a server that was started with each answers."""

    folders: tuple[Path, Path]
    answers: tuple[list[Answer], list[Answer]]


@pytest.fixture(scope="module")
def other(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    """Weights that no server of ours was started with, and their answers."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "other", "llama", seed=5)
    with start_server(Setup(folder)) as plain:
        return folder, [ask(plain, tokens) for tokens in PROMPTS]


@pytest.fixture(scope="module")
def server(
    other: object, start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path]
) -> Iterator[ServerProcess]:
    """Started once the other one has ended."""
    with start_server(Setup(tiny_llama, flags(write_chain()))) as running:
        yield running
        assert complaints(running) == []


@pytest.fixture(scope="module")
def weights(server: ServerProcess, other: tuple[Path, list[Answer]], tiny_llama: Path) -> Weights:
    folder, answers = other
    first = [ask(server, tokens) for tokens in PROMPTS]
    assert [answer.output_ids for answer in first] != [answer.output_ids for answer in answers]
    return Weights((tiny_llama, folder), (first, answers))


def update(server: ServerProcess, folder: Path, **fields: object) -> bool:
    return bool(post(server, "/update_weights_from_disk", model_path=str(folder), **fields)["success"])


def works(server: ServerProcess, tokens: Sequence[int], like: Answer) -> None:
    """Stored and served, and the answer is that of a fresh server of these weights."""
    assert ask(server, tokens).output_ids == like.output_ids
    again = ask_after_flush(server, tokens)
    assert again.by_tier == {"device": 0, "host": len(tokens) - 1}
    assert again.output_ids == like.output_ids


def test_an_update_while_requests_are_served(server: ServerProcess, weights: Weights) -> None:
    """HS-11, R144: SGLang lets those that run end first."""
    tokens, old, new = PROMPTS[0], weights.answers[0][0], weights.answers[1][0]
    works(server, tokens, old)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, server, prompt(60, seed=74), 150)
        assert update(server, weights.folders[1])
        assert len(running.result().output_ids) == 150
    first = ask(server, tokens)
    assert first.cached_tokens == 0
    assert first.output_ids == new.output_ids
    works(server, tokens, new)


def test_an_update_that_fails(server: ServerProcess, weights: Weights, tmp_path: Path) -> None:
    """SGLang flushes nothing then; the adapter asks it to, and the cache works again by itself."""
    assert update(server, weights.folders[1])
    tokens, like = PROMPTS[1], weights.answers[1][1]
    works(server, tokens, like)
    assert not update(server, tmp_path / "no-such-model")
    assert "update_weights_from_disk has failed" in server.log_text()
    again = ask(server, tokens)
    assert again.cached_tokens == 0, "the device is flushed, and the tiers are invalidated"
    assert again.output_ids == like.output_ids
    works(server, tokens, like)


def test_an_update_that_keeps_the_device(server: ServerProcess, weights: Weights) -> None:
    """The caller wants it so; the tiers store and serve nothing until the next flush."""
    assert update(server, weights.folders[1])
    tokens = PROMPTS[2]
    works(server, tokens, weights.answers[1][2])
    assert update(server, weights.folders[0], flush_cache=False)
    assert ask(server, prompt(50, seed=75)).cached_tokens == 0
    assert ask_after_flush(server, prompt(50, seed=75)).cached_tokens == 0, "it was not stored"
    first = ask_after_flush(server, tokens)
    assert first.cached_tokens == 0
    works(server, tokens, weights.answers[0][2])


def test_a_session_of_updates(server: ServerProcess, weights: Weights) -> None:
    """From 0.5.21: weights may be written from outside between begin and end; then somebody flushes."""
    assert update(server, weights.folders[0])
    tokens, like = PROMPTS[0], weights.answers[0][0]
    works(server, tokens, like)
    assert post(server, "/begin_weight_update")["success"]
    assert not post(server, "/begin_weight_update")["success"], "one is open already"
    assert ask_after_flush(server, tokens).cached_tokens == 0
    assert ask_after_flush(server, tokens).cached_tokens == 0, "nothing is stored while it is open"
    assert post(server, "/end_weight_update")["success"]
    server.client.flush()
    wait_for(lambda: ask_after_flush(server, tokens).tier_tokens == len(tokens) - 1, "hits come back")
    works(server, tokens, like)
