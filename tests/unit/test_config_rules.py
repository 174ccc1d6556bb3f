"""Chains that cannot work by what they declare, and settings that would change nothing."""

import pytest

from flexkv_core.config import load_config
from flexkv_core.config.rules import chain_faults, chain_notices
from flexkv_core.models import ChainConfig
from tests.support.configs import CHAIN, findings, write


def build(*tiers):
    return ChainConfig(tiers=[{"name": f"t{n}", "driver": "cpu", **tier} for n, tier in enumerate(tiers)])


@pytest.mark.parametrize(
    ("tiers", "path", "words"),
    [
        ([{"write": "back"}], ("tiers", 0, "write"), "no tier above the first"),
        ([{"promote": 2}], ("tiers", 0, "promote"), "no tier above the first"),
        ([{}, {"read_only": True, "write": "through"}], ("tiers", 1, "write"), "contradicts read_only"),
        ([{}, {"read_only": True, "write": "back"}], ("tiers", 1, "write"), "contradicts read_only"),
        ([{"read_only": True}, {"write": "back"}], ("tiers", 1, "write"), "tier t0 is never written"),
        ([{"write": "never"}, {"write": "back"}], ("tiers", 1, "write"), "tier t0 is never written"),
        ([{"read_only": True}, {"promote": 2}], ("tiers", 1, "promote"), "set promote: never"),
        ([{"write": "around"}], ("tiers",), "no tier is ever written"),
        ([{"write": "around"}, {"write": "around"}], ("tiers",), "no tier is ever written"),
    ],
)
def test_contradictions(tiers, path, words):
    ((where, line),) = chain_faults(build(*tiers))
    assert where == path
    assert words in line


@pytest.mark.parametrize(
    "tiers",
    [
        [{}],
        [{"promote": "always"}],
        [{"promote": "never"}],
        [{}, {"write": "back"}, {"write": "through"}],
        [{}, {"read_only": True}],
        [{}, {"read_only": True, "write": "never"}],
        [{"read_only": True}, {"promote": "never"}],
        [{"write": "around"}, {"read_only": True}],
        [{"write": "around"}, {}],
        [{"write": "never"}],
    ],
)
def test_chains_that_can_work(tiers):
    assert chain_faults(build(*tiers)) == []


@pytest.mark.parametrize(
    ("tiers", "path"),
    [
        ([{"codec": {"compress": "zstd"}}, {"driver": "ssd"}], "tiers[0].codec"),
        ([{"limits": {"load": {"bytes_per_s": "1GB"}}}, {"driver": "ssd"}], "tiers[0].limits"),
        ([{"driver": "ssd"}, {"write": "back"}], "tiers[1].write"),
        ([{}, {"driver": "ssd"}, {"driver": "s3", "write": "back"}], "tiers[2].write"),
        ([{}, {"driver": "s3", "ttl_s": "1h"}], "tiers[1].ttl_s"),
        ([{}, {"driver": "s3", "promote": 2}], "tiers[1].promote"),
    ],
)
def test_what_a_start_would_refuse_is_found_in_the_file(tiers, path, tmp_path):
    """By what drivers declare; the same rules are asked of the opened tiers."""
    options = {"cpu": {"capacity": "1MiB"}, "ssd": {"path": str(tmp_path), "capacity": "2MiB"}}
    options["s3"] = {"bucket": "kv-cache"}
    rows = [{"name": f"t{n}", "driver": "cpu", **tier} for n, tier in enumerate(tiers)]
    rows = [{**row, "options": options[row["driver"]]} for row in rows]
    (line,) = findings(write(tmp_path, {"version": 1, "tiers": rows}))
    assert f": {path}: " in line


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ({"eviction": {"policy": "fifo", "hit_reward_s": 3}}, "only with lru"),
        ({"eviction": {"slru_protected_threshold": 3}}, "only with slru"),
        ({"read_only": True, "eviction": {"ratio": 0.5}}, "read_only"),
    ],
)
def test_settings_without_effect_are_told(tier, words):
    (notice,) = chain_notices(build({}, tier))
    assert words in notice[1]


def test_a_host_pool_that_is_not_the_first_tier_is_told(tmp_path):
    cpu, ssd = (
        {"name": "host", "driver": "cpu", "options": {"capacity": "1MiB"}},
        {"name": "disk", "driver": "ssd", "options": {"path": str(tmp_path), "capacity": "2MiB"}},
    )
    assert load_config(write(tmp_path, {"version": 1, "tiers": [cpu, ssd]})).notices == ()
    (notice,) = load_config(write(tmp_path, {"version": 1, "tiers": [ssd, cpu]})).notices
    assert notice.startswith("tiers[1]: is not the first tier")


def test_contradictions_stand_in_the_report(tmp_path):
    options = {"capacity": "1MiB"}
    tiers = [{"name": "a", "driver": "cpu", "write": "back", "options": options}]
    file = write(tmp_path, {"version": 1, "tiers": tiers})
    (line,) = findings(file)
    assert line.startswith(f"{file}: tiers[0].write: back means")
    (line,) = findings(environ={"FLEXKV_TIER_HOST_WRITE": "back"})
    assert line.startswith("environment: FLEXKV_TIER_HOST_WRITE (tiers[0].write): back means")


def test_settings_without_effect_are_notices():
    config = load_config(environ={"FLEXKV_EVICTION_POLICY": "mru", "FLEXKV_HIT_REWARD_SECONDS": "3"})
    assert config.notices == ("tiers[0].eviction.hit_reward_s: has no effect with policy mru, only with lru",)


WAYS = {"auto": "auto", "yes": True, "1": True, "true": True, "no": False, "0": False, "false": False}


@pytest.mark.parametrize("said", WAYS)
@pytest.mark.parametrize("name", ["engine.layerwise", "enable_layerwise_transfer"])
def test_how_loads_are_awaited(said, name):
    """R79: the seed's key and variable say the same as the chain's."""
    variables = {"engine.layerwise": "FLEXKV_ENGINE_LAYERWISE"}
    variable = variables.get(name, f"FLEXKV_{name.upper()}")
    if name == "enable_layerwise_transfer" and said == "auto":
        (line,) = findings(environ={variable: said})
        assert "expected true or false" in line
        return
    for config in (load_config(environ={variable: said}), load_config(flags={name: said}, environ={})):
        assert config.chain.engine.layerwise is WAYS[said] or config.chain.engine.layerwise == WAYS[said]
        assert config.notices == ()


def test_loads_are_awaited_as_the_adapter_sees_fit_by_default(tmp_path):
    assert load_config(environ={}).chain.engine.layerwise == "auto"
    file = write(tmp_path, {**CHAIN, "engine": {"layerwise": True}})
    assert load_config(file, environ={}).chain.engine.layerwise is True


@pytest.mark.parametrize("choice", ["auto", "load", "recompute"])
def test_load_or_recompute(choice):
    config = load_config(environ={"FLEXKV_TIER_HOST_LOAD_OR_RECOMPUTE": choice})
    assert config.tiers[0].config.load_or_recompute == choice
