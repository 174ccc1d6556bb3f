"""FlexKV's own keys: the sample file line by line, and the fate of every name."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from flexkv_core.config import load_config
from flexkv_core.config.flat import EVERY_TIER_KEYS, FIELD_KEYS, TIER_KEYS
from flexkv_core.config.schema import _READERS as READER_WORDS
from flexkv_core.config.schema import READERS, field_at
from flexkv_core.config.seed import SEED_KEYS, Fate, Kind
from flexkv_core.models import ChainConfig
from tests.support.configs import findings, write

# Source: sglang 0.5.23, mem_cache/storage/flexkv/example_config_mp.yaml: the active line, and each of
# the others as it reads without its comment sign.
SAMPLE = [
    "cpu_cache_gb: 64",
    "use_hugepage_cpu_buffer: false",
    "use_hugepage_tmp_buffer: false",
    "hugepage_size_bytes: 2097152",
    "ssd_cache_gb: 256",
    'ssd_cache_dir: "/mnt/nvme0/flexkv;/mnt/nvme1/flexkv"',
    "enable_gds: false",
    "kv_cache_dtype: bfloat16",
    "enable_p2p_cpu: false",
    "enable_p2p_ssd: false",
    "enable_3rd_remote: false",
    "redis_host: 127.0.0.1",
    "redis_port: 6379",
    "redis_password: null",
    "node_ttl_seconds: 60",
    "local_ip: 10.0.0.1",
]
VALUES = {
    Kind.NUMBER: 1.5,
    Kind.WHOLE: 3,
    Kind.SWITCH: True,
    Kind.TEXT: "text",
    Kind.TEXTS: "/a;/b",
    Kind.SECRET: "hush-hush",
}


@pytest.mark.parametrize("line", SAMPLE[1:])
def test_each_line_of_the_sample_loads(tmp_path, line):
    config = load_config(write(tmp_path, f"{SAMPLE[0]}\n{line}\n"), environ={})
    assert config.tiers[0].options.capacity == 64 << 30
    key = line.split(":")[0]
    fate = SEED_KEYS[key].fate
    is_given = yaml.safe_load(line)[key] is not None
    has_no_effect = fate is Fate.NO_EFFECT or key == "ssd_cache_dir"  # without a size it has none
    assert bool(config.notices) == (has_no_effect and is_given)
    assert all(key in notice for notice in config.notices)


def test_the_whole_sample_loads_uncommented(tmp_path):
    config = load_config(write(tmp_path, "\n".join(SAMPLE)), environ={})
    host, disk = config.tiers
    assert (host.options.capacity, disk.options.capacity) == (64 << 30, 256 << 30)
    assert [str(path) for path in disk.options.path] == ["/mnt/nvme0/flexkv", "/mnt/nvme1/flexkv"]
    assert config.chain.kv_cache_dtype == "bfloat16"


def test_the_sample_of_the_installed_sglang_is_the_one_above(tmp_path):
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    sample = folder / "srt/mem_cache/storage/flexkv/example_config_mp.yaml"
    if not sample.is_file():
        pytest.skip("this sglang has no sample file for FlexKV")
    assert load_config(str(sample), environ={}).tiers[0].options.capacity == 64 << 30
    bare = [line.removeprefix("# ") for line in sample.read_text().splitlines()]
    found = [line.split("#")[0].strip() for line in bare if line.split(":")[0] in SEED_KEYS]
    assert found == SAMPLE
    config = load_config(write(tmp_path, "\n".join(found)), environ={})
    assert len(config.tiers) == 2


@pytest.mark.parametrize("name", sorted(SEED_KEYS))
@pytest.mark.parametrize("where", ["file", "environment"])
def test_no_key_is_taken_and_dropped(tmp_path, name, where):
    """Each key changes the chain, or is refused by name, or is told to have no effect."""
    key = SEED_KEYS[name]
    value = {"kv_cache_dtype": "float16", "eviction_policy": "mru", "evict_ratio": 0.5}.get(
        name, VALUES[key.kind]
    )
    if name == "evict_start_threshold":
        value = 0.5
    if name in ("ssd_cache_gb", "cpu_cache_gb"):
        value = 20
    if key.fate is Fate.KEPT_TO and value in key.served:
        value = not value
    given = {name: value}
    if name == "ssd_cache_dir":
        given["ssd_cache_gb"] = 20
    sources = {
        "file": lambda: (write(tmp_path, given), {}),
        "environment": lambda: (None, {f"FLEXKV_{key.upper()}": str(entry) for key, entry in given.items()}),
    }
    file, environ = sources[where]()
    if key.fate is Fate.KEPT_TO:
        (line,) = findings(file, environ=environ)
        assert "refused" in line
        assert key.text in line
        assert name in line.lower()
        return
    config = load_config(file, environ=environ)
    if key.fate is Fate.SETS:
        assert config.chain != load_config(environ={}).chain
        assert any(value.origin.name.lower().endswith((name, "chain.yaml")) for value in config.values)
    else:
        (notice,) = config.notices
        assert name in notice
        assert key.text in notice
        assert "hush-hush" not in notice


@pytest.mark.parametrize("name", sorted(name for name, key in SEED_KEYS.items() if key.fate is Fate.KEPT_TO))
def test_what_is_off_is_taken_without_a_word(tmp_path, name):
    for value in SEED_KEYS[name].served:
        config = load_config(write(tmp_path, {name: value}), environ={})
        assert config.notices == ()
        assert config.chain == load_config(environ={}).chain


def test_layout_names_are_read_in_any_case():
    assert load_config(environ={"FLEXKV_CPU_LAYOUT": "BLOCKFIRST"}).notices == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"cpu_cache_gb": 0}, "cpu_cache_gb: must be more than 0"),
        ({"cpu_cache_gb": -1}, "cpu_cache_gb: must be more than 0"),
        ({"cpu_cache_gb": float("nan")}, "cpu_cache_gb: must be more than 0"),
        ({"cpu_cache_gb": float("inf")}, "cpu_cache_gb: must be more than 0"),
        ({"cpu_cache_gb": "8GiB"}, "cpu_cache_gb: expected number, got text"),
        ({"cpu_cache_gb": True}, "cpu_cache_gb: expected number, got true or false"),
        ({"cpu_cache_gb": [1]}, "cpu_cache_gb: expected number, got a list"),
        ({"ssd_cache_gb": -1}, "ssd_cache_gb: must be 0 or more"),
        ({"ssd_cache_gb": 16}, "ssd_cache_gb: must be more than cpu_cache_gb (16)"),
        ({"cpu_cache_gb": 8, "ssd_cache_gb": 7.5}, "ssd_cache_gb: must be more than cpu_cache_gb (8)"),
        ({"ssd_cache_gb": 64, "ssd_cache_dir": 5}, "ssd_cache_dir: expected text with ';'"),
        ({"ssd_cache_gb": 64, "ssd_cache_dir": ["/a", 5]}, "ssd_cache_dir: expected text with ';'"),
        ({"ssd_cache_gb": 64, "ssd_cache_dir": " ; "}, "ssd_cache_dir: names no directory"),
        ({"ssd_cache_gb": 64, "ssd_cache_dir": "/a;/a"}, "directories must be distinct"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype: must be auto or one of"),
        ({"kv_cache_dtype": ["fp8"]}, "kv_cache_dtype: expected text, got a list"),
        ({"enable_gds": "maybe"}, "enable_gds: expected true or false"),
        ({"evict_ratio": 2}, "eviction.ratio: must be at most 1"),
        ({"eviction_policy": "clock"}, "eviction.policy: expected one of lru"),
        ({"layerwise_wait_timeout_s": 0}, "engine.load_deadline_s: must be more than 0"),
        ({"redis_port": "six"}, "redis_port: expected whole number, got text"),
        ({"hugepage_size_bytes": 1 << 30}, "hugepage_size_bytes: refused"),
        ({"enable_ssd": True}, "enable_ssd: unknown field, did you mean ssd_cache_gb?"),
        ({"swa_multi_layer": 1}, "swa_multi_layer: unknown field, did you mean swa_multi_group?"),
        ({"tokens_per_block": 16}, "tokens_per_block: unknown field, did you mean block_tokens?"),
        ({"cpu_cache_bg": 16}, "cpu_cache_bg: unknown field, did you mean cpu_cache_gb?"),
    ],
)
def test_bad_flat_values(tmp_path, content, words):
    (line,) = findings(write(tmp_path, content))
    assert words in line


def test_ssd_without_a_directory_has_one(tmp_path):
    config = load_config(write(tmp_path, {"ssd_cache_gb": 17}), environ={})
    assert [str(path) for path in config.tiers[1].options.path] == ["ssd_cache"]


def test_zero_leaves_the_ssd_tier_out(tmp_path):
    assert len(load_config(write(tmp_path, {"ssd_cache_gb": 0}), environ={}).tiers) == 1


def test_the_tables_agree():
    setting = {name for name, key in SEED_KEYS.items() if key.fate is Fate.SETS}
    assert setting == {*TIER_KEYS, *EVERY_TIER_KEYS, *FIELD_KEYS}
    assert all(field_at(ChainConfig, path) is not None for path in FIELD_KEYS.values())
    assert all(field_at(ChainConfig, ("tiers", 0, "eviction", name)) for name in EVERY_TIER_KEYS.values())
    assert {reader.__name__ for reader in READERS} == set(READER_WORDS)
    assert all(key.served for key in SEED_KEYS.values() if key.fate is Fate.KEPT_TO)
