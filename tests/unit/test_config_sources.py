"""Which source wins, and that all sources lead to one model."""

import copy
import json
import os
import subprocess
import sys

import pytest

from flexkv_core.config import Rank, load_config
from tests.support.configs import CHAIN, findings, write
from tests.support.waiting import CHILD_S

FLAT = {"cpu_cache_gb": 2.5, "ssd_cache_gb": 8, "ssd_cache_dir": "/a;/b", "use_hugepage_cpu_buffer": False}


def test_nothing_at_all_gives_the_seeds_default():
    config = load_config(environ={})
    (tier,) = config.tiers
    assert (tier.config.name, tier.spec.name, tier.options.capacity) == ("host", "cpu", 16 << 30)
    assert config.file is None
    assert {value.origin.rank for value in config.values} == {Rank.DEFAULT}
    assert config.notices == ()


@pytest.mark.parametrize(
    "content", [CHAIN, FLAT, {**FLAT, "block_tokens": 16, "engine": {"prefetch": False}}]
)
def test_yaml_and_json_are_equal(tmp_path, content):
    one = load_config(write(tmp_path, content, "c.yaml"), environ={})
    other = load_config(write(tmp_path, content, "c.json"), environ={})
    third = load_config(write(tmp_path, content, "c.yml"), environ={})
    assert one.chain == other.chain == third.chain
    assert [value.text for value in one.values] == [value.text for value in other.values]


def test_file_environment_and_flags_are_equal(tmp_path):
    keys = {
        **FLAT,
        "kv_cache_dtype": "fp8_e5m2",
        "eviction_policy": "slru",
        "evict_ratio": 0.05,
        "evict_start_threshold": 0.7,
        "hit_reward_seconds": 0,
        "slru_protected_threshold": 3,
        "enable_layerwise_transfer": "no",
        "layerwise_wait_timeout_s": 12,
        "transfer_manager_shutdown_timeout_s": 40,
    }
    from_file = load_config(write(tmp_path, keys), environ={})
    from_json = load_config(write(tmp_path, keys, "k.json"), environ={})
    variables = {f"FLEXKV_{name.upper()}": str(value) for name, value in keys.items()}
    from_environment = load_config(environ=variables)
    from_flags = load_config(flags=keys, environ={})
    assert from_file.chain == from_json.chain == from_environment.chain == from_flags.chain
    chain = from_file.chain
    assert chain.kv_cache_dtype == "float8_e5m2"
    assert [tier.eviction.ratio for tier in chain.tiers] == [0.05, 0.05]
    assert chain.tiers[1].eviction.policy.value == "slru"
    assert (chain.engine.layerwise, chain.engine.load_deadline_s) == (False, 12)
    assert [str(path) for path in from_file.tiers[1].options.path] == ["/a", "/b"]


def test_a_chain_can_be_given_by_variables_alone(tmp_path):
    by_file = load_config(write(tmp_path, CHAIN), environ={})
    variables = {
        "FLEXKV_TIERS": json.dumps(CHAIN["tiers"]),
        "FLEXKV_BLOCK_TOKENS": "32",
        "FLEXKV_NAMESPACE_MODEL": "tiny",
        "FLEXKV_NAMESPACE_REVISION": "r1",
    }
    assert load_config(environ=variables).chain == by_file.chain


def test_a_directory_list_is_a_list_or_a_text(tmp_path):
    for folders in ("/a ; /b;", ["/a", "/b"]):
        config = load_config(write(tmp_path, {**FLAT, "ssd_cache_dir": folders}), environ={})
        assert [str(path) for path in config.tiers[1].options.path] == ["/a", "/b"]


@pytest.mark.parametrize(
    ("path", "variable", "in_file", "in_environment", "as_flag", "default"),
    [
        ("block_tokens", "FLEXKV_BLOCK_TOKENS", 8, "16", 32, "64"),
        ("staging", "FLEXKV_STAGING", "1MiB", "2MiB", "3MiB", "256MiB"),
        ("kv_cache_dtype", "FLEXKV_KV_CACHE_DTYPE", "float16", "bfloat16", "float32", "none"),
        ("engine.load_wait_s", "FLEXKV_ENGINE_LOAD_WAIT_S", "1ms", "2ms", "3ms", "0.005"),
        ("engine.prefetch", "FLEXKV_ENGINE_PREFETCH", False, "yes", False, "true"),
        ("namespace.weights_version", "FLEXKV_NAMESPACE_WEIGHTS_VERSION", "a", "b", "c", "0"),
    ],
)
def test_precedence_of_fields(tmp_path, path, variable, in_file, in_environment, as_flag, default):
    top, _, below = path.partition(".")
    content = {**CHAIN, top: {below: in_file} if below else in_file}
    plain = {key: value for key, value in CHAIN.items() if key not in (top, "namespace")}
    cases = [
        (plain, {}, {}, Rank.DEFAULT, ""),
        (content, {}, {}, Rank.FILE, None),
        (content, {variable: in_environment}, {}, Rank.ENVIRONMENT, variable),
        (content, {variable: in_environment}, {path: as_flag}, Rank.FLAG, path),
    ]
    texts = []
    for number, (tree, environ, flags, rank, name) in enumerate(cases):
        file = write(tmp_path, tree, f"{number}.yaml")
        config = load_config(file, environ=environ, flags=flags)
        origin = config.origin(path)
        assert (origin.rank, origin.name) == (rank, file if name is None else name)
        texts.append(next(value.text for value in config.values if value.path == path))
        assert bool(config.notices) == (rank > Rank.FILE), config.notices
    assert texts[0] == default
    assert texts[1] != texts[2] != texts[3]


@pytest.mark.parametrize(
    ("path", "variable", "value", "text"),
    [
        ("tiers[1].write", "FLEXKV_TIER_DISK_WRITE", "back", "back"),
        ("tiers[1].promote", "FLEXKV_TIER_DISK_PROMOTE", "3", "3"),
        ("tiers[1].ttl_s", "FLEXKV_TIER_DISK_TTL_S", "2h", "7200"),
        ("tiers[0].eviction.policy", "FLEXKV_TIER_HOST_EVICTION_POLICY", "fifo", "fifo"),
        ("tiers[0].options.capacity", "FLEXKV_TIER_HOST_OPTIONS_CAPACITY", "32MiB", "32MiB"),
        ("tiers[0].options.huge_pages", "FLEXKV_TIER_HOST_OPTIONS_HUGE_PAGES", "yes", "true"),
        ("tiers[1].options.path", "FLEXKV_TIER_DISK_OPTIONS_PATH", "/x;/y", "[/x, /y]"),
        ("tiers[1].options.path", "FLEXKV_TIER_DISK_OPTIONS_PATH", "[/x, /y]", "[/x, /y]"),
        ("tiers[0].options.capacity", "FLEXKV_CPU_CACHE_GB", "0.25", "256MiB"),
        ("tiers[1].options.capacity", "FLEXKV_SSD_CACHE_GB", "2", "2GiB"),
        ("tiers[1].options.path", "FLEXKV_SSD_CACHE_DIR", "/x;/y", "[/x, /y]"),
        ("tiers[1].eviction.ratio", "FLEXKV_EVICT_RATIO", "0.1", "0.1"),
    ],
)
def test_variables_of_tiers(tmp_path, path, variable, value, text):
    config = load_config(write(tmp_path, CHAIN), environ={variable: value})
    found = next(entry for entry in config.values if entry.path == path)
    assert (found.text, str(found.origin)) == (text, f"environment {variable}")


def test_flags_of_tiers(tmp_path):
    flags = {"tiers.disk.write": "back", "tiers.host.options.capacity": "1MiB"}
    config = load_config(write(tmp_path, CHAIN), environ={}, flags=flags)
    assert config.chain.tiers[1].write.value == "back"
    assert config.tiers[0].options.capacity == 1 << 20


def test_a_tier_with_a_dash_and_a_longer_name(tmp_path):
    tree = copy.deepcopy(CHAIN)
    tree["tiers"][0]["name"], tree["tiers"][1]["name"] = "my-tier", "my-tier-b"
    environ = {"FLEXKV_TIER_MY_TIER_B_WRITE": "around", "FLEXKV_TIER_MY_TIER_RETRIES": "4"}
    config = load_config(write(tmp_path, tree), environ=environ)
    assert config.chain.tiers[1].write.value == "around"
    assert config.chain.tiers[0].retries == 4


def test_the_specific_name_beats_the_general_one():
    environ = {"FLEXKV_EVICT_RATIO": "0.1", "FLEXKV_TIER_HOST_EVICTION_RATIO": "0.2"}
    config = load_config(environ=environ)
    assert config.chain.tiers[0].eviction.ratio == 0.2
    assert any("loses to environment FLEXKV_TIER_HOST_EVICTION_RATIO" in line for line in config.notices)


def test_two_names_of_one_source_must_agree():
    environ = {"FLEXKV_CPU_CACHE_GB": "1", "FLEXKV_TIER_HOST_OPTIONS_CAPACITY": "2GiB"}
    (line,) = findings(environ=environ)
    assert "FLEXKV_CPU_CACHE_GB says something else for tiers[0].options.capacity" in line


def test_the_flag_names_the_file_and_the_variable_that_loses_is_told(tmp_path):
    flag, variable = write(tmp_path, CHAIN, "flag.yaml"), write(tmp_path, FLAT, "variable.yaml")
    environ = {"FLEXKV_CONFIG_PATH": variable}
    assert load_config(environ=environ).file == variable
    config = load_config(flag, environ=environ)
    assert config.file == flag
    assert any("FLEXKV_CONFIG_PATH" in line and "loses" in line for line in config.notices)
    assert load_config(variable, environ=environ).notices == ()


def test_the_files_hash_is_kept(tmp_path):
    file = write(tmp_path, "cpu_cache_gb: 1\n")
    config = load_config(file, environ={})
    assert len(config.sha256) == 64
    assert config.sha256[:12] in config.describe()[0]
    assert load_config(write(tmp_path, "cpu_cache_gb: 1\n", "b.yaml"), environ={}).sha256 == config.sha256


def test_two_managers_in_one_process_may_differ(tmp_path):
    one = load_config(write(tmp_path, CHAIN), environ={"FLEXKV_BLOCK_TOKENS": "16"})
    two = load_config(write(tmp_path, CHAIN), environ={})
    assert (one.chain.block_tokens, two.chain.block_tokens) == (16, 32)


def test_the_process_environment_is_read_when_asked(monkeypatch):
    for name in [name for name in os.environ if name.startswith("FLEXKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "1")
    assert load_config().tiers[0].options.capacity == 1 << 30
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "2")
    assert load_config().tiers[0].options.capacity == 2 << 30


def test_nothing_is_read_at_import():
    code = "import flexkv_core, flexkv_core.config, flexkv_core.cli"
    environ = {**os.environ, "FLEXKV_CPU_CACHE_GB": "junk", "FLEXKV_NONSENSE": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environ, check=True, timeout=CHILD_S)


def test_a_callers_list_of_tiers_is_left_alone():
    tiers = copy.deepcopy(CHAIN["tiers"])
    load_config(flags={"tiers": tiers, "tiers.disk.write": "back"}, environ={})
    assert tiers == CHAIN["tiers"]


def test_a_list_of_tiers_in_a_higher_source_replaces_the_files(tmp_path):
    environ = {"FLEXKV_TIERS": "[{name: only, driver: cpu, options: {capacity: 1MiB}}]"}
    config = load_config(write(tmp_path, CHAIN), environ=environ)
    assert [tier.config.name for tier in config.tiers] == ["only"]
    assert any("loses to environment FLEXKV_TIERS for tiers" in line for line in config.notices)
    config = load_config(write(tmp_path, FLAT), environ=environ)
    assert sum("loses to environment FLEXKV_TIERS" in line for line in config.notices) == len(FLAT)


def test_options_come_back_as_the_driver_typed_them(tmp_path):
    config = load_config(write(tmp_path, CHAIN), environ={})
    for tier in config.tiers:
        assert type(tier.options).model_validate(tier.config.options) == tier.options


@pytest.mark.parametrize("text", ["true", "True", "yes", "1", "on"])
@pytest.mark.parametrize("where", ["file", "environment"])
def test_switches_read_alike_everywhere(tmp_path, text, where):
    if where == "file":
        config = load_config(write(tmp_path, f"use_hugepage_cpu_buffer: {text}\n"), environ={})
    else:
        config = load_config(environ={"FLEXKV_USE_HUGEPAGE_CPU_BUFFER": text})
    assert config.tiers[0].options.huge_pages is True


def test_an_empty_variable_counts_as_not_given_and_is_told():
    config = load_config(environ={"FLEXKV_SSD_CACHE_DIR": "", "FLEXKV_CPU_CACHE_GB": " "})
    assert config.tiers[0].options.capacity == 16 << 30
    assert len(config.notices) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEXKV_REDIS_PORT", "tcp://10.0.0.1:6379"),
        ("FLEXKV_PORT_6379_TCP_ADDR", "10.0.0.1"),
        ("FLEXKV_SERVICE_HOST", "10.0.0.1"),
        ("FLEXKV_SERVICE_PORT_HTTP", "80"),
    ],
)
def test_variables_that_a_cluster_sets_do_no_harm(name, value):
    (line,) = load_config(environ={name: value}).notices
    assert name in line
