"""Drives SeamRadixCache over SGLang's real pools, requests and release path, and prints what happened.

A script, so that it runs under any SGLang: ``python seam_scenario.py PAGE`` with that SGLang first on
PYTHONPATH.  Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from array import array
from types import SimpleNamespace

import torch
from transformers.models.auto import configuration_auto

# Versions before 0.5.19 register a model type that newer transformers bring themselves.
_register = configuration_auto.CONFIG_MAPPING.register
configuration_auto.CONFIG_MAPPING.register = lambda key, value, exist_ok=False: _register(
    key, value, exist_ok=True
)

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from flexkv_sglang import compat
from flexkv_sglang.handover import Loaded, RetryLater, Verdict
from flexkv_sglang.seam_cache import SeamRadixCache

SIZE = 512


class Recorder(SeamRadixCache):
    """Promises ``promise`` tokens, loads as ``verdict`` says, and notes every call."""

    def __init__(self, ctx):
        self.calls, self.promise, self.verdict, self.extra = [], 0, None, 0
        super().__init__(ctx)

    def on_match(self, handle, prompt, have):
        self.calls.append(["match", handle.rid, handle.attempt, len(prompt.tokens), have, *prompt.namespace])
        self.prompt = prompt
        return self.promise

    def on_load_back(self, handle, req, node, have, count, *, may_wait):
        self.calls.append(["load", handle.rid, have, count])
        if self.verdict is not None:
            return self.verdict
        slots = compat.alloc_slots(self, count)
        node, slots = compat.insert_loaded(self, self.prompt.key, have, slots, priority=0)
        compat.report_storage_tokens(req, 3)
        return Loaded(node, slots)

    def on_checkpoint(self, checkpoint):
        slots = checkpoint.slots(0, checkpoint.num_tokens)
        path = compat.path_slots(self, checkpoint.node)
        assert slots.dtype == torch.int64
        assert torch.equal(slots, path), (slots, path)
        self.calls.append(
            ["checkpoint", checkpoint.handle.rid, list(checkpoint.tokens), checkpoint.is_finished]
        )

    def on_end(self, handle):
        self.calls.append(["end", handle.rid, handle.attempt])

    def on_abort(self, handle):
        self.calls.append(["abort", handle.rid, handle.attempt])

    def on_evict(self, num_tokens):
        self.calls.append(["evict", num_tokens])

    def on_tick(self):
        self.calls.append(["tick"])

    def on_reset(self):
        self.calls.append(["reset"])

    def on_shutdown(self):
        self.calls.append(["shutdown"])

    def extra_protected_tokens(self):
        return self.extra


class World:
    """One pool, one tree, and the steps of a scheduler."""

    def __init__(self, page):
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu", page_size=page))
        self.page = page
        self.kv = MHATokenToKVPool(
            size=SIZE,
            page_size=page,
            dtype=torch.float32,
            head_num=2,
            head_dim=16,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        common_args = {"dtype": torch.float32, "device": "cpu", "kvcache": self.kv, "need_sort": False}
        if page == 1:
            self.allocator = TokenToKVPoolAllocator(SIZE, **common_args)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(SIZE, page_size=page, **common_args)
        self.rows = ReqToTokenPool(size=8, max_context_len=256, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
        )
        self.cache = Recorder(SimpleNamespace(params=params, tp_worker=None))
        self.seam = self.cache.seam

    def request(self, rid, tokens, **fields):
        sampling = SamplingParams(max_new_tokens=4)
        sampling.normalize(None)
        req = Req(rid, "", array("q", tokens), sampling, **fields)
        req.full_untruncated_fill_ids = array("q", tokens)
        return req

    def match(self, req, limit=None):
        key = RadixKey(req.origin_input_ids + req.output_ids, req.extra_key, limit=limit)
        if self.seam.has_salt:
            key.cache_salt = req.cache_salt
        result = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.last_node, req.best_match_node = result.last_device_node, result.best_match_node
        req.host_hit_length = result.host_hit_length
        if self.seam.match_gives_length:
            req.prefix_len = result.device_prefix_len
        else:
            req.prefix_indices = result.device_indices
        return result

    def admit(self, req, num_tokens):
        """What alloc_for_extend leaves behind: a row, a lock, the prefix and fresh slots in the row."""
        have = req.prefix_len if self.seam.match_gives_length else len(req.prefix_indices)
        prefix = compat.path_slots(self.cache, req.last_node)[:have]
        record = req.kv if self.seam.kv_record else req
        record.cache_protected_len = have
        if self.seam.match_gives_length:
            req.lock = self.cache.lock(req.last_node)
        else:
            self.cache.inc_lock_ref(req.last_node)
        whole = -(-num_tokens // self.page) * self.page
        fresh = compat.alloc_slots(self.cache, whole - have)[: num_tokens - have]
        self.rows.alloc([req])
        row = compat.request_row(req)
        self.rows.write((row, slice(0, num_tokens)), torch.cat([prefix, fresh]).to(torch.int32))
        self.commit(req, num_tokens)
        if self.seam.match_gives_length:
            req.extend_end = num_tokens
        else:
            req.set_extend_range(have, num_tokens)

    def commit(self, req, num_tokens):
        if req.kv is None:  # before 0.5.19 the record is made with the row
            from sglang.srt.managers.schedule_batch import ReqKvInfo

            req.kv = ReqKvInfo(kv_allocated_len=num_tokens, swa_evicted_seqlen=0)
        req.kv.kv_allocated_len = num_tokens
        (req.kv if self.seam.kv_record else req).kv_committed_len = num_tokens

    def chunk(self, req):
        if self.seam.match_gives_length:
            common.checkpoint_kv_cache(req, self.cache)
        else:
            common.maybe_cache_unfinished_req(req, self.cache)

    def finish(self, req, keep=True):
        req.finished_reason = object()
        name = "checkpoint" if self.seam.match_gives_length else "is_insert"
        common.release_kv_cache(req, self.cache, **{name: keep})

    def books(self):
        sizes = (self.allocator.available_size(), self.cache.evictable_size(), self.cache.protected_size())
        return sum(sizes) - SIZE

    def taken(self):
        calls, self.cache.calls = self.cache.calls, []
        return calls


def main(page):
    world, out = World(page), {}
    cache, seam = world.cache, world.seam
    n = 4 * page if page > 1 else 20

    a = world.request("a", range(n + 1), extra_key="team", lora_id="adapter")
    world.match(a, limit=n)
    world.admit(a, n + 1)
    world.chunk(a)
    world.finish(a)
    out["chunk then end"] = world.taken()
    out["books"] = [world.books()]

    first = world.request("a", range(n + 1), extra_key="team", lora_id="adapter")
    world.match(first, limit=n)
    again = compat.request_handle(first)
    out["same id, other handle"] = again != compat.request_handle(a) and again.rid == "a"
    world.taken()

    # Two requests compute the same tokens at once: the second one's slots are doubles.
    twins = [world.request(f"twin{i}", range(1000, 1000 + n)) for i in range(2)]
    for twin in twins:
        world.match(twin)
        world.admit(twin, n)
    world.taken()
    for twin in twins:
        world.finish(twin)
    out["doubles"] = world.taken()
    out["books"].append(world.books())

    # A load that comes in whole, one that is not ready, one that fails.
    cache.promise = 10 * n
    b = world.request("b", [*range(2000, 2000 + n), 1])
    result = world.match(b, limit=n)
    promised = result.host_hit_length
    params = InitLoadBackParams(best_match_node=b.best_match_node, host_hit_length=promised, req=b)
    cache.verdict = Verdict.ASK_AGAIN
    try:
        out["ask again"] = cache.init_load_back(params) is None
    except RetryLater:
        out["ask again"] = "raised"
    cache.verdict = Verdict.RECOMPUTE
    loaded, node = cache.init_load_back(params)
    out["recompute"] = [int(loaded) if seam.load_gives_count else len(loaded), node is b.best_match_node]
    b.host_hit_length = promised
    cache.verdict = None
    loaded, node = cache.init_load_back(params)
    out["loaded"] = [
        promised,
        int(loaded) if seam.load_gives_count else len(loaded),
        len(compat.path_slots(cache, node)),
        b.storage_hit_length,
    ]
    out["load calls"] = world.taken()
    out["books"].append(world.books())

    # A load whose tokens came in by another way meanwhile: its doubles are freed.
    before = world.allocator.available_size()
    slots = compat.alloc_slots(cache, n)
    key = RadixKey(array("q", [*range(2000, 2000 + n)]))
    node, tree_slots = compat.insert_loaded(cache, key, 0, slots, priority=0)
    out["insert doubles"] = [
        world.allocator.available_size() == before,
        torch.equal(tree_slots, compat.path_slots(cache, node)),
    ]
    # A load below a path that was evicted meanwhile: nothing is inserted, nothing leaks.
    slots = compat.alloc_slots(cache, page)
    gone = RadixKey(array("q", range(5000, 5000 + 2 * page)))
    out["insert hole"] = compat.insert_loaded(cache, gone, page, slots, priority=0) is None
    out["books"].append(world.books())

    # Retraction, abort, probes, and the rest.
    cache.promise = 0
    world.taken()
    c = world.request("c", range(3000, 3000 + n))
    world.match(c)
    world.admit(c, n)
    world.finish(c, keep=False)
    cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", range(n)))))
    d = world.request("d", range(4000, 4000 + n))
    world.match(d)
    if seam.reports_aborts:
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

        cache.finish(d.cache_request_handle, CacheRequestOutcome.ABORT)
        cache.finish(d.cache_request_handle, CacheRequestOutcome.ABORT)
    media = world.request("media", range(6000, 6000 + n))
    media.multimodal_inputs = object()
    world.match(media)
    cache.check_hicache_events()
    held = compat.alloc_slots(cache, world.allocator.available_size() + page)
    cache.extra = len(held)
    out["books"].append(world.books())
    cache.reset()
    cache.release_host_resources()
    cache.release_host_resources()
    out["rest"] = world.taken()
    out["version"] = seam.version
    print(json.dumps(out))


if __name__ == "__main__":
    main(int(sys.argv[1]))
