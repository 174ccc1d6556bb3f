"""What the installed SGLang's radix-cache seam looks like: facts read off its source, never its version.

SGLang changed this seam in 0.5.17, .18, .19, .20, .21 and .22.  The facts are read from the syntax
trees of seven files, without importing one of them, so the same check serves the start of a
server, ``flexkv doctor`` (which must not spend five seconds on an import) and tests over other versions.

``probe`` compares them with what the adapter relies on and names each method that differs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path

from flexkv_core import EngineError

OLDEST = (0, 5, 16)
NEWEST = (0, 5, 23)
SUPPORTED = "0.5.16 to 0.5.23"
TESTED = "0.5.23 and 0.5.20 with the real server, the others by their signatures"


class Generation(str, Enum):
    """By which methods the scheduler hands a request's KV to the tree."""

    FINISHED = "cache_finished_req + cache_unfinished_req"
    INSERT = "insert_req + cache_unfinished_req"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Finding:
    """One difference between the installed seam and what the adapter needs.

    Attributes:
        where: The method, field or file, as ``RadixCache.match_prefix``.
        problem: What is different about it.
    """

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True)
class Seam:
    """Facts about one installed SGLang; the adapter branches on these and on nothing else.

    Attributes:
        version: As the distribution states it.
        generation: How KV reaches the tree.
        match_gives_length: ``MatchResult.device_prefix_len`` (an int) instead of ``device_indices``.
        load_gives_count: ``init_load_back`` returns ``(int, node)`` instead of ``(tensor, node)``.
        load_may_defer: ``None`` from ``init_load_back`` means "ask again later"; where it is False the
            adapter's hook on ``PrefillAdder.add_one_req`` gives the same effect.
        load_is_all_or_none: A short load raises in the scheduler and ends it.
        kv_record: Row number and protected length stand in ``req.kv`` instead of ``req``.
        has_salt: ``RadixKey`` and ``Req`` have ``cache_salt``; before, it is part of ``extra_key``.
        has_request_handle: ``req.cache_request_handle`` counts attempts; before, ``retraction_count`` does.
        has_release_call: SGLang calls ``on_release``; before, the end of ``cache_finished_req`` is it.
        reports_aborts: ``finish(handle, ABORT)`` is called for requests that leave the queue; before,
            nobody tells the cache (only with HiCache storage).
        has_batch_end: ``flush_pending_backups`` is called after each batch's results.
        releases_host: ``release_host_resources`` is called at a graceful end; before, an exit handler is.
        tick: Dotted name of the scheduler's method that calls ``check_hicache_events``.
        tick_is_own_method: Whether that method does nothing else, so that a hook may follow it.
        flush_ignores_waiting: A paused engine is flushed although requests wait.
    """

    version: str
    generation: Generation
    match_gives_length: bool
    load_gives_count: bool
    load_may_defer: bool
    load_is_all_or_none: bool
    kv_record: bool
    has_salt: bool
    has_request_handle: bool
    has_release_call: bool
    reports_aborts: bool
    has_batch_end: bool
    releases_host: bool
    tick: str
    tick_is_own_method: bool
    flush_ignores_waiting: bool

    def describe(self) -> str:
        """One line for logs and ``flexkv doctor``."""
        later = "asks again natively" if self.load_may_defer else "asks again through a hook"
        return f"SGLang {self.version}: {self.generation.value}; a load that is not ready {later}"


@dataclass
class _Class:
    methods: dict[str, list[str]] = field(default_factory=dict)
    returns: dict[str, str] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)


class Surface:
    """The classes and functions of an SGLang source tree, parsed when asked for."""

    def __init__(self, root: Path) -> None:
        """``root`` is the folder of the package ``sglang``."""
        self.root = root
        self._classes: dict[str, dict[str, _Class]] = {}

    @cached_property
    def version(self) -> str:
        """The version that the package states, or ``unknown``."""
        path = self.root / "_version.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = re.search(r"^__version__\s*=.*?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return found.group(1) if found else "unknown"

    def text(self, file: str) -> str:
        """Source of ``file`` below ``srt``; empty if there is none."""
        path = self.root / "srt" / file
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def of(self, file: str, name: str) -> _Class:
        """Class ``name`` of ``file``; module-level functions are the methods of class ``""``."""
        if file not in self._classes:
            self._classes[file] = dict(_classes(ast.parse(self.text(file))))
        return self._classes[file].get(name, _Class())


def _classes(tree: ast.Module) -> Iterator[tuple[str, _Class]]:
    module = _Class()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, _class_of(node.body)
        elif isinstance(node, ast.FunctionDef):
            _add_method(module, node)
    yield "", module


def _class_of(body: Sequence[ast.stmt]) -> _Class:
    found = _Class()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _add_method(found, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.fields.append(node.target.id)
    return found


def _add_method(found: _Class, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    args = node.args
    names = [a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs] if a.arg not in ("self", "cls")]
    if args.kwarg:
        names.append("**")
    found.methods[node.name] = names
    found.returns[node.name] = ast.unparse(node.returns) if node.returns else ""


RADIX = "mem_cache/radix_cache.py"
BASE = "mem_cache/base_prefix_cache.py"
REGISTRY = "mem_cache/registry.py"
HOOKS = "plugins/hook_registry.py"
SCHEDULER = "managers/scheduler.py"
POLICY = "managers/schedule_policy.py"
BATCH = "managers/schedule_batch.py"
WEIGHTS = "managers/scheduler_components/weight_updater.py"
ARGS = "server_args.py"

_METHODS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (RADIX, "RadixCache", "__init__", ("params",)),
    (RADIX, "RadixCache", "reset", ()),
    (RADIX, "RadixCache", "match_prefix", ("params",)),
    (RADIX, "RadixCache", "insert", ("params",)),
    (RADIX, "RadixCache", "evict", ("params",)),
    (RADIX, "RadixCache", "inc_lock_ref", ("node",)),
    (RADIX, "RadixCache", "dec_lock_ref", ("node", "params")),
    (RADIX, "RadixCache", "protected_size", ()),
    (RADIX, "RadixCache", "evictable_size", ()),
    (RADIX, "RadixKey", "__init__", ("token_ids", "extra_key", "is_bigram", "limit")),
    (RADIX, "RadixKey", "raw_token_ids", ()),
    (RADIX, "RadixKey", "page_aligned", ("page_size",)),
    (BASE, "BasePrefixCache", "init_load_back", ("params",)),
    (BASE, "BasePrefixCache", "check_hicache_events", ()),
    (REGISTRY, "", "register_radix_cache_backend", ("name", "factory")),
    (REGISTRY, "", "registered_radix_cache_backends", ()),
    (REGISTRY, "", "get_radix_cache_factory", ("name",)),
    (HOOKS, "HookRegistry", "register", ("target", "hook", "hook_type")),
    (HOOKS, "HookRegistry", "apply_hooks", ()),
    (SCHEDULER, "Scheduler", "flush_cache", ("empty_cache",)),
    (SCHEDULER, "Scheduler", "is_fully_idle", ()),
    (POLICY, "PrefillAdder", "add_one_req", ("req",)),
    (WEIGHTS, "SchedulerWeightUpdaterManager", "update_weights_from_disk", ("recv_req",)),
    (WEIGHTS, "SchedulerWeightUpdaterManager", "update_weights_from_distributed", ("recv_req",)),
    (WEIGHTS, "SchedulerWeightUpdaterManager", "update_weights_from_tensor", ("recv_req",)),
    (WEIGHTS, "SchedulerWeightUpdaterManager", "update_weights_from_ipc", ("recv_req",)),
    (WEIGHTS, "SchedulerWeightUpdaterManager", "release_memory_occupation", ("recv_req",)),
    (ARGS, "ServerArgs", "__post_init__", ()),
)
_FIELDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (BASE, "MatchPrefixParams", ("key", "req")),
    (BASE, "InsertParams", ("key", "value", "priority")),
    (BASE, "InitLoadBackParams", ("best_match_node", "host_hit_length", "req")),
    (BASE, "EvictParams", ("num_tokens",)),
    (BASE, "EvictResult", ("num_tokens_evicted",)),
    (BASE, "MatchResult", ("last_device_node", "last_host_node", "best_match_node", "host_hit_length")),
    (
        REGISTRY,
        "TreeCacheBuildContext",
        (
            "server_args",
            "params",
            "is_hybrid_swa",
            "is_hybrid_ssm",
            "is_dsa",
            "tp_worker",
            "model_config",
            "tp_size",
            "tp_rank",
        ),
    ),
)
_BY_GENERATION: dict[Generation, tuple[tuple[str, tuple[str, ...]], ...]] = {
    Generation.FINISHED: (
        ("cache_finished_req", ("req", "is_insert", "kv_len_to_handle")),
        ("cache_unfinished_req", ("req",)),
    ),
    Generation.INSERT: (("insert_req", ("req", "up_to")), ("cache_unfinished_req", ("req",))),
    Generation.CHECKPOINT: (("checkpoint", ("req", "up_to")), ("path_device_indices", ("node",))),
}


def installed_root() -> Path | None:
    """Folder of the installed package ``sglang``, which is not imported; None without one."""
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def read_seam(root: Path | Surface | None = None) -> Seam:
    """The facts of the SGLang at ``root`` (default: the installed one).

    Raises:
        EngineError: there is no SGLang, or its seam is none that this module knows.
    """
    surface = _surface(root)
    radix = surface.of(RADIX, "RadixCache").methods
    base = surface.of(BASE, "BasePrefixCache")
    scheduler = surface.of(SCHEDULER, "Scheduler").methods
    load = base.returns.get("init_load_back", "")
    own_tick = "_process_hicache_events" in scheduler
    return Seam(
        version=surface.version,
        generation=_generation(radix, surface.version),
        match_gives_length="device_prefix_len" in surface.of(BASE, "MatchResult").fields,
        load_gives_count="Tuple[int" in load,
        load_may_defer=load.startswith("Optional"),
        load_is_all_or_none="promised_host_hit" in surface.text(POLICY),
        kv_record="cache_protected_len" in surface.of(BATCH, "ReqKvInfo").fields,
        has_salt="cache_salt" in surface.of(RADIX, "RadixKey").methods.get("__init__", ()),
        has_request_handle=bool(surface.of(BASE, "CacheRequestHandle").fields),
        has_release_call="on_release" in base.methods,
        reports_aborts="finish" in base.methods,
        has_batch_end="flush_pending_backups" in base.methods,
        releases_host="release_host_resources" in base.methods,
        tick="sglang.srt.managers.scheduler.Scheduler."
        + ("_process_hicache_events" if own_tick else "_get_new_batch_prefill_raw"),
        tick_is_own_method=own_tick,
        flush_ignores_waiting="ignore_waiting" in scheduler.get("is_fully_idle", ()),
    )


def probe(root: Path | Surface | None = None) -> list[Finding]:
    """Everything in which the SGLang at ``root`` differs from what the adapter needs; [] is good.

    Takes about a second (the scheduler is a long file) and imports nothing.
    """
    try:
        surface = _surface(root)
    except EngineError as exc:
        return [Finding("sglang", str(exc))]
    findings = [*_version_findings(surface.version), *_method_findings(surface), *_field_findings(surface)]
    try:
        seam = read_seam(surface)
    except EngineError as exc:
        return [*findings, Finding("RadixCache", str(exc))]
    radix = surface.of(RADIX, "RadixCache").methods
    for name, params in _BY_GENERATION[seam.generation]:
        findings += _compare(f"RadixCache.{name}", radix.get(name), params)
    if not seam.match_gives_length and "device_indices" not in surface.of(BASE, "MatchResult").fields:
        findings.append(Finding("MatchResult", "has neither device_prefix_len nor device_indices"))
    if seam.tick.rsplit(".", 1)[1] not in surface.of(SCHEDULER, "Scheduler").methods:
        findings.append(Finding("Scheduler", "has no method that calls check_hicache_events"))
    return findings


def require_supported(root: Path | Surface | None = None) -> Seam:
    """The facts, or one sentence about why this SGLang cannot be served.

    Raises:
        EngineError: names the needed range and each difference.
    """
    surface = _surface(root)
    findings = probe(surface)
    if findings:
        raise EngineError(
            f"flexkv needs SGLang {SUPPORTED} and found {surface.version}, which differs in: "
            + "; ".join(map(str, findings))
        )
    return read_seam(surface)


def _surface(root: Path | Surface | None) -> Surface:
    if isinstance(root, Surface):
        return root
    root = root or installed_root()
    if root is None:
        raise EngineError(f"SGLang is not installed; flexkv's adapter needs {SUPPORTED}")
    return Surface(root)


def _generation(radix: dict[str, list[str]], version: str) -> Generation:
    for name, generation in (
        ("checkpoint", Generation.CHECKPOINT),
        ("insert_req", Generation.INSERT),
        ("cache_finished_req", Generation.FINISHED),
    ):
        if name in radix:
            return generation
    raise EngineError(
        f"SGLang {version} has no RadixCache with checkpoint, insert_req or cache_finished_req; "
        f"flexkv needs {SUPPORTED}"
    )


def _version_findings(version: str) -> list[Finding]:
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if OLDEST <= numbers <= NEWEST:
        return []
    return [Finding("version", f"{version} is outside {SUPPORTED}")]


def _method_findings(surface: Surface) -> list[Finding]:
    return [
        finding
        for file, owner, name, params in _METHODS
        for finding in _compare(
            f"{owner}.{name}" if owner else f"{file}: {name}",
            surface.of(file, owner).methods.get(name),
            params,
        )
    ]


def _field_findings(surface: Surface) -> list[Finding]:
    return [
        Finding(f"{owner}.{name}", "is missing")
        for file, owner, names in _FIELDS
        for name in names
        if name not in surface.of(file, owner).fields
    ]


def _compare(where: str, found: list[str] | None, needed: tuple[str, ...]) -> list[Finding]:
    if found is None:
        return [Finding(where, "is missing")]
    missing = [name for name in needed if name not in found]
    if not missing:
        return []
    return [Finding(where, f"takes ({', '.join(found)}), needs {', '.join(missing)}")]
