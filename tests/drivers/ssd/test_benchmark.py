"""The benchmark runs; its figures are no matter here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.ssd_vs_fio import MISSED, main


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    argv = ["--path", str(tmp_path), "--sizes", "1", "--total-mib", "8", "--threads", "2", "--rounds", "1"]
    assert main([*argv, "--no-hicache", "--json", str(figures)]) in (0, MISSED)
    assert "ssd tier" in capsys.readouterr().out
    told = json.loads(figures.read_text())["1"]
    assert all(figure > 0 for one in told.values() for kind in one.values() for figure in kind)
    assert list(tmp_path.iterdir()) == [figures]
