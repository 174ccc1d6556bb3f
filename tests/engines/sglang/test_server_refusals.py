"""A server whose options cannot be served does not start, and says which option it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv_core.errors import EngineError
from tests.engines.sglang.server import flags
from tests.support.models import write_tiny_model
from tests.support.server import Setup, StartServer

pytestmark = pytest.mark.server


def test_an_incompatible_option_is_named(
    start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path]
) -> None:
    """One of them; that each is refused is tested without a server."""
    option = "--enable-hierarchical-cache"
    with (
        pytest.raises(EngineError, match=option),
        start_server(Setup(tiny_llama, flags(write_chain(), option))),
    ):
        pass


def test_a_hybrid_model_is_named(
    start_server: StartServer, write_chain: Callable[..., Path], tmp_path: Path
) -> None:
    """Half of its layers would be restored; without a refusal it crashes at the first request."""
    model = write_tiny_model(tmp_path / "mellum", "mellum")
    with (
        pytest.raises(EngineError, match=r"flexkv does not support sliding-window layers \(MellumConfig\)"),
        start_server(Setup(model, flags(write_chain()))),
    ):
        pass


def test_a_broken_chain_file_is_named(start_server: StartServer, tiny_llama: Path, tmp_path: Path) -> None:
    chain = tmp_path / "chain.yaml"
    chain.write_text("version: 1\ntiers: [{name: host, driver: cpu, options: {capasity: 1GiB}}]\n")
    with pytest.raises(EngineError, match="capasity"), start_server(Setup(tiny_llama, flags(chain))):
        pass
