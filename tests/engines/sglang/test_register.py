"""The plug-in, loaded by SGLang's own loader in a fresh process: registered, one state, and heard."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest

from flexkv_sglang import register
from tests.engines.sglang.versions import HERE, TREES, run, run_script

pytestmark = [
    pytest.mark.skipif(not TREES, reason="sglang is not installed (make setup)"),
    pytest.mark.slow,
    pytest.mark.usefixtures("imported"),
]
SCRIPT = "register_scenario.py"
NEWEST = next(iter(TREES), "")
BOTH = [version for version in TREES if version in (NEWEST, "0.5.20", "0.5.17")]

CHAIN = """\
version: 1
tiers:
  - {name: host, driver: cpu, options: {capacity: 16MiB}}
"""


@pytest.fixture(autouse=True)
def _no_stray_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("FLEXKV_") and n != "FLEXKV_SGLANG_TREES"]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("version", BOTH)
def test_both_switches_lead_to_one_state(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "1")
    out = run(version, SCRIPT, "normal")
    assert "flexkv" in out["backends"]
    assert out["factory"]
    assert out["neither"] == [False, None]
    assert out["other"] == [False, "other"], "flexkv was not asked for and interferes"
    assert out["named"] == out["switched"] == [True, "flexkv"]
    assert out["conflict"].startswith("EngineError: flexkv cannot be used with --enable-lmcache: ")
    assert "--tp-size 2" in out["conflict"]
    assert "--radix-cache-backend other" in out["two backends"]
    assert out["no file"].startswith("ConfigError: /nowhere.yaml")
    assert out["built in is routed"]
    assert out["reached"] == ["flexkv", "old"], "a way to the cache does not end in our factory"
    assert not [line for line in out["log"] if line.startswith("WARNING")]


def test_both_switches_together_are_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "1")
    out = run(NEWEST, SCRIPT, "twice")
    assert out["both"] == out["again"] == [True, "flexkv"]
    warnings = [line for line in out["log"] if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "mean the same" in warnings[0]


def test_the_flags_file_beats_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "flag.yaml"
    flag.write_text(CHAIN)
    monkeypatch.setenv("FLEXKV_CONFIG_PATH", str(tmp_path / "left-over.yaml"))
    out = run(NEWEST, SCRIPT, "file", str(flag))
    assert out["named"] == [True, "flexkv"]
    digest = sha256(flag.read_bytes()).hexdigest()[:12]
    assert any(f"INFO [FlexKV] configuration: {flag} (sha256 {digest})" in line for line in out["log"])
    assert any("left-over.yaml) loses" in line for line in out["log"]), "a value that loses is never silent"


def test_the_built_in_integration_does_not_win() -> None:
    out = run(NEWEST, SCRIPT, "built_in_first")
    assert out["factory"]
    taken = [line for line in out["log"] if "takes the backend 'flexkv' over" in line]
    assert len(taken) == 1
    assert "flexkv-core" in taken[0]
    assert "sglang.srt.mem_cache.storage.flexkv._flexkv_factory" in taken[0]


def test_a_broken_plugin_that_is_asked_for_ends_the_start() -> None:
    done = run_script(NEWEST, [str(HERE / SCRIPT), "broken", "--radix-cache-backend", "flexkv"])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "flexkv was asked for and cannot be used: registry is gone"


@pytest.mark.parametrize(
    ("argv", "is_asked"),
    [
        (["--enable-flexkv"], True),
        (["--radix-cache-backend", "flexkv"], True),
        (["--radix-cache-backend=flexkv", "--tp", "1"], True),
        (["--radix-cache-backend", "other", "flexkv"], False),
        (["--model-path", "flexkv"], False),
        ([], False),
    ],
)
def test_what_a_command_line_asks_for(argv: list[str], is_asked: bool) -> None:
    assert register.is_asked_in(argv) is is_asked


def test_a_broken_plugin_that_nobody_asked_for_disturbs_nobody() -> None:
    out = run(NEWEST, SCRIPT, "broken")
    assert out["factory"] == "EngineError: flexkv cannot be used: registry is gone"
    assert [line for line in out["log"] if line.startswith("ERROR")]


def test_another_version_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "1")
    out = run(NEWEST, SCRIPT, "unsupported")
    assert out["named"].startswith("EngineError: flexkv needs SGLang 0.5.16 to 0.5.23 and found unknown")
    assert out["neither"] == [False, None]
