"""Every name that FlexKV's own configuration knows, and what becomes of it here.

Three fates: a key *sets* fields of the chain; a key is *kept to* the values that are served here
and refused by name with any other; a key has *no effect*, which is said when it is given.  Nothing
is taken and quietly dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..units import KV_DTYPE_NAMES
from .text import kind_of


class Kind(Enum):
    """The type of a key's value, in words."""

    NUMBER = "number"
    WHOLE = "whole number"
    SWITCH = "true or false (also yes, no, 1, 0)"
    TEXT = "text"
    TEXTS = "text with ';' between directories, or list of text"
    SECRET = "secret text"


class Fate(Enum):
    """What becomes of a key."""

    SETS = "sets"
    KEPT_TO = "kept to"
    NO_EFFECT = "no effect"


@dataclass(frozen=True)
class SeedKey:
    """One key of the flat file; its variable is ``FLEXKV_`` and the name in capitals.

    Attributes:
        name: As the flat file writes it.
        kind: Type of its value.
        fate: What becomes of it.
        text: The field that it sets, what is missing for other values, or why it has no effect.
        served: ``KEPT_TO``: the values, in small letters, that change nothing here.
        default: What holds where it is not given, for the reference page.
    """

    name: str
    kind: Kind
    fate: Fate
    text: str
    served: tuple[object, ...] = ()
    default: str = "none"

    @property
    def variable(self) -> str:
        """Its twin in the environment."""
        return f"FLEXKV_{self.name.upper()}"

    def read(self, value: object) -> Any:
        """The value in its type.

        Raises:
            ValueError: it is of another type; the message names the type and not the value.
        """
        fault = f"expected {self.kind.value}, got {kind_of(value)}"
        if isinstance(value, bool) and self.kind in (Kind.NUMBER, Kind.WHOLE):
            raise ValueError(fault)
        if self.kind is Kind.TEXTS:
            return _read_texts(value, fault)
        try:
            return _READERS[self.kind].validate_python(value)
        except ValidationError:
            raise ValueError(fault) from None


_READERS: dict[Kind, TypeAdapter[Any]] = {
    Kind.NUMBER: TypeAdapter(float),
    Kind.WHOLE: TypeAdapter(int),
    Kind.SWITCH: TypeAdapter(bool),
    Kind.TEXT: TypeAdapter(str),
    Kind.SECRET: TypeAdapter(str),
}


def _read_texts(value: object, fault: str) -> list[str]:
    entries = value.split(";") if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(fault)
    return [entry.strip() for entry in entries if entry.strip()]


_S, _K, _N = Fate.SETS, Fate.KEPT_TO, Fate.NO_EFFECT
_NUMBER, _WHOLE, _SWITCH, _TEXT = Kind.NUMBER, Kind.WHOLE, Kind.SWITCH, Kind.TEXT

_DISTRIBUTED = (
    "metadata for sharing between nodes, which is not built yet; blocks go to Redis through a tier "
    "{driver: remote_redis, options: {url: ...}}"
)
_COPY = "the copy engine measures at start which copy is fastest"
_IN_PROCESS = "everything runs in the engine's process"
_NO_WORKER = "copies are made in the engine's process, so there is no worker to meet at a socket"
_NO_URING = "the ssd driver reads and writes with a pool of threads"
_BUILD = "it is an option of a build, and nothing is built here"
_TRACE = "traces are not built yet"

_KEYS = (
    SeedKey("cpu_cache_gb", _NUMBER, _S, "size in GiB of the host tier, per engine process", default="16"),
    SeedKey("ssd_cache_gb", _NUMBER, _S, "size in GiB of the ssd tier; 0 leaves it out", default="0"),
    SeedKey("ssd_cache_dir", Kind.TEXTS, _S, "the ssd tier's directories", default="./ssd_cache"),
    SeedKey(
        "use_hugepage_cpu_buffer", _SWITCH, _S, "the host tier takes reserved huge pages", default="false"
    ),
    SeedKey("kv_cache_dtype", _TEXT, _S, "`kv_cache_dtype`: " + ", ".join(["auto", *sorted(KV_DTYPE_NAMES)])),
    SeedKey("eviction_policy", _TEXT, _S, "`eviction.policy` of every tier", default="lru"),
    SeedKey("evict_ratio", _NUMBER, _S, "`eviction.ratio` of every tier", default="0"),
    SeedKey("evict_start_threshold", _NUMBER, _S, "`eviction.start_threshold` of every tier", default="1"),
    SeedKey("hit_reward_seconds", _NUMBER, _S, "`eviction.hit_reward_s` of every tier", default="0"),
    SeedKey(
        "slru_protected_threshold",
        _WHOLE,
        _S,
        "`eviction.slru_protected_threshold` of every tier",
        default="2",
    ),
    SeedKey(
        "enable_layerwise_transfer",
        _SWITCH,
        _S,
        "`engine.layerwise`",
        default="auto",
    ),
    SeedKey("layerwise_wait_timeout_s", _NUMBER, _S, "`engine.load_deadline_s`; more than 0", default="30"),
    SeedKey("transfer_manager_shutdown_timeout_s", _NUMBER, _S, "`engine.shutdown_deadline_s`", default="30"),
    SeedKey("enable_gds", _SWITCH, _K, "GPU direct storage is not built yet", (False,)),
    SeedKey("enable_nixl", _SWITCH, _K, "GPU direct storage through NIXL is not built yet", (False,)),
    SeedKey(
        "use_hugepage_tmp_buffer", _SWITCH, _K, "huge pages for staging memory are not built yet", (False,)
    ),
    SeedKey("hugepage_size_bytes", _WHOLE, _K, "huge pages other than 2 MiB are not built yet", (2 << 20,)),
    SeedKey("enable_p2p_cpu", _SWITCH, _K, "sharing host memory between nodes is not built yet", (False,)),
    SeedKey("enable_p2p_ssd", _SWITCH, _K, "sharing disks between nodes is not built yet", (False,)),
    SeedKey(
        "enable_3rd_remote",
        _SWITCH,
        _K,
        "this kind of remote tier is not built yet; a chain file adds a remote_redis or s3 tier",
        (False,),
    ),
    SeedKey(
        "use_mooncake_store_backend", _SWITCH, _K, "a tier in a Mooncake store is not built yet", (False,)
    ),
    SeedKey("mooncake_store_config_path", _TEXT, _K, "a tier in a Mooncake store is not built yet", ("",)),
    SeedKey("swa_multi_group", _SWITCH, _K, "models with sliding windows are not built yet", (False,)),
    SeedKey("instance_num", _WHOLE, _K, "several engines on one cache are not built yet", (1,)),
    SeedKey("instance_id", _WHOLE, _K, "several engines on one cache are not built yet", (0,)),
    SeedKey("server_client_mode", _SWITCH, _K, "a cache in a server process is not built yet", (False,)),
    SeedKey("server_launch_mode", _TEXT, _K, "a cache in a server process is not built yet", ("embedded",)),
    SeedKey("enable_metrics", _SWITCH, _K, "an HTTP port for metrics is not built yet", (False,)),
    SeedKey("cpu_layout", _TEXT, _K, "other layouts than block first are not built", ("blockfirst",)),
    SeedKey("ssd_layout", _TEXT, _K, "other layouts than block first are not built", ("blockfirst",)),
    SeedKey("remote_layout", _TEXT, _K, "other layouts than block first are not built", ("blockfirst",)),
    SeedKey("gds_layout", _TEXT, _K, "GPU direct storage is not built yet", ("blockfirst",)),
    SeedKey(
        "kv_shared_across_ranks_mode",
        _TEXT,
        _K,
        "modes for ranks with equal KV are not built yet",
        ("sharded",),
    ),
    SeedKey("enable_trace", _SWITCH, _K, _TRACE, (False,)),
    SeedKey("transfer_trace", _SWITCH, _K, _TRACE, (False,)),
    SeedKey("enable_mps", _SWITCH, _K, "no daemon of the whole machine is ever started here", (False,)),
    SeedKey("enable_collective_sync", _SWITCH, _K, "ranks that do not agree are not built", (True,)),
    SeedKey("nvcomp_batch_size", _WHOLE, _K, "compression on the GPU is not built yet", (0,)),
    SeedKey("enable_flexkv", _SWITCH, _K, "switch it off by leaving out the engine's flag", (True,)),
    SeedKey("maybe_skip_put", _SWITCH, _K, "leaving out stores by chance is not built", (False,)),
    SeedKey("redis_host", _TEXT, _N, _DISTRIBUTED),
    SeedKey("redis_port", _WHOLE, _N, _DISTRIBUTED),
    SeedKey("redis_password", Kind.SECRET, _N, _DISTRIBUTED),
    SeedKey("local_ip", _TEXT, _N, _DISTRIBUTED),
    SeedKey("node_ttl_seconds", _WHOLE, _N, _DISTRIBUTED),
    SeedKey("local_zmq_ip", _TEXT, _N, _DISTRIBUTED),
    SeedKey("local_zmq_port", _WHOLE, _N, _DISTRIBUTED),
    *(
        SeedKey(f"mooncake_store_{name}", _WHOLE, _N, "the topology is read from the engine")
        for name in ("pp_rank", "pp_size", "node_layer_start", "node_layer_end", "total_layers")
    ),
    SeedKey("server_recv_port", _TEXT, _N, _IN_PROCESS),
    SeedKey("master_host", _TEXT, _N, _IN_PROCESS),
    SeedKey("master_ports", _TEXT, _N, _IN_PROCESS),
    SeedKey("worker_shutdown_timeout_s", _NUMBER, _N, _IN_PROCESS),
    SeedKey("trt_subprocess_host", _TEXT, _N, _IN_PROCESS),
    SeedKey("trt_subprocess_ports", _TEXT, _N, _IN_PROCESS),
    SeedKey("vmm_fd_sock_dir", _TEXT, _N, _IN_PROCESS),
    SeedKey("py_metrics_port", _WHOLE, _N, "an HTTP port for metrics is not built yet"),
    SeedKey("cpp_metrics_port", _WHOLE, _N, "an HTTP port for metrics is not built yet"),
    SeedKey("index_accel", _SWITCH, _N, "there is one index, in Python"),
    SeedKey(
        "layerwise_notify_mode", _TEXT, _N, "an event tells a GPU of a layer's end, a descriptor a processor"
    ),
    SeedKey("layerwise_eventfd_socket", _TEXT, _N, _NO_WORKER),
    SeedKey("layerwise_eventfd_connect_max_retries", _WHOLE, _N, _NO_WORKER),
    SeedKey("use_ce_transfer_h2d", _SWITCH, _N, _COPY),
    SeedKey("use_ce_transfer_d2h", _SWITCH, _N, _COPY),
    SeedKey("transfer_num_cta_h2d", _WHOLE, _N, _COPY),
    SeedKey("transfer_num_cta_d2h", _WHOLE, _N, _COPY),
    SeedKey("ce_segment_threshold", _WHOLE, _N, _COPY),
    SeedKey("ce_path_opt", _SWITCH, _N, _COPY),
    SeedKey("enable_ce_memcpy2d", _SWITCH, _N, _COPY),
    SeedKey("ce_gather_threads", _WHOLE, _N, _COPY),
    SeedKey("ce_gather_nt", _SWITCH, _N, _COPY),
    SeedKey("cudahost_chunk_size_gb", _NUMBER, _N, "the host pool is registered once, by its only process"),
    SeedKey("hugetlbfs_dir", _TEXT, _N, "huge pages are mapped without a file system"),
    SeedKey("iouring_entries", _WHOLE, _N, _NO_URING),
    SeedKey("iouring_flags", _WHOLE, _N, _NO_URING),
    SeedKey("ssd_io_opt", _SWITCH, _N, _NO_URING),
    SeedKey("max_file_size_gb", _NUMBER, _N, "the ssd tier has an option for it: slab"),
    *(
        SeedKey(name, _WHOLE, _N, _DISTRIBUTED)
        for name in (
            "lt_pool_initial_capacity",
            "refresh_batch_size",
            "rebuild_interval_ms",
            "idle_sleep_ms",
            "lease_ttl_ms",
            "safety_ttl_ms",
            "renew_lease_ms",
            "reset_barrier_timeout_ms",
            "reset_barrier_poll_ms",
        )
    ),
    SeedKey("trace_file_path", _TEXT, _N, _TRACE),
    *(
        SeedKey(f"trace_{name}", _WHOLE, _N, _TRACE)
        for name in ("max_file_size_mb", "max_files", "flush_interval_ms")
    ),
    SeedKey("logging_prefix", _TEXT, _N, "log lines always begin with [FlexKV]"),
    SeedKey("log_level", _TEXT, _N, "the engine's log level holds"),
    SeedKey(
        "num_log_interval_requests", _WHOLE, _N, "each finished transfer has its line: engine.log_transfers"
    ),
    SeedKey("nixl_backend_plugin", _TEXT, _N, "GPU direct storage through NIXL is not built yet"),
    SeedKey("enable_swa_transfer", _SWITCH, _N, "models with sliding windows are not built yet"),
    *(
        SeedKey(name, _TEXT, _N, _BUILD)
        for name in ("enable_p2p", "enable_cfs", "enable_nvcomp", "enable_cputest", "debug")
    ),
)

SEED_KEYS: dict[str, SeedKey] = {key.name: key for key in _KEYS}

TIER_KEYS = ("cpu_cache_gb", "ssd_cache_gb", "ssd_cache_dir", "use_hugepage_cpu_buffer")
"""The keys that make or change tiers."""

EVERY_TIER_KEYS = {
    "eviction_policy": "policy",
    "evict_ratio": "ratio",
    "evict_start_threshold": "start_threshold",
    "hit_reward_seconds": "hit_reward_s",
    "slru_protected_threshold": "slru_protected_threshold",
}
"""Key -> the field of ``eviction`` that it sets in every tier."""

FIELD_KEYS: dict[str, tuple[str, ...]] = {
    "kv_cache_dtype": ("kv_cache_dtype",),
    "enable_layerwise_transfer": ("engine", "layerwise"),
    "layerwise_wait_timeout_s": ("engine", "load_deadline_s"),
    "transfer_manager_shutdown_timeout_s": ("engine", "shutdown_deadline_s"),
}
"""Key -> the field of the chain that it sets."""
