"""Every name of SGLang's that the adapter touches: the one table that the probe checks.

A name that is missing refuses the start and is named there.  One that may be missing says in ``without``
what the adapter does then.  ``MEDIA`` is part of the table: a request field that cannot be looked at
must refuse, since what it would have said decides whether KV may be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .seam import Seam

RADIX = "mem_cache/radix_cache.py"
BASE = "mem_cache/base_prefix_cache.py"
REGISTRY = "mem_cache/registry.py"
HOOKS = "plugins/hook_registry.py"
SCHEDULER = "managers/scheduler.py"
POLICY = "managers/schedule_policy.py"
BUDGET = "mem_cache/prefill_budget.py"
BATCH = "managers/schedule_batch.py"
WEIGHTS = "managers/scheduler_components/weight_updater.py"
ARGS = "server_args.py"
MEMORY_ARGS = "arg_groups/fields/memory.py"
POOLS = "mem_cache/memory_pool.py"
ALLOCATOR = "mem_cache/allocator/base.py"
IO = "managers/io_struct.py"

MEDIA = (
    "multimodal_inputs",
    "input_embeds",
    "positional_embed_overrides",
    "token_type_ids",
    "multi_item_delimiter_indices",
)
"""Fields of ``Req`` that must be None for its tokens alone to determine its KV (HS-18)."""


@dataclass(frozen=True)
class Touched:
    """One name.

    Attributes:
        file: Where it stands, below ``sglang/srt``.
        owner: Its class; empty for a module's own names.
        name: The name.
        params: Parameters that it must take; None where it is not called.
        when: Whether a version with these facts needs it.
        without: What the adapter does in versions that lack it; empty: it refuses to start.
        elsewhere: Another file and class where versions have it.
    """

    file: str
    owner: str
    name: str
    params: tuple[str, ...] | None = None
    when: Callable[[Seam], bool] = lambda _seam: True
    without: str = ""
    elsewhere: tuple[str, str] | None = None

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.owner}.{self.name}" if self.owner else f"{self.file}: {self.name}"


def _calls(file: str, owner: str, **params: tuple[str, ...]) -> Iterator[Touched]:
    return (Touched(file, owner, name, names) for name, names in params.items())


def _names(file: str, owner: str, names: str) -> Iterator[Touched]:
    return (Touched(file, owner, name) for name in names.split())


def _if(when: Callable[[Seam], bool], *some: Iterator[Touched]) -> Iterator[Touched]:
    return (replace(one, when=when) for each in some for one in each)


_WEIGHT_CALLS = "update_weights_from_disk update_weights_from_distributed update_weights_from_tensor "
_WEIGHT_CALLS += "update_weights_from_ipc release_memory_occupation"
_REQUEST = "rid extra_key lora_id origin_input_ids output_ids full_untruncated_fill_ids last_node "
_REQUEST += (
    "priority host_hit_length storage_hit_length finished skip_radix_cache_insert to_finish sampling_params"
)
_ADDER = "tree_cache running_batch max_running_requests can_run_list preempt_list rem_total_tokens"
_TREE = "root_node device page_size disable is_eagle req_to_token_pool token_to_kv_pool_allocator"
_CONTEXT = "server_args params is_hybrid_swa is_hybrid_ssm is_dsa tp_worker model_config tp_size tp_rank "
_CONTEXT += "enable_hierarchical_cache disable_radix_cache"

TOUCHED: tuple[Touched, ...] = (
    # ---- the tree, and what is passed to it
    *_calls(
        RADIX,
        "RadixCache",
        __init__=("params",),
        reset=(),
        match_prefix=("params",),
        insert=("params",),
        evict=("params",),
        inc_lock_ref=("node",),
        dec_lock_ref=("node", "params"),
        protected_size=(),
        evictable_size=(),
    ),
    *_names(RADIX, "RadixCache", _TREE),
    *_names(RADIX, "TreeNode", "value parent priority key children lock_ref"),
    *_calls(RADIX, "RadixCache", _delete_leaf=("node",)),
    Touched(RADIX, "RadixCache", "kv_events", without="before 0.5.19 the tree itself is told of removals"),
    Touched(
        "mem_cache/events.py",
        "KVCacheEventMixin",
        "_record_remove_event",
        when=lambda s: not s.kv_record,
    ),
    *_calls(
        RADIX,
        "RadixKey",
        __init__=("token_ids", "extra_key", "is_bigram", "limit"),
        raw_token_ids=(),
        page_aligned=("page_size",),
    ),
    *_calls(BASE, "BasePrefixCache", init_load_back=("params",), check_hicache_events=()),
    *_names(BASE, "MatchPrefixParams", "key req"),
    *_names(BASE, "InsertParams", "key value priority"),
    Touched(BASE, "InsertParams", "inserted_len", without="chunked says the same"),
    Touched(BASE, "InsertParams", "chunked", without="inserted_len says the same"),
    *_names(BASE, "InsertResult", "last_device_node"),
    *_names(BASE, "InitLoadBackParams", "best_match_node host_hit_length req"),
    *_names(BASE, "EvictParams", "num_tokens"),
    *_names(BASE, "EvictResult", "num_tokens_evicted"),
    *_names(BASE, "MatchResult", "last_device_node last_host_node best_match_node host_hit_length"),
    *_if(lambda s: not s.match_gives_length, _names(BASE, "MatchResult", "device_indices")),
    # ---- how KV is handed over: each generation has its own calls
    *_if(
        lambda s: s.generation.name == "FINISHED",
        _calls(
            RADIX,
            "RadixCache",
            cache_finished_req=("req", "is_insert", "kv_len_to_handle"),
            cache_unfinished_req=("req",),
        ),
        _names(RADIX, "RadixCache", "disable_finished_insert"),
    ),
    *_if(
        lambda s: s.generation.name == "INSERT",
        _calls(RADIX, "RadixCache", insert_req=("req", "up_to"), cache_unfinished_req=("req",)),
    ),
    *_if(
        lambda s: s.generation.name == "CHECKPOINT",
        _calls(RADIX, "RadixCache", checkpoint=("req", "up_to"), path_device_indices=("node",)),
    ),
    *_if(lambda s: s.generation.name != "FINISHED", _names(BASE, "BasePrefixCache", "on_release")),
    *_if(lambda s: s.reports_aborts, _names(BASE, "BasePrefixCache", "release_aborted_request")),
    # ---- requests
    *_names(BATCH, "Req", _REQUEST),
    *_names(BATCH, "Req", " ".join(MEDIA)),
    *_if(lambda s: s.has_salt, _names(BATCH, "Req", "cache_salt")),
    *_if(lambda s: s.match_gives_length, _names(BATCH, "Req", "prefix_len")),
    *_if(lambda s: not s.match_gives_length, _names(BATCH, "Req", "prefix_indices")),
    *_if(lambda s: s.has_request_handle, _names(BATCH, "Req", "cache_request_handle")),
    *_if(lambda s: s.has_request_handle, _names(BASE, "CacheRequestHandle", "rid attempt_id")),
    *_if(lambda s: not s.has_request_handle, _names(BATCH, "Req", "retraction_count")),
    *_if(lambda s: s.kv_record, _names(BATCH, "Req", "kv")),
    *_if(lambda s: s.kv_record, _names(BATCH, "ReqKvInfo", "req_pool_idx cache_protected_len")),
    *_if(lambda s: not s.kv_record, _names(BATCH, "Req", "req_pool_idx cache_protected_len")),
    *_calls(BATCH, "ScheduleBatch", check_decode_mem=("selected_indices",)),
    Touched(BATCH, "Req", "discard_output_reason", without="to_finish alone ends the request"),
    *_names(BATCH, "", "FINISH_ABORT"),
    *_names("constants.py", "", "HEALTH_CHECK_RID_PREFIX"),
    # ---- pools
    *_names(POOLS, "ReqToTokenPool", "req_to_token available_size"),
    *_names(POOLS, "KVCache", "size page_size dtype store_dtype layer_num"),
    *_names(POOLS, "MHATokenToKVPool", "k_buffer v_buffer get_kv_size_bytes"),
    *_names(POOLS, "MLATokenToKVPool", "kv_buffer get_kv_size_bytes"),
    *_calls(POOLS, "KVCache", register_layer_transfer_counter=("layer_transfer_counter",)),
    # what pools must not have: were one of these renamed, it would not be seen any more
    *_names(POOLS, "MHATokenToKVPool", "use_hnd kv_cache_layout is_quantized_kv_cache k_scale_buffer"),
    *_names(POOLS, "MLATokenToKVPool", "use_dsa"),
    *_names(POOLS, "KVCache", "layer_shard_enabled"),
    *(
        Touched(POOLS, owner, name, without="no pool of that version does this")
        for owner, name in (
            ("MLATokenToKVPool", "kv_scale_buffer"),
            ("KVCache", "requires_physical_write_loc"),
            ("KVCache", "host_transfer_translate"),
        )
    ),
    *_names(ALLOCATOR, "BaseTokenToKVPoolAllocator", "available_size alloc free get_kvcache page_size"),
    # ---- plug-ins
    *_names(REGISTRY, "", "_RADIX_CACHE_REGISTRY"),
    *_calls(
        REGISTRY,
        "",
        register_radix_cache_backend=("name", "factory"),
        registered_radix_cache_backends=(),
        get_radix_cache_factory=("name",),
    ),
    *_names(REGISTRY, "TreeCacheBuildContext", _CONTEXT),
    *_names("mem_cache/cache_init_params.py", "CacheInitParams", "token_to_kv_pool_allocator is_eagle"),
    *_calls(HOOKS, "HookRegistry", register=("target", "hook", "hook_type"), apply_hooks=()),
    *_calls(HOOKS, "HookRegistry", _apply_target=("target", "hooks")),
    *_names(HOOKS, "HookRegistry", "_hooks _patched"),
    *_names(HOOKS, "HookType", "BEFORE AFTER AROUND REPLACE"),
    # ---- the scheduler
    *_calls(SCHEDULER, "Scheduler", flush_cache=("empty_cache",), is_fully_idle=(), run_batch=("batch",)),
    *_names(SCHEDULER, "Scheduler", "process_batch_result"),
    *_names(BATCH, "ScheduleBatch", "extend_num_tokens forward_mode reqs"),
    *_names("model_executor/forward_batch_info.py", "ForwardMode", "is_extend"),
    *_calls(SCHEDULER, "Scheduler", process_batch_result=("batch", "result")),
    *_names(BATCH, "ScheduleBatch", "forward_mode extend_num_tokens"),
    *_names(SCHEDULER, "Scheduler", "chunked_req _pending_chunked_abort_req"),
    *_if(lambda s: s.flush_ignores_waiting, _names(SCHEDULER, "Scheduler", "_engine_paused")),
    *_calls(
        SCHEDULER,
        "Scheduler",
        load_lora_adapter=("recv_req",),
        load_lora_adapter_from_tensors=("recv_req",),
    ),
    *_calls(POLICY, "PrefillAdder", add_one_req=("req",)),
    *_names(POLICY, "PrefillAdder", _ADDER),
    *_if(lambda s: s.has_memory_budget, _names(POLICY, "PrefillAdder", "memory_budget")),
    *_if(lambda s: s.has_memory_budget, _names(BUDGET, "PrefillBudget", "total_offset")),
    *_if(lambda s: not s.has_memory_budget, _names(POLICY, "PrefillAdder", "rem_total_token_offset")),
    *_names(POLICY, "AddReqResult", "CONTINUE NO_TOKEN OTHER"),
    *_names(POLICY, "", "CLIP_MAX_NEW_TOKENS"),
    # ---- weights and adapters
    *_calls(WEIGHTS, "SchedulerWeightUpdaterManager", **dict.fromkeys(_WEIGHT_CALLS.split(), ("recv_req",))),
    *_names(WEIGHTS, "SchedulerWeightUpdaterManager", "scheduler"),
    *_calls(WEIGHTS, "SchedulerWeightUpdaterManager", check_weights=("recv_req",)),
    *(
        Touched(WEIGHTS, "SchedulerWeightUpdaterManager", name, without="before 0.5.21 there are no sessions")
        for name in ("begin_weight_update", "end_weight_update")
    ),
    *_names(IO, "ReleaseMemoryOccupationReqInput", "tags"),
    *_names(IO, "UpdateWeightFromDiskReqOutput", "success"),
    *_names(IO, "CheckWeightsReqInput", "action"),
    *_names(IO, "CheckWeightsReqOutput", "success"),
    *_names(IO, "LoadLoRAAdapterReqInput", "lora_id"),
    *_names(IO, "LoadLoRAAdapterFromTensorsReqInput", "lora_id"),
    *_names("managers/tp_worker.py", "TpModelWorker", "model_runner"),
    *_names("managers/tp_worker.py", "TpModelWorker", "register_hicache_layer_transfer_counter"),
    *_names("model_executor/model_runner.py", "ModelRunner", "forward_stream lora_manager"),
    *_names("lora/lora_manager.py", "LoRAManager", "lora_refs"),
    *_names("lora/lora_registry.py", "LoRARef", "lora_path lora_name"),
    # ---- arguments
    *_calls(ARGS, "ServerArgs", __post_init__=()),
    Touched(ARGS, "ServerArgs", "resolve_once", without="arguments are resolved by __post_init__"),
    Touched(ARGS, "ServerArgs", "_resolution_finished", without="switches are then looked at once more"),
    *(
        Touched(ARGS, "ServerArgs", name, elsewhere=(MEMORY_ARGS, "Memory"))
        for name in ("enable_flexkv", "radix_cache_backend", "flexkv_config_file")
    ),
)
