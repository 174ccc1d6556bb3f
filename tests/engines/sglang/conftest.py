"""Fixtures for SGLang: models, chain files, and servers on the CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import write_tiny_model
from tests.support.server import SHIM, StartServer, starter

if not Path("/dev/nvidiactl").exists() and str(SHIM) not in sys.path:
    # Tests of this folder that import sglang themselves do it as the CPU servers do.
    sys.path.insert(0, str(SHIM))
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

CHAIN = """\
version: 1
block_tokens: {block_tokens}
tiers:
  - {{name: host, driver: cpu, options: {{capacity: {host}}}}}
  - {{name: disk, driver: ssd, options: {{path: {path}, capacity: 256MiB}}}}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers run only where their packages are; the reason says what is missing."""
    reason = _why_no_server()
    for item in items:
        if reason and item.get_closest_marker("server"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_server() -> str | None:
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not installed (make setup)"
    if importlib.util.find_spec("flexkv_sglang.register") is None:
        return "flexkv adapter not importable"
    return None


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3")


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Starts servers; their logs stay in the run's temporary folder."""
    return starter(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="module")
def write_chain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a chain file, host memory before a disk folder of its own."""

    def write(block_tokens: int = 64, host: str = "64MiB", disk: Path | None = None) -> Path:
        folder = tmp_path_factory.mktemp("chain")
        file = folder / "chain.yaml"
        file.write_text(CHAIN.format(block_tokens=block_tokens, host=host, path=disk or folder / "disk"))
        return file

    return write
