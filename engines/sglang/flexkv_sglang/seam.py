"""What the installed SGLang's radix-cache seam looks like: facts read off its source, never its version.

SGLang changed this seam in 0.5.17, .18, .19, .20, .21 and .22.  The facts are read from the syntax
trees of its files (``surface``), without importing one of them, so the same check serves the start of a
server, ``flexkv doctor`` (which must not spend five seconds on an import) and tests over other versions.

``probe`` compares them with every name that the adapter touches (``touched``) and says which differ.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from flexkv_core import EngineError

from .surface import Surface
from .touched import ALLOCATOR, BASE, BATCH, POLICY, RADIX, SCHEDULER, TOUCHED, Touched

OLDEST = (0, 5, 16)
NEWEST = (0, 5, 23)
SUPPORTED = "0.5.16 to 0.5.23"
TESTED = "0.5.23 and 0.5.20 with the real server, 0.5.17 without one, the others by the names that are used"


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
        has_memory_budget: What a pass may still admit stands in ``PrefillAdder.memory_budget`` instead of
            ``PrefillAdder`` itself.
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
    has_memory_budget: bool
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


_FACTS_AGREE: tuple[tuple[str, Callable[[Seam, Surface], bool], str], ...] = (
    (
        "Req.cache_salt",
        lambda seam, surface: seam.has_salt == surface.of(BATCH, "Req").has("cache_salt"),
        "stands in only one of Req and RadixKey: a salt would be ignored",
    ),
    (
        "BasePrefixCache.init_load_back",
        lambda seam, _: seam.load_gives_count == seam.match_gives_length,
        "returns a count and MatchResult a tensor, or the other way round",
    ),
)
"""What must go together, for the adapter to know a version."""


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
        has_memory_budget=surface.of(ALLOCATOR, "BaseTokenToKVPoolAllocator").has("create_prefill_budget"),
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
    findings = _version_findings(surface.version)
    try:
        seam = read_seam(surface)
    except EngineError as exc:
        return [*findings, Finding("RadixCache", str(exc))]
    for touched in TOUCHED:
        if touched.when(seam):
            findings += _compare(touched, surface)
    findings += [Finding(where, what) for where, agrees, what in _FACTS_AGREE if not agrees(seam, surface)]
    if not surface.of(SCHEDULER, "Scheduler").has(seam.tick.rsplit(".", 1)[1]):
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


def _compare(touched: Touched, surface: Surface) -> list[Finding]:
    names = surface.of(touched.file, touched.owner)
    if not names.has(touched.name):
        is_elsewhere = touched.elsewhere and surface.of(*touched.elsewhere).has(touched.name)
        return [] if is_elsewhere or touched.without else [Finding(touched.label, "is missing")]
    takes = names.methods.get(touched.name, [])
    missing = [name for name in touched.params or () if name not in takes]
    if not missing:
        return []
    return [Finding(touched.label, f"takes ({', '.join(takes)}), needs {', '.join(missing)}")]
