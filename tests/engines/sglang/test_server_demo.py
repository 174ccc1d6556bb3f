"""``flexkv demo`` from end to end, with a tiny model instead of a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexkv_core.cli._demo_redis import program
from tests.support.server import SHIM

pytestmark = pytest.mark.server

LOCAL = ["computed", "CPU tier", "SSD, restarted"]


def demo(work: Path, model: Path, *more: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.prefix) / "bin" / "flexkv"), "demo", "--work", str(work)]
    paths = [str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--model-path", str(model), "--entries", "5", *more],
        env=environment if path is None else environment | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def table(output: str) -> list[str]:
    """The rows below the table's rule."""
    lines = output.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("----"))
    return lines[rule + 1 : lines.index("", rule)]


def test_every_row_is_what_it_should_be(tiny_llama: Path, tmp_path: Path) -> None:
    done = demo(tmp_path, tiny_llama)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [*LOCAL, *LOCAL]
    if program() is not None:
        expected += ["Redis, new server", "computed", "computed, Redis dead", "computed", "Redis, back again"]
        assert "down: " in done.stdout
        assert "Connection refused" in done.stdout
        assert 'lookup_failures{cause="unavailable",tier="redis"}=' in done.stdout
        assert "up again" in done.stdout
    rows = table(done.stdout)
    assert len(rows) == len(expected)
    for line, source in zip(rows, expected, strict=True):
        assert f"  {source}  " in line
        assert (" equal " in line) == (source != "computed")
    assert list(tmp_path.iterdir()) == [], "a run that went well leaves nothing"


def test_a_server_that_does_not_start_is_quoted(tiny_llama: Path, tmp_path: Path) -> None:
    """On a machine without Redis, whose part is left out with a line."""
    work, path = tmp_path / "work", tmp_path / "bin"
    path.mkdir()
    done = demo(work, tiny_llama, "--server-args=--no-such-option", path=str(path))
    assert done.returncode == 2
    assert "the server ended" in done.stderr
    assert "--no-such-option" in done.stderr
    assert "left out: no redis-server on this machine" in done.stdout
    assert "remote_redis" not in done.stdout
    assert [log.name for log in work.glob("run-*/*.log")] == ["first-server.log"]
