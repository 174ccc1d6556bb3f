"""The codec's benchmark runs, and everything comes back; its figures mean nothing here."""

from __future__ import annotations

import pytest

from flexkv_core.testing import make_values, small_layout

pytest.importorskip("zstandard", reason="the extra zstd is not installed")
pytest.importorskip("cryptography", reason="the extra crypto is not installed")


def test_benchmark(capsys):
    from benchmarks.codec import CODECS, compare

    layout = small_layout()
    values = [value.view[: value.num_bytes] for value in make_values(layout, 2)]
    compare(values, layout, rounds=1)
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row[2:16].strip() for row in rows] == ["copy", *CODECS, "split, zstd 1"]
    assert "1.000x" in rows[0]
    assert "pays" not in rows[0]
