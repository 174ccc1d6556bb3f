"""The real SGLang 0.5.20, whose seam has other methods: the same results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.sglang.server import LAYERWISE, ask_after_flush, complaints, flags, prompt
from tests.support.server import OLDER, Setup, StartServer, ask, older_sglang
from tests.support.waiting import CHILD_S

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not older_sglang().is_dir(), reason=f"sglang {OLDER} is not installed (make setup)"),
]


def test_host_and_disk(start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path]) -> None:
    """And, after the restart, layer by layer."""
    setup = Setup(tiny_llama, flags(write_chain()), version=OLDER)
    tokens = prompt(150, seed=1)
    with start_server(setup) as first:
        assert first.client.server_info()["version"] == OLDER
        fresh = ask(first, tokens)
        host = ask_after_flush(first, tokens)
        assert host.by_tier == {"device": 0, "host": 149}
        other = ask_after_flush(first, tokens, extra_key="other")
        assert other.cached_tokens == 0
        first.stop(CHILD_S)
        assert complaints(first) == []
    with start_server(replace(setup, environment=LAYERWISE)) as second:
        warm = ask(second, tokens)
        assert warm.by_tier == {"device": 0, "host": 0, "storage": 149}
        promoted = ask_after_flush(second, tokens)
        assert promoted.by_tier == {"device": 0, "host": 149}
        assert promoted.output_ids == warm.output_ids
        assert "LAYERWISE transfer request:" in second.log_text()
        assert complaints(second) == []
    assert fresh.output_ids == host.output_ids == other.output_ids == warm.output_ids
