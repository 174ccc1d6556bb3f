import json

import pytest

from flexkv_core.cli import main
from tests.support.configs import CHAIN, write


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.delenv("FLEXKV_CONFIG_PATH", raising=False)


def test_check_prints_each_value_with_its_origin(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXKV_TIER_DISK_WRITE", "back")
    file = write(tmp_path, CHAIN)
    assert main(["check", file, "--set", "engine.prefetch=no", "--set", "block_tokens=16"]) == 0
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["block_tokens"] == ["16", "flag block_tokens"]
    assert rows["engine.prefetch"] == ["false", "flag engine.prefetch"]
    assert rows["tiers[1].write"] == ["back", "environment FLEXKV_TIER_DISK_WRITE"]
    assert rows["tiers[0].options.capacity"] == ["64MiB", f"file {file}"]
    assert rows["engine.load_wait_s"] == ["0.005", "default"]
    assert rows["note:"][1].endswith("loses to flag block_tokens for block_tokens")
    assert "OK" in rows


def test_check_prints_json(capsys, tmp_path):
    file = write(tmp_path, CHAIN)
    assert main(["check", file, "--print-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["file"] == file
    assert len(shown["sha256"]) == 64
    assert shown["values"]["block_tokens"] == {"value": "32", "origin": "file", "source": file}
    assert [tier["driver"] for tier in shown["tiers"]] == ["cpu", "ssd"]


def test_check_without_a_file_shows_the_defaults(capsys):
    assert main(["check", "--changed"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no file\n")
    assert "block_tokens" not in out


def test_check_fails_with_the_whole_report(capsys, tmp_path):
    file = write(tmp_path, {**CHAIN, "blok_tokens": 1, "engine": {"layerwize": True}})
    assert main(["check", file]) == 1
    err = capsys.readouterr().err
    assert f"{file}: blok_tokens: unknown field, did you mean block_tokens?" in err
    assert f"{file}: engine.layerwize: unknown field, did you mean layerwise?" in err
    assert err.endswith("2 findings\n")


@pytest.mark.parametrize(
    "words", [["check", "--set", "novalue"], ["check", "--set", "=1"], ["check", "a", "b"]]
)
def test_wrong_usage_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
