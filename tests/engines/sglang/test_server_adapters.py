"""The real SGLang with two LoRA adapters and the base model: each finds its own, and only its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._serving import Answer
from tests.engines.sglang.server import ask_after_flush, complaints, flags, post, prompt
from tests.support.models import write_tiny_adapter
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server

WHO: list[dict[str, Any]] = [{}, {"lora_path": "a"}, {"lora_path": "b"}]
LORA = ("--lora-backend", "torch_native", "--max-loras-per-batch", "3")


@dataclass
class Served:
    """A server, and the folder of its adapters."""

    server: ServerProcess
    adapters: Path

    def reload(self, name: str, seed: int) -> None:
        """Put other weights into an adapter's folder, and load it again under its name."""
        assert post(self.server, "/unload_lora_adapter", lora_name=name)["success"]
        folder = write_tiny_adapter(self.adapters / name, seed)
        assert post(self.server, "/load_lora_adapter", lora_name=name, lora_path=str(folder))["success"]


@pytest.fixture(scope="module")
def served(
    start_server: StartServer,
    tiny_llama: Path,
    write_chain: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [f"{name}={write_tiny_adapter(folder / name, seed)}" for seed, name in enumerate("ab")]
    options = flags(write_chain(), *LORA, "--lora-paths", *paths)
    with start_server(Setup(tiny_llama, options, {"FLEXKV_TEST_UNPINNED": "1"})) as server:
        yield Served(server, folder)
        assert complaints(server) == []


def hits(served: Served, tokens: list[int], who: dict[str, Any], like: Answer) -> None:
    """All of the prompt comes from the host, and the answer is the same."""
    again = ask_after_flush(served.server, tokens, **who)
    assert again.by_tier == {"device": 0, "host": len(tokens) - 1}, who
    assert again.output_ids == like.output_ids


def test_adapters_and_the_base_never_mix(served: Served) -> None:
    """HS-12: the same prompt, three times KV."""
    tokens = prompt(100, seed=81)
    fresh = [ask_after_flush(served.server, tokens, **who) for who in WHO]
    assert [answer.cached_tokens for answer in fresh] == [0, 0, 0]
    assert len({answer.output_ids for answer in fresh}) == 3, "the adapters change nothing"
    for who, answer in zip(WHO, fresh, strict=True):
        hits(served, tokens, who, answer)


def test_an_adapter_and_a_salt(served: Served) -> None:
    tokens = prompt(80, seed=82)
    both = {"lora_path": "a", "cache_salt": "tenant"}
    fresh = ask(served.server, tokens, **both)
    for other in ({"lora_path": "a"}, {"cache_salt": "tenant"}, {"lora_path": "b", "cache_salt": "tenant"}):
        assert ask_after_flush(served.server, tokens, **other).cached_tokens == 0, other
    hits(served, tokens, both, fresh)


def test_other_weights_under_the_same_name(served: Served) -> None:
    tokens = prompt(90, seed=83)
    first, other = (ask(served.server, tokens, **who) for who in WHO[1:])
    served.reload("a", seed=7)
    changed = ask(served.server, tokens, **WHO[1])
    assert changed.cached_tokens == 0
    assert changed.output_ids != first.output_ids
    hits(served, tokens, WHO[1], changed)
    hits(served, tokens, WHO[2], other)
    served.reload("a", seed=0)
    hits(served, tokens, WHO[1], first)  # the same bytes as at first are the same adapter
