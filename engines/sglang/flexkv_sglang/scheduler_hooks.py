"""Hooks on SGLang's scheduler: what the radix-cache seam does not tell a cache.

They are set in the scheduler's process while it builds the cache, when all their targets have long been
imported and nothing has run yet.  A hook that SGLang fails to place stops the start: it would only log it.

Threads: all of them run on the scheduler's.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

from flexkv_core import EngineError

from . import compat
from .admission import admit
from .seam_cache import SeamRadixCache

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
ADAPTER_CALLS = ("load_lora_adapter", "load_lora_adapter_from_tensors")
WEIGHT_CALLS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)
"""Calls that change weights.  Between the last two they are written from outside, without a call."""


class _Watched:
    """The process's cache, and whether its weights are being changed now."""

    def __init__(self) -> None:
        self.cache: Callable[[], SeamRadixCache | None] = lambda: None
        self.weights_are_changing = False
        self.targets: list[str] = []


_watched = _Watched()


def install(cache: SeamRadixCache, *, is_ticked: bool) -> None:
    """Watch the scheduler on behalf of ``cache``; a later call watches for another one.

    Args:
        cache: The scheduler's tree.
        is_ticked: Whether SGLang itself calls ``check_hicache_events`` (with ``enable_flexkv``).

    Raises:
        EngineError: SGLang did not place a hook.
    """
    _watched.cache = weakref.ref(cache)
    if not _watched.targets:
        _set_hooks(is_ticked=is_ticked, times_prefill=cache.times_prefill)
    if not cache.seam.releases_host:
        atexit.register(_end, weakref.ref(cache))


def _set_hooks(*, is_ticked: bool, times_prefill: bool) -> None:
    seam = compat.seam()
    if times_prefill:
        _hook(f"{_SCHEDULER}.process_batch_result", _after_results, "after")
    _hook(f"{_SCHEDULER}.flush_cache", _around_flush, "around")
    manager = import_module(_WEIGHTS.rpartition(".")[0]).SchedulerWeightUpdaterManager
    for name in WEIGHT_CALLS:
        if hasattr(manager, name):
            _hook(f"{_WEIGHTS}.{name}", _around_weights(name), "around")
    _hook(f"{_WEIGHTS}.check_weights", _around_check, "around")
    _hook(f"{_WEIGHTS}.release_memory_occupation", _before_sleep, "before")
    for name in ADAPTER_CALLS:
        _hook(f"{_SCHEDULER}.{name}", _after_adapter, "after")
    _hook(f"{_SCHEDULER}.run_batch", _before_pass, "before")
    _hook(f"{_SCHEDULER}.run_batch", _after_pass, "after")
    if not is_ticked:
        _hook(
            seam.tick,
            _tick_after if seam.tick_is_own_method else _tick_before,
            "after" if seam.tick_is_own_method else "before",
        )
    _hook(f"{_ADDER}.add_one_req", admit, "around")
    _hook(f"{_BATCH}.check_decode_mem", _around_decode_check, "around")
    compat.apply_hooks()
    missing = [target for target in _watched.targets if not compat.is_hooked(target)]
    if missing:
        raise EngineError(
            f"flexkv cannot watch SGLang {seam.version}: no hook on {', '.join(missing)} (see the log above)"
        )


def _hook(target: str, function: Callable[..., Any], kind: str) -> None:
    compat.hook(target, function, kind)
    if target not in _watched.targets:
        _watched.targets.append(target)


def _around_flush(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """A flush waits for copies, or is refused; after a change of weights SGLang takes no refusal.

    One that SGLang refuses itself, because requests run, waits for nothing.
    """
    cache = _watched.cache()
    if cache is not None and _is_idle(scheduler) and not cache.may_flush():
        if not _watched.weights_are_changing:
            logger.warning("[FlexKV] flush refused: copies are still under way; try again")
            return False
        logger.error("[FlexKV] flushing after a change of weights although copies are still under way")
    return original(scheduler, *args, **kwargs)


def _is_idle(scheduler: Any) -> bool:
    """What ``flush_cache`` asks first."""
    if compat.seam().flush_ignores_waiting:
        return bool(scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused))
    return bool(scheduler.is_fully_idle())


def _around_weights(name: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _watched.cache()
        if cache is None:
            return original(manager, *args, **kwargs)
        cache.on_weights_changed(name)
        _watched.weights_are_changing = True
        is_ok = False
        try:
            answer = original(manager, *args, **kwargs)
            is_ok = bool(getattr(answer, "success", False))
        finally:
            _watched.weights_are_changing = False
            cache.on_weights_settled(name, lambda: _flush_if_idle(manager.scheduler), is_ok=is_ok)
        return answer

    return around


def _around_check(
    original: Callable[..., Any], manager: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    """SGLang's test of an update begins with random weights."""
    if recv_req.action != "reset_tensors":
        return original(manager, recv_req, *args, **kwargs)
    return _around_weights("check_weights")(original, manager, recv_req, *args, **kwargs)


def _flush_if_idle(scheduler: Any) -> bool:
    """SGLang's own flush, which is refused, with a warning, while requests run."""
    return _is_idle(scheduler) and bool(scheduler.flush_cache(empty_cache=False))


def _after_adapter(result: Any, _scheduler: Any, recv_req: Any, *_: Any, **__: Any) -> None:
    """An adapter was loaded; under an id that was there before, if SGLang had made room in between."""
    cache = _watched.cache()
    if cache is not None and getattr(result, "success", True):
        cache.on_adapter_loaded(recv_req.lora_id)


def _before_sleep(_manager: Any, recv_req: Any, *_: Any, **__: Any) -> None:
    """KV memory is unmapped before SGLang flushes, so copies must have ended before it begins."""
    cache = _watched.cache()
    tags = getattr(recv_req, "tags", None)
    if cache is None:
        return
    if not tags or "kv_cache" in tags:
        cache.on_sleep()
    if not tags or "weights" in tags:
        cache.on_weights_changed("release_memory_occupation")


def _before_pass(_scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """A forward pass is about to be launched; it may queue behind the one before it."""
    cache = _watched.cache()
    if cache is None:
        return
    if cache.times_prefill:
        cache.on_pass_begins(compat.prefill_tokens(batch))
    cache.on_pass_reads(batch)


def _around_decode_check(
    original: Callable[..., bool], batch: Any, selected_indices: Any = None, *args: Any, **kwargs: Any
) -> bool:
    """Whether requests may go on: for want of slots SGLang retracts some, and aborts the last one."""
    cache = _watched.cache()
    if cache is None:
        return original(batch, selected_indices, *args, **kwargs)
    with cache.deciding(len(batch.reqs if selected_indices is None else selected_indices)):
        return original(batch, selected_indices, *args, **kwargs)


def _after_results(*_: Any, **__: Any) -> None:
    """The results of the oldest pass are there."""
    cache = _watched.cache()
    if cache is not None:
        cache.on_pass_ends()


def _tick_after(_result: Any, *_: Any, **__: Any) -> None:
    _tick()


def _tick_before(*_: Any, **__: Any) -> None:
    _tick()


def _tick() -> None:
    cache = _watched.cache()
    if cache is not None:
        cache.check_hicache_events()


def _after_pass(_result: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """A forward pass was launched and its results were not looked at yet."""
    cache = _watched.cache()
    if cache is not None:
        cache.on_pass_launched(scheduler, batch)


def _end(cache: Callable[[], SeamRadixCache | None]) -> None:
    found = cache()
    if found is not None:
        found.release_host_resources()
