"""Codecs and limits in a configuration: where keys may come from, and that nobody ever sees one."""

from __future__ import annotations

import pytest

from flexkv_core.config import load_config
from flexkv_core.config.schema import SECRET
from tests.support.configs import CHAIN, findings, write

KEY, OLD = "ab" * 32, "cd" * 32


def chain(**fields):
    return {**CHAIN, "tiers": [CHAIN["tiers"][0], {**CHAIN["tiers"][1], **fields}]}


def codec(**encrypt):
    return chain(codec={"compress": "zstd", "encrypt": encrypt})


def test_keys_come_from_the_environment_and_are_shown_nowhere(tmp_path):
    file = write(tmp_path, codec(key="${THE_KEY}", key_id="b", old_keys={"a": "${THE_OLD}"}))
    config = load_config(file, environ={"THE_KEY": KEY, "THE_OLD": OLD})
    encrypt = config.chain.tiers[1].codec.encrypt
    assert encrypt.key.get_secret_value() == KEY
    assert encrypt.old_keys["a"].get_secret_value() == OLD
    shown = "\n".join(f"{value.path} {value.text}" for value in config.values) + repr(config)
    assert "tiers[1].codec.encrypt.key ${THE_KEY}" in shown
    assert f"tiers[1].codec.encrypt.old_keys {SECRET}" in shown
    assert KEY not in shown
    assert OLD not in shown


@pytest.mark.parametrize("source", ["file", "variable", "flag"])
def test_a_key_may_be_given_in_any_way(tmp_path, source):
    name = CHAIN["tiers"][1]["name"]
    file = write(tmp_path, codec(key=KEY) if source == "file" else CHAIN)
    variable = {f"FLEXKV_TIER_{name.upper()}_CODEC_ENCRYPT_KEY": KEY} if source == "variable" else {}
    flags = {f"tiers.{name}.codec.encrypt.key": KEY} if source == "flag" else {}
    config = load_config(file, environ=variable, flags=flags)
    assert config.chain.tiers[1].codec.encrypt.key.get_secret_value() == KEY
    assert all(KEY not in value.text for value in config.values)


def test_a_bad_key_is_found_and_not_quoted(tmp_path):
    bad = "not-a-key-but-secret-all-the-same"
    for tree in (codec(key=bad), codec(key=KEY, key_id="b", old_keys={"a": bad})):
        (line,) = findings(write(tmp_path, tree))
        assert "must be 32 random bytes" in line
        assert bad not in line
    assert any(
        "the environment has no NONE" in line for line in findings(write(tmp_path, codec(key="${NONE}")))
    )


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"codec": {"compress": "gzip"}}, "codec.compress: expected one of none, zstd"),
        ({"codec": {"level": 99}}, "codec.level: must be at most 19"),
        ({"codec": {"encrypt": {}}}, "codec.encrypt.key: required"),
        ({"codec": {"encrypt": {"key": KEY, "key_id": "no spaces"}}}, "codec.encrypt.key_id: must match"),
        ({"limits": {"load": {"bytes_per_s": "fast"}}}, "limits.load.bytes_per_s: must be a size"),
        ({"limits": {"load": {"bytes_a_s": 1}}}, "limits.load.bytes_a_s: unknown field, did you mean"),
    ],
)
def test_faults_are_named(tmp_path, fields, line):
    assert line in "\n".join(findings(write(tmp_path, chain(**fields))))


def test_limits_have_units(tmp_path):
    file = write(tmp_path, chain(limits={"store": {"bytes_per_s": "200MB", "burst_s": "250ms"}}))
    limits = load_config(file, environ={}).chain.tiers[1].limits
    assert (limits.store.bytes_per_s, limits.store.burst_s) == (200_000_000, 0.25)
    assert limits.is_on
    assert not limits.load.is_on


@pytest.mark.parametrize("package", ["zstandard", "cryptography"])
def test_a_missing_extra_is_a_finding(tmp_path, monkeypatch, package):
    monkeypatch.setattr("flexkv_core.models.find_spec", lambda name: None if name == package else object())
    extra, field = {"zstandard": ("zstd", "compress"), "cryptography": ("crypto", "encrypt")}[package]
    (line,) = findings(write(tmp_path, codec(key=KEY)))
    assert f"tiers[1].codec.{field}: " in line
    assert f"pip install 'flexkv-core[{extra}]'" in line


def test_a_level_without_compression_is_said_to_do_nothing(tmp_path):
    config = load_config(write(tmp_path, chain(codec={"level": 5})), environ={})
    assert config.notices == ("tiers[1].codec.level: has no effect without compress: zstd",)
