"""The real SGLang over an encrypted, compressed disk that is weighed against its own prefill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._receipt_lines import read_log
from tests.engines.sglang.server import ask_after_flush, complaints, flags, prompt, wait_for_blocks
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server
pytest.importorskip("zstandard", reason="the extra zstd is not installed")
pytest.importorskip("cryptography", reason="the extra crypto is not installed")


def chain(folder: Path, disk: Path, **engine: object) -> Path:
    """A host tier of some 1,800 tokens over a disk; the key comes from the environment."""
    codec = {"compress": "zstd", "encrypt": {"key": "${THE_KEY}"}}
    tiers = [
        {"name": "host", "driver": "cpu", "options": {"capacity": "1MiB"}},
        {
            "name": "disk",
            "driver": "ssd",
            "options": {"path": str(disk), "capacity": "64MiB", "min_free": 0},
            "load_or_recompute": "auto",
            "load_deadline_s": 120,
            "store_deadline_s": 120,
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
    prompts = [prompt(700, seed=1), prompt(700, seed=3)]
    with start_server(Setup(tiny_llama, flags(chain(tmp_path, disk)), key)) as server:
        fresh = [ask(server, tokens).output_ids for tokens in prompts]  # tells how fast it computes, too
        for seed in range(10, 14):
            ask_after_flush(server, prompt(600, seed))  # more than the host tier has room for
        wait_for_blocks(disk, 11 + 11)
        for tokens, expected in zip(prompts, fresh, strict=True):
            assert ask_after_flush(server, tokens).output_ids == expected
        reasons = weighed(server)
        assert "no_prefill_rate" not in reasons.values()
        assert reasons.get("try") == "no_estimate"
        assert complaints(server) == []
        assert key["THE_KEY"] not in server.log_text()
