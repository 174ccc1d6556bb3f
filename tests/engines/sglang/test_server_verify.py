"""``flexkv verify`` from end to end: a server without the chain, then one with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from tests.engines.sglang.server import flags
from tests.support.server import Setup, StartServer

pytestmark = pytest.mark.server


def verify(server: ServerProcess, phase: str, file: Path) -> subprocess.CompletedProcess[str]:
    host = server.client.base_url.removeprefix("http://")
    command = ["verify", "--host", host, "--phase", phase, "--baseline-file", str(file)]
    return subprocess.run(
        [str(Path(sys.prefix) / "bin" / "flexkv"), *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_verify(
    start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "baseline.json"
    with start_server(Setup(tiny_llama)) as plain:
        assert verify(plain, "baseline", file).returncode == 0
        without = verify(plain, "test", file)
        assert without.returncode == 1, "a server without the chain has no hit to show"
        assert "MISSING HIT" in without.stdout
        assert without.stdout.splitlines()[-1] == "Total mismatches: 0"
    with start_server(Setup(tiny_llama, flags(write_chain()))) as chained:
        with_chain = verify(chained, "test", file)
        assert with_chain.returncode == 0, with_chain.stdout + with_chain.stderr
        assert "cached 23/24 (96%) {'device': 0, 'host': 23}" in with_chain.stdout
