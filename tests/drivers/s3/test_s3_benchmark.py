"""The benchmark runs, and every way reads what was written; its figures mean nothing here."""

from __future__ import annotations

import json

from benchmarks import s3_throughput


def test_benchmark(moto, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    arguments = f"--endpoint {moto.endpoint} --sizes 1 --connections 2 --total-mib 4 --rounds 1"
    assert s3_throughput.main([*arguments.split(), "--json", str(figures)]) in (0, s3_throughput.MISSED)
    (row,) = json.loads(figures.read_text())["rows"]
    assert set(row["get"]) == set(row["put"]) == {"tier", "tier, 1 thread", "http.client", "urllib3", "boto3"}
    assert "1 MiB objects, 2 connections" in capsys.readouterr().out
