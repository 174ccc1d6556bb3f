"""Fixtures for SGLang: models, chain files, and servers on the CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from tests.engines.sglang.server import (
    WithoutChain,
    complaints,
    flags,
    prompt,
    update_weights,
    verify,
)
from tests.engines.sglang.sharing import Pair, SharedStore, two_servers
from tests.engines.sglang.versions import RUNNING, TREES, Imported
from tests.support.models import write_tiny_model
from tests.support.server import SHIM, Setup, StartServer, ask, starter

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
  - name: disk
    driver: ssd
    options: {{path: {path}, capacity: 256MiB}}
    load_deadline_s: 120
    store_deadline_s: 120
engine: {{load_deadline_s: 120}}
"""
"""With time for a machine that stands still: what is not loaded in time is computed."""


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


@pytest.fixture(autouse=True)
def _only_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of a tier is not measured again after a while, however slow the machine."""
    monkeypatch.setattr("flexkv_core.chain.links._TRY_EVERY_S", 1e6)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "other", "llama", seed=5)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3")


@pytest.fixture(scope="session")
def imported(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that have imported SGLang, for ``versions.run``: one for each version that is asked for."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "imported" in item.fixturenames:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            version = params.get("version", next(iter(TREES)))
            if version not in RUNNING:
                RUNNING[version] = Imported(version)
    yield
    while RUNNING:
        RUNNING.popitem()[1].close()


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Starts servers; their logs stay in the run's temporary folder."""
    return starter(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session")
def write_chain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a chain file, host memory before a disk folder of its own."""

    def write(block_tokens: int = 64, host: str = "64MiB", disk: Path | None = None) -> Path:
        folder = tmp_path_factory.mktemp("chain")
        file = folder / "chain.yaml"
        file.write_text(CHAIN.format(block_tokens=block_tokens, host=host, path=disk or folder / "disk"))
        return file

    return write


@pytest.fixture(scope="session")
def without_chain(
    start_server: StartServer, tiny_llama: Path, other_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> WithoutChain:
    file = tmp_path_factory.mktemp("baseline") / "baseline.json"
    prompts = [prompt(100, seed=71), prompt(130, seed=72), prompt(90, seed=73)]
    with start_server(Setup(tiny_llama)) as plain:
        assert verify(plain, "baseline", file).returncode == 0
        verified = verify(plain, "test", file)
        assert update_weights(plain, other_llama)
        return WithoutChain(file, verified, prompts, [ask(plain, tokens) for tokens in prompts])


@pytest.fixture(scope="module")
def pair(
    store: SharedStore,
    start_server: StartServer,
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Two servers over the store that the file gives."""
    with two_servers(store, start_server, tiny_llama, tmp_path_factory.mktemp("chain")) as running:
        yield running


@pytest.fixture(scope="session")
def chained(
    without_chain: WithoutChain,
    start_server: StartServer,
    tiny_llama: Path,
    write_chain: Callable[..., Path],
) -> Iterator[ServerProcess]:
    """The server that most is asked of: page size 1, host before disk, weights of ``tiny_llama``.

    Several files share it, so a test uses prompts of its own, and puts back what it changes.
    """
    setup = Setup(tiny_llama, flags(write_chain(), "--sleep-on-idle"))
    with start_server(setup) as running:
        yield running
        assert complaints(running) == []
