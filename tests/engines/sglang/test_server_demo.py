"""``flexkv demo`` from end to end, with a tiny model instead of a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import SHIM

pytestmark = pytest.mark.server


def demo(work: Path, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.prefix) / "bin" / "flexkv"), "demo", "--work", str(work)]
    return subprocess.run(
        [*command, "--model-path", str(model), "--entries", "5", *more],
        env={**os.environ, "PYTHONPATH": str(SHIM), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_every_row_is_what_it_should_be(tiny_llama: Path, tmp_path: Path) -> None:
    done = demo(tmp_path, tiny_llama)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if "capital" in line or "5 days" in line]
    table = [line for line in rows if " of " in line and "asking" not in line]
    assert len(table) == 6
    assert ["computed" in line for line in table] == [True, False, False] * 2
    assert [" equal " in line for line in table] == [False, True, True] * 2
    assert list(tmp_path.iterdir()) == [], "a run that went well leaves nothing"


def test_a_server_that_does_not_start_is_quoted(tiny_llama: Path, tmp_path: Path) -> None:
    done = demo(tmp_path, tiny_llama, "--server-args=--no-such-option")
    assert done.returncode == 2
    assert "the server ended" in done.stderr
    assert "--no-such-option" in done.stderr
    assert [log.name for log in tmp_path.glob("run-*/*.log")] == ["first-server.log"]
