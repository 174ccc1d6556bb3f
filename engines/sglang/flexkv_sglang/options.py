"""Which of SGLang's options cannot be served, and why: one table, checked when arguments are parsed.

What only the loaded model tells is checked again when the cache is built (``check_context``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flexkv_core import EngineError

BACKEND = "flexkv"


@dataclass(frozen=True)
class Rule:
    """One option that excludes flexkv.

    Attributes:
        field: Its name in ``ServerArgs``; versions without it pass.
        excludes: Whether a value excludes flexkv.
        reason: Why, and where there is one, what to do instead.
    """

    field: str
    excludes: Callable[[Any], bool]
    reason: str

    @property
    def option(self) -> str:
        """The option as it is written on a command line."""
        return "--" + self.field.replace("_", "-")


def _is_on(value: Any) -> bool:
    return bool(value)


def _is_several(value: Any) -> bool:
    return value is not None and int(value) > 1


_RANKS = "several ranks do not agree on loads and stores yet; use one"

RULES: tuple[Rule, ...] = (
    Rule("disable_radix_cache", _is_on, "flexkv extends the radix cache; leave it enabled"),
    Rule("enable_hierarchical_cache", _is_on, "it is another host tier for the same tree; choose one"),
    Rule("hicache_storage_backend", _is_on, "it belongs to the hierarchical cache; use a flexkv tier"),
    Rule("radix_cache_backend", lambda name: name not in (None, BACKEND), "another backend is chosen"),
    Rule("enable_lmcache", _is_on, "it is another cache below the same tree; choose one"),
    Rule("enable_unified_cache_external_linker", _is_on, "it is another cache below the same tree"),
    Rule("dllm_algorithm", _is_on, "diffusion models rewrite KV that was already stored"),
    Rule("enable_kv_cache_sharding", _is_on, "a slot is then not one row of one pool"),
    Rule("enable_unified_memory", _is_on, "device slots then move while they are copied"),
    Rule("enable_hisparse", _is_on, "KV then leaves the device's pool behind the tree's back"),
    Rule("enable_pdmux", _is_on, "KV is then written on streams that a store cannot wait for"),
    Rule("enable_return_routed_experts", _is_on, "the experts of restored tokens would be those of others"),
    Rule("enable_return_indexer_topk", _is_on, "the indices of restored tokens would be those of others"),
    Rule("kv_canary", lambda mode: mode not in (None, "none"), "it would take restored KV for damaged KV"),
    Rule("speculative_algorithm", _is_on, "the draft model's KV would not be kept"),
    Rule("disaggregation_mode", lambda mode: mode not in (None, "null"), "prefill and decode must be one"),
    Rule("enable_session_radix_cache", _is_on, "it needs SGLang's unified radix cache"),
    Rule("enable_streaming_session", _is_on, "it needs SGLang's unified radix cache"),
    Rule("radix_eviction_policy", lambda name: name == "tlru", "it needs SGLang's unified radix cache"),
    Rule("tp_size", _is_several, _RANKS),
    Rule("pp_size", _is_several, _RANKS),
    Rule("dp_size", _is_several, _RANKS),
    Rule("attn_cp_size", _is_several, _RANKS),
    Rule("dcp_size", _is_several, _RANKS),
    Rule("attn_dp_size", _is_several, _RANKS),
    Rule("enable_dp_attention", _is_on, _RANKS),
)


def is_asked(args: Any) -> bool:
    """Whether either switch asks for flexkv."""
    return bool(getattr(args, "enable_flexkv", False)) or args.radix_cache_backend == BACKEND


def is_asked_twice(args: Any) -> bool:
    """Whether both do."""
    return bool(getattr(args, "enable_flexkv", False)) and args.radix_cache_backend == BACKEND


def conflicts(args: Any) -> list[str]:
    """One line for each option that excludes flexkv, naming it."""
    found = []
    for rule in RULES:
        value = getattr(args, rule.field, None)
        if rule.excludes(value):
            shown = rule.option if value is True else f"{rule.option} {value}"
            found.append(f"{shown}: {rule.reason}")
    return found


def check_arguments(args: Any) -> None:
    """Refuse options that exclude flexkv.

    Raises:
        EngineError: names each of them and its reason.
    """
    _raise("cannot be used with", conflicts(args))


def check_context(ctx: Any) -> None:
    """Refuse models and modes that only SGLang's own resolution has decided.

    Args:
        ctx: SGLang's ``TreeCacheBuildContext``.

    Raises:
        EngineError: names each reason.
    """
    model = type(getattr(ctx.model_config, "hf_config", ctx.model_config)).__name__
    facts = (
        (ctx.is_hybrid_swa, f"sliding-window layers ({model}): their KV has slots of its own"),
        (ctx.is_hybrid_ssm, f"state-space layers ({model}): their state would not be kept"),
        (getattr(ctx, "is_dsa", False), f"sparse attention ({model}): its indexer would not be kept"),
        (ctx.disable_radix_cache, "a disabled radix cache (SGLang has disabled it for this model)"),
        (ctx.enable_hierarchical_cache, "the hierarchical cache"),
        (
            getattr(ctx.params, "is_eagle", False),
            "speculative decoding: the draft model's KV would not be kept",
        ),
        (_is_several(ctx.tp_size), f"{ctx.tp_size} tensor-parallel ranks: {_RANKS}"),
    )
    _raise("does not support", [reason for is_so, reason in facts if is_so])


def _raise(what: str, found: list[str]) -> None:
    if found:
        raise EngineError(f"flexkv {what} " + "; ".join(found))
