"""Which of SGLang's options exclude flexkv: each by name, at argument time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexkv_core import EngineError
from flexkv_sglang import options
from flexkv_sglang.surface import Surface
from tests.engines.sglang.versions import TREES

EXCLUDED = {
    "disable_radix_cache": True,
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
    "radix_cache_backend": "other",
    "enable_lmcache": True,
    "enable_unified_cache_external_linker": True,
    "dllm_algorithm": "LowConfidence",
    "enable_kv_cache_sharding": True,
    "enable_unified_memory": True,
    "enable_hisparse": True,
    "enable_pdmux": True,
    "enable_return_routed_experts": True,
    "enable_return_indexer_topk": True,
    "kv_canary": "log",
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "enable_session_radix_cache": True,
    "enable_streaming_session": True,
    "radix_eviction_policy": "tlru",
    "tp_size": 2,
    "pp_size": 2,
    "dp_size": 2,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "attn_dp_size": 2,
    "enable_dp_attention": True,
}


SINCE = {"enable_unified_cache_external_linker": 20, "enable_kv_cache_sharding": 22, "attn_dp_size": 22}
"""Patch releases of 0.5 that brought an option; all others stand in every version."""


def arguments(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**{"enable_flexkv": True, "radix_cache_backend": None, **fields})


def test_the_table_is_covered() -> None:
    assert {rule.field for rule in options.RULES} == set(EXCLUDED)


@pytest.mark.parametrize("version", TREES)
def test_the_table_speaks_of_options_that_exist(version: str) -> None:
    """One that SGLang has renamed would exclude nothing any more."""
    surface = Surface(TREES[version] / "sglang")
    groups = sorted((surface.root / "srt" / "arg_groups" / "fields").glob("*.py"))
    files = ["server_args.py", *(f"arg_groups/fields/{file.name}" for file in groups)]
    fields = {
        name for file in files for owner in surface.owners(file) for name in surface.of(file, owner).fields
    }
    unknown = {rule.field for rule in options.RULES} - fields
    assert unknown == {name for name, since in SINCE.items() if int(version.split(".")[2]) < since}


@pytest.mark.parametrize("field", EXCLUDED)
def test_each_option_is_refused_by_name(field: str) -> None:
    with pytest.raises(EngineError) as error:
        options.check_arguments(arguments(**{field: EXCLUDED[field]}))
    assert "--" + field.replace("_", "-") in str(error.value)
    reason = next(rule.reason for rule in options.RULES if rule.field == field)
    assert reason in str(error.value)


def test_all_conflicts_at_once() -> None:
    found = options.conflicts(arguments(tp_size=4, enable_lmcache=True))
    assert [line.split(":")[0] for line in found] == ["--enable-lmcache", "--tp-size 4"]


def test_sglangs_own_defaults_pass() -> None:
    server_args = pytest.importorskip("sglang.srt.server_args", reason="sglang is not installed (make setup)")
    args = server_args.ServerArgs(model_path="dummy", device="cpu")
    assert options.conflicts(args) == []
    assert not options.is_asked(args)
    known = set(dir(args))
    assert {rule.field for rule in options.RULES} - known == set(), "a rule about no option"


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
def test_harmless_values_pass(policy: str) -> None:
    options.check_arguments(
        arguments(radix_eviction_policy=policy, disaggregation_mode="null", tp_size=1, attn_cp_size=None)
    )


def test_which_switch() -> None:
    assert options.is_asked(arguments())
    assert options.is_asked(arguments(enable_flexkv=False, radix_cache_backend="flexkv"))
    assert not options.is_asked(arguments(enable_flexkv=False))
    assert options.is_asked_twice(arguments(radix_cache_backend="flexkv"))
    assert not options.is_asked_twice(arguments())


def context(**fields: object) -> SimpleNamespace:
    facts = {
        "is_hybrid_swa": False, "is_hybrid_ssm": False, "is_dsa": False, "disable_radix_cache": False,
        "enable_hierarchical_cache": False, "tp_size": 1,
        "params": SimpleNamespace(is_eagle=False), "model_config": SimpleNamespace(hf_config=Gemma()),
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **fields})


class Gemma:
    """A model's configuration."""


def test_a_plain_model_passes() -> None:
    options.check_context(context())


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("is_hybrid_swa", True, r"sliding-window layers \(Gemma\)"),
        ("is_hybrid_ssm", True, r"state-space layers \(Gemma\)"),
        ("is_dsa", True, r"sparse attention \(Gemma\)"),
        ("disable_radix_cache", True, "disabled radix cache"),
        ("enable_hierarchical_cache", True, "hierarchical cache"),
        ("params", SimpleNamespace(is_eagle=True), "speculative decoding"),
        ("tp_size", 2, "2 tensor-parallel ranks"),
    ],
)
def test_what_only_the_model_tells(field: str, value: object, named: str) -> None:
    with pytest.raises(EngineError, match=named):
        options.check_context(context(**{field: value}))
