"""The benchmark runs, compares what was read with what was written, and says so in its exit status."""

from __future__ import annotations

import json

from benchmarks import redis_throughput
from tests.support.redis_server import require_redis


def test_it_runs(tmp_path, capsys, monkeypatch):
    require_redis()
    for other in ("LMCACHE_FOLDER", "MOONCAKE_FOLDER"):
        monkeypatch.delenv(other, raising=False)
    figures = tmp_path / "figures.json"
    arguments = ["--sizes", "1", "--connections", "2", "--total-mib", "4", "--rounds", "1"]
    assert redis_throughput.main([*arguments, "--json", str(figures)]) in (0, redis_throughput.MISSED)
    told = json.loads(figures.read_text())["throughput"]["1x2"]
    assert set(told) == {"remote_redis", "raw socket", "redis-py"}
    assert "lookup of 1000" in capsys.readouterr().out
