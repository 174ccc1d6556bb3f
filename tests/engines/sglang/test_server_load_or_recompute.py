"""The real SGLang over an encrypted, compressed disk that is weighed against its own prefill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._receipt_lines import read_log
from tests.engines.sglang.server import ask_after_flush, complaints, flags, prompt, wait_until_steady
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server
pytest.importorskip("zstandard", reason="the extra zstd is not installed")
pytest.importorskip("cryptography", reason="the extra crypto is not installed")


def chain(folder: Path, disk: Path, **engine: object) -> Path:
    """Host and disk; the key comes from the environment."""
    codec = {"compress": "zstd", "encrypt": {"key": "${THE_KEY}"}}
    tiers = [
        {"name": "host", "driver": "cpu", "options": {"capacity": "16MiB"}},
        {
            "name": "disk",
            "driver": "ssd",
            "options": {"path": str(disk), "capacity": "64MiB", "min_free": 0},
            "load_or_recompute": "auto",
            "codec": codec,
            "limits": {"store": {"operations_per_s": 1000}},
        },
    ]
    file = folder / f"chain{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps({"version": 1, "block_tokens": 64, "tiers": tiers, "engine": engine}))
    return file


def weighed(server: ServerProcess) -> dict[str, str]:
    """Why, by action, of what was weighed."""
    found = read_log(server.log_text().splitlines())
    return {choice.action: choice.facts["why"] for choice in found.choices.values()}


def test_an_encoded_disk_is_tried_measured_and_loaded_or_left(
    start_server: StartServer, tiny_llama: Path, tmp_path: Path
) -> None:
    disk, key = tmp_path / "disk", {"THE_KEY": "3c" * 32}
    disk.mkdir()
    tokens, other, third = prompt(700, seed=1), prompt(300, seed=2), prompt(700, seed=3)
    setup = Setup(tiny_llama, flags(chain(tmp_path, disk)), key)
    with start_server(setup) as first:
        fresh = {tuple(asked): ask(first, asked).output_ids for asked in (tokens, third)}
        first.client.flush()
        wait_until_steady(disk)
        first.stop()
        assert key["THE_KEY"] not in first.log_text()
        assert complaints(first) == []
    with start_server(setup) as second:
        ask(second, other)  # tells how fast it computes
        for asked in (tokens, third):
            again = ask_after_flush(second, asked)
            assert again.output_ids == fresh[tuple(asked)]
        reasons = weighed(second)
        assert "no_prefill_rate" not in reasons.values()
        assert reasons.get("try") == "no_estimate"
        assert complaints(second) == []
