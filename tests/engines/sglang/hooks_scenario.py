"""Sets our hooks on SGLang's real scheduler classes and calls those, and prints what happened.

A script like ``seam_scenario``: one line of JSON.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

from seam_scenario import World

from flexkv_sglang import compat, scheduler_hooks
from flexkv_sglang.handover import Verdict


def call(function, *args, **kwargs):
    """The result, or the name of what the original raised on our stand-in for a scheduler."""
    try:
        return function(*args, **kwargs)
    except Exception as exc:
        return type(exc).__name__


def main():
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    world, out = World(1), {}
    cache = world.cache
    events = []
    cache.may_flush = lambda: events.append("may flush") or cache.answer
    cache.on_weights_changed = lambda reason: events.append(reason)
    cache.on_sleep = lambda: events.append("sleep")
    cache.answer = True
    cache.times_prefill = True
    cache.on_pass_begins = lambda num_tokens: events.append(f"pass of {num_tokens}")
    foreign = []
    compat.hook(
        f"{scheduler_hooks._SCHEDULER}.flush_cache", lambda *_, **__: foreign.append("flush"), "before"
    )
    compat.apply_hooks()  # another plug-in's, in place long before ours
    scheduler_hooks.install(cache, is_ticked=False)
    scheduler_hooks.install(cache, is_ticked=False)  # a second cache in one process: no second set of hooks
    out["targets"] = scheduler_hooks._watched.targets

    idle = [False]
    scheduler = SimpleNamespace(
        is_fully_idle=lambda **_: events.append("idle?") or idle[0],
        waiting_queue=[],
        running_batch=SimpleNamespace(reqs=[]),
        _engine_paused=False,
        enable_hierarchical_cache=False,
        enable_unified_cache_external_linker=False,
        enable_lmcache=False,
        server_args=SimpleNamespace(enable_flexkv=False),
        grammar_manager=None,
    )
    out["flush while busy"] = [call(Scheduler.flush_cache, scheduler), events[:]]
    idle[0], cache.answer = True, False
    events.clear()
    out["flush refused"] = [call(Scheduler.flush_cache, scheduler), events[:]]
    cache.answer = True
    events.clear()
    out["flush"] = [call(Scheduler.flush_cache, scheduler), events[:]]
    out["another plug-in's hook"] = foreign
    events.clear()

    settled = []
    cache.on_weights_settled = lambda call, flush, is_ok: settled.append([call, is_ok])
    manager = SimpleNamespace(scheduler=scheduler, flush_cache=lambda **_: Scheduler.flush_cache(scheduler))
    manager._observe_weight_load = lambda _: (_ for _ in ()).throw(RuntimeError)
    for name in scheduler_hooks.WEIGHT_CALLS:
        if hasattr(SchedulerWeightUpdaterManager, name):
            call(getattr(SchedulerWeightUpdaterManager, name), manager, SimpleNamespace())
    out["weights"] = events[:]
    out["told to end"] = settled
    out["weights settled"] = not scheduler_hooks._watched.weights_are_changing
    events.clear()
    for action in ("checksum", "reset_tensors"):
        request = SimpleNamespace(action=action)
        call(SchedulerWeightUpdaterManager.check_weights, manager, request)
    out["checks"] = events[:]
    events.clear()
    for tags in (None, ["kv_cache"], ["weights"], ["cuda_graph"]):
        call(SchedulerWeightUpdaterManager.release_memory_occupation, manager, SimpleNamespace(tags=tags))
    out["sleep"] = events[:]

    events.clear()
    for is_extend in (True, False):
        mode = SimpleNamespace(is_extend=lambda is_extend=is_extend: is_extend)
        call(Scheduler.run_batch, scheduler, SimpleNamespace(forward_mode=mode, extend_num_tokens=7))
    out["passes"] = [event for event in events if event.startswith("pass of")]

    loaded = []
    cache.on_adapter_loaded = loaded.append
    answer = SimpleNamespace(success=True)
    scheduler.tp_worker = SimpleNamespace(
        load_lora_adapter=lambda _: answer, load_lora_adapter_from_tensors=lambda _: answer
    )
    scheduler.kv_event_lora_names = SimpleNamespace(register=lambda **_: None)
    for success in (True, False):
        answer.success = success
        for name in scheduler_hooks.ADAPTER_CALLS:
            request = SimpleNamespace(lora_id=name, lora_name="a")
            call(getattr(Scheduler, name), scheduler, request)
    out["adapters"] = loaded

    cache.calls.clear()
    tick = getattr(Scheduler, world.seam.tick.rpartition(".")[2])
    call(tick, scheduler, *(() if world.seam.tick_is_own_method else (None, None)))
    out["tick"] = cache.calls[:]

    cache.promise, cache.verdict = 10, Verdict.ASK_AGAIN
    req = world.request("r", range(21))
    world.match(req, limit=20)
    adder = PrefillAdder(1, cache, world.allocator, None, 1.0, 4096, None)
    results = []
    for verdict in (Verdict.ASK_AGAIN, None):
        cache.verdict = verdict
        results.append(adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None).name)
        results.append([len(adder.can_run_list), world.books(), cache.protected_size()])
    out["admission"] = results
    out["reported"] = [req.host_hit_length, req.storage_hit_length]
    print(json.dumps(out))


if __name__ == "__main__":
    main()
