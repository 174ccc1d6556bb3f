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


LAYERWISE = "transfer layer by layer (FLEXKV_ENABLE_LAYERWISE_TRANSFER) is not built yet"


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"engine": {"layerwise": True}}, "{file}: engine.layerwise: "),
        ({"enable_layerwise_transfer": True}, "{file}: engine.layerwise: "),
        ({**CHAIN, "engine": {"layerwise": True}}, "{file}: engine.layerwise: "),
    ],
)
def test_layerwise_transfer_is_refused_by_name_in_a_file(tmp_path, content, where):
    file = write(tmp_path, content)
    (line,) = findings(file)
    assert line.startswith(where.format(file=file) + LAYERWISE)


@pytest.mark.parametrize("name", ["FLEXKV_ENABLE_LAYERWISE_TRANSFER", "FLEXKV_ENGINE_LAYERWISE"])
def test_layerwise_transfer_is_refused_by_name_in_the_environment(name):
    (line,) = findings(environ={name: "1"})
    assert line.startswith(f"environment: {name} (engine.layerwise): {LAYERWISE}")
    config = load_config(environ={name: "0"})
    assert config.chain.engine.layerwise is False
    assert config.notices == ()


@pytest.mark.parametrize("name", ["engine.layerwise", "enable_layerwise_transfer"])
def test_layerwise_transfer_is_refused_by_name_as_a_flag(name):
    (line,) = findings(flags={name: "yes"})
    assert line.startswith(f"flag: engine.layerwise: {LAYERWISE}")
    assert load_config(flags={name: "no"}, environ={}).chain.engine.layerwise is False


@pytest.mark.parametrize("choice", ["auto", "load", "recompute"])
def test_load_or_recompute(choice):
    config = load_config(environ={"FLEXKV_TIER_HOST_LOAD_OR_RECOMPUTE": choice})
    assert config.tiers[0].config.load_or_recompute == choice
