"""The only module that imports SGLang, and the words in which the rest of the adapter speaks of it.

Importing this module imports nothing of SGLang: each name is fetched when a function needs it, so
that a plug-in stays light in the processes that have no scheduler.  ``seam`` holds the facts about
the installed version, ``seam_cache`` the base class of our radix cache.

Threads: everything here that takes a request or a tree is for the scheduler's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from importlib import import_module
from typing import Any, NamedTuple

import torch

from .seam import Seam, require_supported
from .touched import MEDIA

_HANDLE = "_flexkv_handle"
_APART = "_flexkv_apart"
_MISSING = object()
_serials = itertools.count(1)


@cache
def seam() -> Seam:
    """The facts about the installed SGLang, checked once per process.

    Raises:
        EngineError: it cannot be served; names the needed range and what differs.
    """
    return require_supported()


@dataclass(frozen=True)
class EngineTypes:
    """SGLang's classes, fetched once; all of them untyped."""

    RadixCache: Any
    RadixKey: Any
    MatchPrefixParams: Any
    InsertParams: Any
    EvictParams: Any


@cache
def types() -> EngineTypes:
    """Import the tree's modules (seconds, unless SGLang itself has done so)."""
    base = import_module("sglang.srt.mem_cache.base_prefix_cache")
    radix = import_module("sglang.srt.mem_cache.radix_cache")
    return EngineTypes(
        RadixCache=radix.RadixCache,
        RadixKey=radix.RadixKey,
        MatchPrefixParams=base.MatchPrefixParams,
        InsertParams=base.InsertParams,
        EvictParams=base.EvictParams,
    )


# --- switching on ------------------------------------------------------------------------------


def register_backend(name: str, factory: Callable[[Any], Any]) -> Any:
    """Register ``factory`` under ``name`` in place of whatever stands there.

    Returns:
        The factory that stood there before, or None.

    Source: sglang 0.5.16 to 0.5.23, mem_cache/registry.py: a second registration raises, so one
    that is there is taken out of the registry's dictionary first.
    """
    registry = import_module("sglang.srt.mem_cache.registry")
    before = registry.get_radix_cache_factory(name)
    if before is factory:
        return before
    if before is not None:
        del registry._RADIX_CACHE_REGISTRY[name]
    registry.register_radix_cache_backend(name, factory)
    return before


def hook(target: str, function: Callable[..., Any], kind: str) -> None:
    """Ask SGLang to put ``function`` around the function at ``target``, a dotted name.

    Args:
        target: Imported in each process that applies hooks, so name light modules or ones that are loaded.
        function: For ``before`` called with the arguments; for ``after`` with result and arguments; for
            ``around`` with the original and the arguments; for ``replace`` instead of it.
        kind: ``before``, ``after``, ``around`` or ``replace``.

    Source: sglang 0.5.16 to 0.5.23, plugins/hook_registry.py: ``apply_hooks`` passes over a target that has
    been patched once, whoever has asked for it.
    """
    hooks = import_module("sglang.srt.plugins.hook_registry")
    registry = hooks.HookRegistry
    registry.register(target, function, hooks.HookType(kind))
    if target in registry._patched:  # another plug-in's hook is in place: SGLang would leave ours out
        registry._apply_target(target, registry._hooks[target][-1:])


def apply_hooks() -> None:
    """Put hooks in place that were registered after SGLang's plug-ins were loaded; those in place stay."""
    import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()


def is_hooked(target: str) -> bool:
    """Whether hooks on ``target`` are really in place (a failure to place one is only logged by SGLang)."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    return target in hooks.HookRegistry._patched


def has_hook(target: str, function: Callable[..., Any]) -> bool:
    """Whether ``function`` is registered on ``target`` already."""
    hooks = import_module("sglang.srt.plugins.hook_registry").HookRegistry._hooks
    return any(entry[1] is function for entry in hooks.get(target, ()))


def arguments_entry() -> str:
    """Dotted name of the method of ``ServerArgs`` that begins to resolve arguments."""
    arguments = import_module("sglang.srt.server_args").ServerArgs
    name = "resolve_once" if hasattr(arguments, "resolve_once") else "__post_init__"
    return f"sglang.srt.server_args.ServerArgs.{name}"


# --- a request ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """One attempt of one request: a retracted request gets a new one, and so does a reused id.

    Attributes:
        rid: The client's request id.
        attempt: Retractions so far.
        serial: Unique in this process.
    """

    rid: str
    attempt: int
    serial: int


class RequestNamespace(NamedTuple):
    """What separates a request's KV from that of others with the same tokens."""

    adapter: str
    extra_key: str
    salt: str


def request_handle(req: Any) -> RequestHandle:
    """The handle of the request's present attempt; it lives on the request and dies with it."""
    attempt = req.cache_request_handle.attempt_id if seam().has_request_handle else req.retraction_count
    known: RequestHandle | None = getattr(req, _HANDLE, None)
    if known is None or known.attempt != attempt or known.rid != req.rid:
        known = RequestHandle(req.rid, attempt, next(_serials))
        setattr(req, _HANDLE, known)
    return known


def request_namespace(req: Any) -> RequestNamespace:
    """Adapter, extra key and salt of a request, each on its own.

    SGLang appends the adapter's id to the extra key without a separator; it is cut off again, so that
    ``("a", "bc")`` and ``("ab", "c")`` differ.  Before 0.5.18 a salt is part of the extra key.

    Source: sglang 0.5.23, managers/schedule_batch.py, Req.__init__.
    """
    adapter = req.lora_id or ""
    extra = req.extra_key or ""
    if adapter and extra.endswith(adapter):
        extra = extra[: -len(adapter)]
    return RequestNamespace(adapter, extra, (req.cache_salt or "") if seam().has_salt else "")


def is_cacheable(req: Any) -> bool:
    """Whether a request's KV may be kept and found by its tokens.

    Tokens alone must determine it: no media, no embeddings in their place (HS-18).  What is apart once
    stays so: SGLang takes media off a request that ends.  A field that is not there cannot have been
    looked at, and so refuses.  SGLang's own health checks are left out too: they would fill tiers with
    one-token blocks.
    """
    if getattr(req, _APART, False):
        return False
    if all(getattr(req, name, _MISSING) is None for name in MEDIA):
        return not str(req.rid).startswith(_health_check())
    setattr(req, _APART, True)
    return False


@cache
def _health_check() -> str:
    """How ids of SGLang's own requests begin."""
    return str(import_module("sglang.srt.constants").HEALTH_CHECK_RID_PREFIX)


def request_row(req: Any) -> int:
    """Number of the request's row in ``req_to_token_pool.req_to_token``."""
    return int(req.kv.req_pool_idx if seam().kv_record else req.req_pool_idx)


def protected_len(req: Any) -> int:
    """How many leading tokens of the row belong to the tree."""
    return int(req.kv.cache_protected_len if seam().kv_record else req.cache_protected_len)


def priority(req: Any) -> int:
    """What SGLang gives a request's nodes in the tree, for its eviction by priority."""
    return int(req.priority or 0)


def prompt_key(req: Any, num_tokens: int) -> Any:
    """SGLang's key of the request's first ``num_tokens`` tokens, a copy (HS-63)."""
    tokens = (req.origin_input_ids + req.output_ids)[:num_tokens]
    salt = {"cache_salt": req.cache_salt} if seam().has_salt else {}
    return types().RadixKey(tokens, req.extra_key, **salt)


def report_storage_tokens(req: Any, num_tokens: int) -> None:
    """Have ``cached_tokens_details`` count ``num_tokens`` of the load as storage instead of host.

    To be called before ``on_load_back`` returns.
    """
    req.storage_hit_length = num_tokens


# --- admission ---------------------------------------------------------------------------------


@cache
def answers() -> Any:
    """The scheduler's words for an admission: ``CONTINUE``, ``NO_TOKEN``, ``OTHER``."""
    return import_module("sglang.srt.managers.schedule_policy").AddReqResult


def lend_tokens(adder: Any, num_tokens: int) -> None:
    """Let this pass admit so many tokens more than it counts as free; fewer, if negative."""
    if seam().has_memory_budget:
        adder.memory_budget.total_offset -= num_tokens
    else:
        adder.rem_total_token_offset -= num_tokens


def free_tokens(adder: Any) -> int:
    """What this pass counts as free."""
    return int(adder.rem_total_tokens)


def admission_tokens(adder: Any, req: Any) -> int:
    """Tokens that SGLang wants to be free for a matched request: its prompt's rest, its answer, a page.

    Source: sglang 0.5.16 to 0.5.23, managers/schedule_policy.py, PrefillAdder.add_one_req.
    """
    most = import_module("sglang.srt.managers.schedule_policy").CLIP_MAX_NEW_TOKENS
    answer = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), most)
    have = req.prefix_len if seam().match_gives_length else len(req.prefix_indices)
    return int(len(req.full_untruncated_fill_ids) - have + answer + adder.tree_cache.page_size)


def has_work(adder: Any) -> bool:
    """Whether a pass has requests that run, or are admitted already."""
    running = adder.running_batch
    return bool(adder.can_run_list) or (running is not None and bool(running.reqs))


def free_rows(adder: Any) -> int:
    """How many more requests a pass may admit."""
    rows = adder.tree_cache.req_to_token_pool.available_size()
    if adder.max_running_requests is not None and adder.running_batch is not None:
        rows = min(rows, adder.max_running_requests - len(adder.running_batch.reqs))
    return int(rows - len(adder.can_run_list))


# --- results -----------------------------------------------------------------------------------


def match_device_len(result: Any) -> int:
    """Tokens of the match that lie on the device."""
    return int(result.device_prefix_len if seam().match_gives_length else len(result.device_indices))


def match_with_host_hit(result: Any, host_hit: int) -> Any:
    """The same match, promising ``host_hit`` further tokens."""
    return result._replace(host_hit_length=host_hit)


def path_slots(tree: Any, node: Any) -> torch.Tensor:
    """Device slots from the root to ``node``: 1-D int64 on the tree's device, a copy."""
    values = []
    while node is not tree.root_node:
        values.append(node.value)
        node = node.parent
    if not values:
        return torch.empty(0, dtype=torch.int64, device=tree.device)
    return torch.cat(values[::-1]).to(torch.int64)


# --- the device's pool -------------------------------------------------------------------------


def alloc_slots(tree: Any, num_tokens: int) -> torch.Tensor | None:
    """Take ``num_tokens`` (whole pages) slots, evicting only what is short (HS-45).

    The path that the load hangs below must be locked before (the scheduler does so round ``init_load_back``).

    Returns:
        1-D int64 slots on the device, or None, and then nothing is held.
    """
    allocator = tree.token_to_kv_pool_allocator
    short = num_tokens - allocator.available_size()
    if short > 0:
        tree.evict(types().EvictParams(num_tokens=short))
    slots: torch.Tensor | None = allocator.alloc(num_tokens)
    return slots


def free_slots(tree: Any, slots: torch.Tensor) -> None:
    """Give whole pages of slots back that no tree node holds and no copy can still touch."""
    if len(slots):
        tree.token_to_kv_pool_allocator.free(slots)


def insert_loaded(
    tree: Any,
    key: Any,
    have: int,
    slots: torch.Tensor,
    free: Callable[[torch.Tensor], None] | None = None,
    *,
    priority: int,
) -> tuple[Any, torch.Tensor] | None:
    """Put loaded slots into the tree by its own insert path; they belong to the tree afterwards (HS-44).

    Tokens that another request has brought in the meantime are not doubled: their loaded slots are freed.
    Nodes are as after a computed prompt: the request that they are for counts its use of them itself.

    Args:
        tree: The radix cache.
        key: SGLang's key whose first ``have + len(slots)`` tokens are meant.
        have: Tokens before the first loaded one; a multiple of the page.
        slots: 1-D int64 on the device; whole pages.
        free: Takes back slots that the tree does not need; default: the allocator, at once.
        priority: The request's (see ``priority``).

    Returns:
        The node that ends at ``have + len(slots)`` and the slots from ``have`` on *as the tree has them*;
        or None if the tokens before ``have`` are no longer there, and then all slots were freed.
    """
    free = free or partial(free_slots, tree)
    end = have + len(slots)
    key = key[:end]
    found = types().RadixCache.match_prefix(tree, types().MatchPrefixParams(key=key))
    there = match_device_len(found)
    node = found.last_device_node
    if there < have:
        free(slots)
        return None
    free(slots[: there - have])
    if there < end:
        value = torch.cat([path_slots(tree, node), slots[there - have :]])
        params = types().InsertParams(key=key, value=value, priority=priority, **_uncounted(end))
        node = tree.insert(params).last_device_node
    return node, path_slots(tree, node)[have:end]


def _uncounted(num_tokens: int) -> dict[str, Any]:
    """Have an insert of so many tokens count no use of nodes.

    Source: sglang 0.5.16 to 0.5.23, mem_cache/radix_cache.py, _insert_helper: each version has one of these.
    """
    known = types().InsertParams.__dataclass_fields__
    if "inserted_len" in known:
        return {"inserted_len": num_tokens}
    return {"chunked": True} if "chunked" in known else {}


def prefill_tokens(batch: Any) -> int:
    """Tokens of prompts that a batch computes; 0 for one that only decodes."""
    return int(batch.extend_num_tokens or 0) if batch.forward_mode.is_extend() else 0


def forward_stream(ctx: Any) -> Any:
    """The stream on which the model writes KV, or None where there are none (CPU).

    A fence taken on it covers every forward pass that was launched so far, the overlapped next step
    included: the scheduler launches step N+1 before it processes the result of step N (HS-1, HS-2).

    Source: sglang 0.5.16 to 0.5.23, model_executor/model_runner.py; managers/scheduler.py.
    """
    stream = ctx.tp_worker.model_runner.forward_stream if ctx.tp_worker is not None else None
    return stream if hasattr(stream, "synchronize") else None


def kv_pool(ctx: Any) -> Any:
    """The device's KV pool."""
    return ctx.params.token_to_kv_pool_allocator.get_kvcache()


# --- a pass whose KV was not there -------------------------------------------------------------


def abort_request(scheduler: Any, req: Any, message: str) -> bool:
    """End a request whose last pass cannot be trusted, as SGLang ends one whose own load has failed.

    Nothing of it goes into the tree, and its client gets status 503.  Between a pass and its results.

    Returns:
        Whether it was still to be ended.

    Source: sglang 0.5.23, mem_cache/unified_radix_cache.py, finish_external_linker_loads;
    managers/scheduler.py, run_batch; before 0.5.22 there is only ``to_finish``.
    """
    req.skip_radix_cache_insert = True
    if req.finished() or isinstance(req.to_finish, _abort_type()):
        return False
    reason = req.to_finish = _abort_type()(message, HTTPStatus.SERVICE_UNAVAILABLE)
    if hasattr(req, "discard_output_reason"):
        req.discard_output_reason = reason
    if scheduler.chunked_req is req:
        scheduler._pending_chunked_abort_req = req
    return True


@cache
def _abort_type() -> Any:
    return import_module("sglang.srt.managers.schedule_batch").FINISH_ABORT
