"""The real SGLang while its weights change: nothing of the old ones is served, and hits come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._serving import Answer
from tests.engines.sglang.server import (
    WithoutChain,
    ask_after_flush,
    post,
    prompt,
    update_weights,
)
from tests.support.server import ask
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server


@dataclass
class Weights:
    """Two sets of weights, prompts, and what a fresh server, or one without the chain, answers."""

    folders: tuple[Path, Path]
    prompts: list[list[int]]
    answers: tuple[list[Answer], list[Answer]]


@pytest.fixture(scope="module")
def weights(
    chained: ServerProcess, without_chain: WithoutChain, tiny_llama: Path, other_llama: Path
) -> Iterator[Weights]:
    """Those that the server was started with come back at the end."""
    prompts, answers = without_chain.prompts, without_chain.answers
    first = [ask(chained, tokens) for tokens in prompts]
    assert [answer.output_ids for answer in first] != [answer.output_ids for answer in answers]
    yield Weights((tiny_llama, other_llama), prompts, (first, answers))
    assert update_weights(chained, tiny_llama)


def works(server: ServerProcess, tokens: Sequence[int], like: Answer) -> None:
    """Stored and served, and the answer is that of a fresh server of these weights."""
    assert ask(server, tokens).output_ids == like.output_ids
    again = ask_after_flush(server, tokens)
    assert again.by_tier == {"device": 0, "host": len(tokens) - 1}
    assert again.output_ids == like.output_ids


def test_an_update_while_requests_are_served(chained: ServerProcess, weights: Weights) -> None:
    """HS-11, R144: SGLang lets those that run end first."""
    tokens, old, new = weights.prompts[0], weights.answers[0][0], weights.answers[1][0]
    works(chained, tokens, old)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, chained, prompt(60, seed=74), 150)
        assert update_weights(chained, weights.folders[1])
        assert len(running.result().output_ids) == 150
    first = ask(chained, tokens)
    assert first.cached_tokens == 0
    assert first.output_ids == new.output_ids
    works(chained, tokens, new)


def test_an_update_that_fails(chained: ServerProcess, weights: Weights, tmp_path: Path) -> None:
    """SGLang flushes nothing then; the adapter asks it to, and the cache works again by itself."""
    assert update_weights(chained, weights.folders[1])
    tokens, like = weights.prompts[1], weights.answers[1][1]
    works(chained, tokens, like)
    assert not update_weights(chained, tmp_path / "no-such-model")
    assert "update_weights_from_disk has failed" in chained.log_text()
    again = ask(chained, tokens)
    assert again.cached_tokens == 0, "the device is flushed, and the tiers are invalidated"
    assert again.output_ids == like.output_ids
    works(chained, tokens, like)


def test_an_update_that_keeps_the_device(chained: ServerProcess, weights: Weights) -> None:
    """The caller wants it so; the tiers store and serve nothing until the next flush."""
    assert update_weights(chained, weights.folders[1])
    tokens = weights.prompts[2]
    works(chained, tokens, weights.answers[1][2])
    assert update_weights(chained, weights.folders[0], flush_cache=False)
    assert ask(chained, prompt(50, seed=75)).cached_tokens == 0
    assert ask_after_flush(chained, prompt(50, seed=75)).cached_tokens == 0, "it was not stored"
    first = ask_after_flush(chained, tokens)
    assert first.cached_tokens == 0
    works(chained, tokens, weights.answers[0][2])


def test_a_session_of_updates(chained: ServerProcess, weights: Weights) -> None:
    """From 0.5.21: weights may be written from outside between begin and end; then somebody flushes."""
    assert update_weights(chained, weights.folders[0])
    tokens, like = weights.prompts[0], weights.answers[0][0]
    works(chained, tokens, like)
    assert post(chained, "/begin_weight_update")["success"]
    assert not post(chained, "/begin_weight_update")["success"], "one is open already"
    assert ask_after_flush(chained, tokens).cached_tokens == 0
    assert ask_after_flush(chained, tokens).cached_tokens == 0, "nothing is stored while it is open"
    assert post(chained, "/end_weight_update")["success"]
    chained.client.flush()
    wait_until(lambda: ask_after_flush(chained, tokens).tier_tokens == len(tokens) - 1, "hits come back")
    works(chained, tokens, like)
