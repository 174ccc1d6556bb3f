"""A small scheduler over SGLang's real requests, pools, allocators and admission, and our radix cache.

There is no model: a forward pass writes KV that is a function of all tokens before it, and looks at
all KV that it builds on, so that one wrong byte anywhere fails the test at the pass that reads it.
The passes go through a ``Stream``, which can be told to lag behind, as a GPU does.

It runs over every SGLang that the adapter supports (``sglang_dialect``).
The order of calls is the scheduler's of sglang 0.5.23: tick; chunk checkpoint; match, admission and
load back of waiting requests; launch; results of this pass, or with ``overlap`` of the one before.

Import it only where ``sglang`` can be imported (``tests/engines/sglang``); that takes seconds.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from flexkv_core import Tier, Transfer
from flexkv_core.config import load_config
from flexkv_core.manager import opening
from flexkv_core.testing import FaultTier
from flexkv_core.transfers.planes import DevicePlanes
from flexkv_sglang import compat, startup
from flexkv_sglang.radix_cache import FlexKVRadixCache
from tests.support import configs
from tests.support.waiting import DEADLINE_S

from . import sglang_dialect as dialect
from .sglang_books import Books
from .sglang_device import LAYERS, GatedTransfer, Stream, kv_rows, make_pool, pool_planes

LONG_S = 5 * DEADLINE_S
"""What is given to loads and stores: a test fails at its own deadline first, on however slow a machine."""
VOCABULARY = 997
_MASK = (1 << 64) - 1


ENGINE = {
    # A first wait this long answers a host hit in the same pass, so that tests are deterministic.
    "load_wait_s": DEADLINE_S,
    "load_deadline_s": LONG_S,
    "shutdown_deadline_s": DEADLINE_S,
    "log_transfers": False,
}


@dataclass(eq=False)
class Job:
    """A request and what its model knows: a hash per token, over all tokens before it."""

    req: Any
    stop_after: int
    world: SglangWorld
    hashes: list[int] = field(default_factory=list)
    cached: tuple[int, int, int] | None = None
    pending: int = 0
    is_aborted: bool = False

    @property
    def tokens(self) -> array[int]:
        return self.req.origin_input_ids + self.req.output_ids

    def hashes_to(self, count: int) -> list[int]:
        """Of the first ``count`` tokens, those included that the model has yet to give."""
        known = self.tokens
        while len(self.hashes) < count:
            at = len(self.hashes)
            before = self.hashes[-1] if at else self._seed()
            token = known[at] if at < len(known) else before % VOCABULARY
            mixed = ((before ^ (token & _MASK)) * 0x9E3779B97F4A7C15 + at + 1) & _MASK
            self.hashes.append(mixed ^ mixed >> 29)
        return self.hashes[:count]

    def _seed(self) -> int:
        """By the weights of the first pass, and by all that must keep two requests' KV apart."""
        req = self.req
        apart = (*dialect.apart(req), self.world.weights)
        return int.from_bytes(sha256(repr(apart).encode()).digest()[:8], "little")

    def next_token(self) -> int:
        return self.hashes_to(len(self.tokens))[-1] % VOCABULARY


class SglangWorld(Books):
    """One scheduler with its device; ``close`` it."""

    def __init__(
        self,
        folder: Path,
        *,
        page: int = 1,
        block: int = 16,
        size: int = 512,
        tiers: Sequence[dict[str, Any]] | None = None,
        pool: str = "mha",
        overlap: bool = False,
        chunk: int | None = None,
        wrap: dict[str, Callable[[Tier], Tier]] | None = None,
        engine: dict[str, Any] | None = None,
        lpm: bool = False,
        **config: Any,
    ) -> None:
        set_global_server_args_for_scheduler(
            ServerArgs(model_path="dummy", device="cpu", page_size=page, attention_backend="torch_native")
        )
        self.page, self.block, self.size = page, block, size
        self.overlap, self.chunk, self.lpm = overlap, chunk, lpm
        self.stream = Stream()
        self.kv = make_pool(pool, size, page)
        allocator = {"dtype": torch.float32, "device": "cpu", "kvcache": self.kv, "need_sort": False}
        self.allocator = (
            TokenToKVPoolAllocator(size, **allocator)
            if page == 1
            else PagedTokenToKVPoolAllocator(size, page_size=page, **allocator)
        )
        self.rows = ReqToTokenPool(size=16, max_context_len=1024, device="cpu", enable_memory_saver=False)
        self.planes = pool_planes(self.kv, pool)
        self.config = {
            "version": 1,
            "block_tokens": block,
            "tiers": list(tiers or [cpu()]),
            "engine": ENGINE | (engine or {}),
        } | config
        self.ctx = self._context()
        self.cache = self._open(configs.write(folder, self.config), wrap or {})
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.chunked: Job | None = None
        self.is_full = False
        """SGLang's ``batch_is_full``: nobody is asked until a request has ended."""
        self.finished: list[Job] = []
        self.results: deque[tuple[str, list[Job]]] = deque()
        self.weights = 0
        self.skips: set[int] = set()
        """Layers that the model's attention never reads."""
        self.on_layer: Callable[[int], None] = lambda _layer: None
        """Called before a pass asks for a layer."""
        self._pending_chunked_abort_req: Any = None
        self.is_broken = False
        """A test has provoked wrong KV in the middle of a pass: there is no orderly end."""

    def _context(self) -> Any:
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
        )
        model = SimpleNamespace(model_path="dummy", dtype=torch.float32)
        args = SimpleNamespace(model_path="dummy", pp_size=1, revision=None, load_format="auto")
        return SimpleNamespace(
            params=params, tp_worker=None, tp_rank=0, tp_size=1, model_config=model, server_args=args
        )

    def _open(self, file: str, wrap: dict[str, Callable[[Tier], Tier]]) -> FlexKVRadixCache:
        self.tiers: dict[str, Tier] = {}
        plain = opening.open_tier

        def opened(spec: Any, provider: Any, options: Any, context: Any) -> Tier:
            tier = wrap.get(context.name, lambda tier: tier)(plain(spec, provider, options, context))
            self.tiers[context.name] = tier
            return tier

        def transfer(planes: DevicePlanes, *_: Any) -> Transfer:
            self.transfer = GatedTransfer(planes, self.stream)
            return self.transfer

        with ExitStack() as stack:  # the two places where a test's own parts go in
            stack.enter_context(patch.object(opening, "open_tier", opened))
            stack.enter_context(patch.object(startup, "open_transfer", transfer))
            FlexKVRadixCache.fails_open = (
                False  # a fault of ours must fail the test, not switch the cache off
            )
            return FlexKVRadixCache(self.ctx, load_config(file, environ={}))

    # ---- shortcuts

    @property
    def manager(self) -> Any:
        return self.cache.connector.manager

    @property
    def chain(self) -> Any:
        return self.manager.chain

    @property
    def disk(self) -> FaultTier:
        """The disk of a world that is ``wrap``ped in ``FAULTY``."""
        disk = self.tiers["disk"]
        assert isinstance(disk, FaultTier)
        return disk

    def count(self, name: str, **labels: str) -> int:
        return int(self.manager.metrics.value(name, **labels))

    # ---- requests

    def submit(
        self, tokens: Sequence[int], *, rid: str = "", outputs: int = 2, stop_after: int = 0, **fields: Any
    ) -> Job:
        """Queue a request of ``outputs`` tokens at most, that the model ends after ``stop_after``."""
        sampling = SamplingParams(max_new_tokens=outputs)
        sampling.normalize(None)
        req = Req(rid or f"r{id(tokens):x}", "", array("q", tokens), sampling, vocab_size=1 << 62, **fields)
        job = Job(req, stop_after or outputs + 1, self)
        self.waiting.append(job)
        return job

    def match(self, job: Job) -> int:
        """What admission does first; returns the promised host tokens."""
        job.req.init_next_round_input(self.cache)
        return int(job.req.host_hit_length)

    def abort(self, job: Job) -> None:
        """What the scheduler does with ``/abort_request``."""
        job.is_aborted = True
        if job in self.waiting:
            self.waiting.remove(job)
            dialect.leave_queue(job.req, self.cache)
        elif job is self.chunked:
            self.chunked = None
            dialect.leave_queue(job.req, self.cache)
            dialect.release(job.req, self.cache, keep=False)
        elif job in self.running:
            job.req.to_finish = FINISH_ABORT()

    def retract(self, job: Job) -> None:
        """What the scheduler does when decoding runs out of memory."""
        self.running.remove(job)
        self.is_full = False
        for _, jobs in self.results:  # a pass that is queued has no result for it any more
            if job in jobs:
                jobs.remove(job)
        dialect.release(job.req, self.cache, keep=False)
        common.evict_from_tree_cache(self.cache, len(self.running) * self.page)
        job.req.reset_for_retract()
        self.waiting.append(job)

    # ---- one pass of the event loop

    def step(self) -> bool:
        """One pass; False if it had nothing to run."""
        self.cache.check_hicache_events()
        if self._pending_chunked_abort_req is not None:
            self._pending_chunked_abort_req = None
            if self.chunked is not None:
                self.abort(self.chunked)
        batch = self._prefill() or self._decode()
        if batch is not None:
            self.results.append(batch)
        if self.results and (batch is None or not self.overlap or len(self.results) > 1):
            self._process(*self.results.popleft())
        self.check()
        return batch is not None

    def launch(self, tokens: Sequence[int], **fields: Any) -> Job:
        """Submit a request, and launch its prefill; the next pass takes its results in."""
        job = self.submit(tokens, **fields)
        self.cache.check_hicache_events()
        batch = self._prefill()
        assert batch is not None
        self.results.append(batch)
        return job

    def run(self, *jobs: Job, until: Callable[[], object] | None = None) -> None:
        """Pass after pass until ``jobs`` have ended (default: all that are queued), or ``until``."""
        ended = until or (lambda: not self.open_jobs() if not jobs else all(j in self.finished for j in jobs))
        self._go_on(lambda: self.step() or self.results, ended)

    def tick(self, until: Callable[[], object]) -> None:
        """Tick after tick, and no pass, until it is so.

        What other threads do, and what comes of it, comes to nobody who does not tick.
        """
        self._go_on(self.cache.check_hicache_events, until)

    def wait_hanging(self) -> None:
        """Tick until a call of the faulty disk hangs."""
        self.tick(lambda: self.disk.num_hanging)

    def _go_on(self, do: Callable[[], object], until: Callable[[], object]) -> None:
        """Again and again, at once where it did something."""
        end = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < end, f"still not there after {DEADLINE_S:g} s: {self.describe()}"
            if not do():
                time.sleep(0.0005)

    def release(self) -> None:
        """The disk fails and hangs no more."""
        for operation in ("load", "store", "evict"):
            self.disk.always(operation, None)
        self.disk.release()

    def has_time(self) -> None:
        """No deadline of the engine's passes from now on: what was to be late has been."""
        for name in ("load_deadline_s", "shutdown_deadline_s"):
            vars(self.cache._engine)[name] = ENGINE[name]  # frozen, and the one that all parts look at
        if self.cache._layerwise is not None:
            self.cache._layerwise._waits._timeout_s = LONG_S

    def pass_deadline(self, job: Job) -> None:
        """A waiting request was first asked for at admission a deadline ago."""
        seen = self.cache.connector._seen[compat.request_handle(job.req)]
        seen.asked -= self.cache.connector.load_deadline_s

    def waits(self) -> list[float]:
        """Seconds that the scheduler may be held up by each of its waits for loads; grows from now on."""
        connector, asked = self.cache.connector, list[float]()
        plain = connector._wait
        connector._wait = lambda is_so, timeout_s: asked.append(timeout_s) or plain(is_so, timeout_s)
        return asked

    def ask(self, tokens: Sequence[int], **fields: Any) -> Job:
        """Submit, run to its end, and let the copies end."""
        job = self.submit(tokens, **fields)
        self.run(job)
        self.settle()
        return job

    def open_jobs(self) -> list[Job]:
        chunked = [self.chunked] if self.chunked is not None else []
        return self.waiting + self.running + chunked + [job for _, jobs in self.results for job in jobs]

    def describe(self) -> str:
        return (
            f"{len(self.waiting)} waiting, {len(self.running)} running, free "
            f"{self.allocator.available_size()}, evictable {self.cache.evictable_size()}, "
            f"loads {len(self.cache._loads.open)}, stores {len(self.cache._stores.open)}, "
            f"under way {self.chain.num_under_way}"
        )

    # ---- prefill

    def _prefill(self) -> tuple[str, list[Job]] | None:
        if self.chunked is not None:
            dialect.checkpoint(self.chunked.req, self.cache)
        if self.is_full and self.chunked is None:
            return None
        if self.lpm:
            for job in self.waiting:
                dialect.match_queued(job.req, self.cache)
        adder = self.new_adder()
        chunked = self.chunked
        if chunked is not None:
            chunked.req.init_next_round_input()
            self.chunked = chunked if adder.add_chunked_req(chunked.req) is not None else None
        admitted = [chunked] if chunked is not None else []
        for job in list(self.waiting):
            if len(adder.can_run_list) >= min(12 - len(self.running), self.rows.available_size()):
                self.is_full = True
                break
            self.match(job)
            result = dialect.admit(adder, job.req, has_chunked=self.chunked is not None)
            if job.req in adder.can_run_list:
                self.waiting.remove(job)
                admitted.append(job)
            if result is not AddReqResult.CONTINUE:
                self.is_full = result is AddReqResult.NO_TOKEN and dialect.is_full_for_good(adder)
                break
        if not admitted:
            return None
        if adder.new_chunked_req is not None:
            self.chunked = next(job for job in admitted if job.req is adder.new_chunked_req)
        self._launch_extend(admitted)
        done = [job for job in admitted if job is not self.chunked]
        self.running += done
        return "prefill", done

    def new_adder(self) -> PrefillAdder:
        """What decides over the admissions of one pass."""
        running = SimpleNamespace(reqs=[job.req for job in self.running])
        return PrefillAdder(self.page, self.cache, self.allocator, running, 0.7, 4096, self.chunk)

    def _launch_extend(self, jobs: list[Job]) -> None:
        starts = [dialect.prefix_len(job.req) for job in jobs]
        ends = [dialect.extend_end(job.req) for job in jobs]
        for job in jobs:
            self._note_cached(job)
        batch = self._batch(jobs, ends)
        batch.prefix_lens = starts
        batch.extend_lens = [end - start for start, end in zip(starts, ends, strict=True)]
        batch.extend_num_tokens = sum(batch.extend_lens)
        dialect.alloc_for_extend(batch)
        for job in jobs:
            job.req.is_retracted = False
        self._forward(jobs, starts, ends)

    def _note_cached(self, job: Job) -> None:
        if job.cached is None:
            job.cached = dialect.cached_by_tier(job.req)

    def _batch(self, jobs: list[Job], ends: list[int]) -> SimpleNamespace:
        lens = torch.tensor(ends, dtype=torch.int64)
        return SimpleNamespace(
            reqs=[job.req for job in jobs],
            device="cpu",
            req_to_token_pool=self.rows,
            tree_cache=self.cache,
            token_to_kv_pool_allocator=self.allocator,
            seq_lens=lens,
            seq_lens_cpu=lens,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            hisparse_coordinator=None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )

    # ---- decode

    def _decode(self) -> tuple[str, list[Job]] | None:
        jobs = [job for job in self.running if self._wants_more(job)]
        while jobs:
            # A page for each request that is at the end of one; the allocation itself asks for one each.
            need = self.page * sum(dialect.committed_len(job.req) % self.page == 0 for job in jobs)
            with self.cache.deciding(len(jobs)):
                common.evict_from_tree_cache(self.cache, need)
            if self.allocator.available_size() >= need:
                break
            if len(jobs) == 1:
                jobs[0].req.to_finish = FINISH_ABORT("out of memory")
                self._finish_check(jobs.pop())
            else:
                self.retract(jobs.pop())
        if not jobs:
            return None
        lens = [dialect.committed_len(job.req) for job in jobs]
        batch = self._batch(jobs, lens)
        indices = torch.tensor([compat.request_row(job.req) for job in jobs], dtype=torch.int64)
        batch.req_pool_indices = batch.req_pool_indices_cpu = indices
        dialect.alloc_for_decode(batch)
        self._forward(jobs, lens, [length + 1 for length in lens])
        return "decode", jobs

    def _wants_more(self, job: Job) -> bool:
        pending = sum(job in jobs for _, jobs in self.results)
        return len(job.req.output_ids) + pending < job.req.sampling_params.max_new_tokens

    # ---- the forward pass and its results

    def _forward(self, jobs: list[Job], starts: list[int], ends: list[int]) -> None:
        work = []
        for job, start, end in zip(jobs, starts, ends, strict=True):
            row = self.rows.req_to_token[compat.request_row(job.req), :end].to(torch.int64).numpy()
            work.append((job.req.rid, row.copy(), start, job.hashes_to(end)))

        self.cache.on_pass_reads(SimpleNamespace(reqs=[job.req for job in jobs]))
        counter, each = self.kv.layer_transfer_counter, len(self.planes) // LAYERS
        if counter is not None:
            counter.set_consumer(-1)  # as the model worker does
        wrong: dict[str, AssertionError] = {}

        def run_layer(layer: int) -> None:
            """First what the pass builds on, then what it adds."""
            reads = range(layer * each, (layer + 1) * each)
            for rid, slots, start, hashes in work:
                try:
                    self.check_rows(slots[:start], hashes[:start], f"{rid} builds on", reads)
                except AssertionError as fault:
                    wrong.setdefault(rid, fault)
                for number in reads:
                    plane = self.planes[number]
                    plane[slots[start:]] = kv_rows(hashes[start:], number, plane.shape[1])

        def ask(layer: int) -> None:
            self.on_layer(layer)
            if counter is not None and layer not in self.skips:
                counter.wait_until(layer)  # the key's
                counter.wait_until(layer)  # the value's

        def run() -> None:
            for layer in range(LAYERS):
                if not self.stream.lags:
                    ask(layer)
                self.stream.reach(layer)
                if layer not in self.skips:
                    run_layer(layer)
            if self.stream.lags:
                judge()

        def judge() -> None:
            """Wrong KV is a fault unless nobody will look at what came of it."""
            for job in jobs:
                if job.req.rid in wrong and not (job.req.to_finish or job.req.finished()):
                    raise wrong[job.req.rid]

        if self.stream.lags:
            for layer in range(LAYERS):
                ask(layer)
        self.stream.launch(run)
        is_extend = any(end - start > 1 for start, end in zip(starts, ends, strict=True))
        mode = SimpleNamespace(is_extend=lambda: is_extend)
        self.cache.on_pass_launched(self, SimpleNamespace(reqs=[job.req for job in jobs], forward_mode=mode))
        if not self.stream.lags:
            judge()

    @property
    def chunked_req(self) -> Any:
        """SGLang's name for the request whose prefill is cut in chunks."""
        return self.chunked.req if self.chunked is not None else None

    def _process(self, _kind: str, jobs: list[Job]) -> None:
        if self.stream.lags and self.stream.done < self.stream.queued - len(self.results):
            # Its own pass must have run before there is a result; later ones may still be queued.
            self.stream.run(self.stream.queued - len(self.results) - self.stream.done)
        for job in jobs:
            if job not in self.running or job.req.finished():
                continue  # retracted, or an overshoot pass of a request that has ended
            if not dialect.discards_output(job.req):
                job.req.output_ids.append(job.next_token())
            self._finish_check(job)
            if job in self.running and _kind == "prefill":
                dialect.checkpoint(job.req, self.cache)
        if self.cache.seam.has_batch_end:
            self.cache.flush_pending_backups()

    def _finish_check(self, job: Job) -> None:
        req = job.req
        if req.to_finish:
            req.finished_reason, req.to_finish = req.to_finish, None
        elif len(req.output_ids) >= job.stop_after:
            req.finished_reason = FINISH_MATCHED_TOKEN(matched=req.output_ids[-1])
            req.finished_len = len(req.output_ids)
        elif len(req.output_ids) >= req.sampling_params.max_new_tokens:
            req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
            req.finished_len = len(req.output_ids)
        if req.finished():
            dialect.release(req, self.cache, keep=True)
            self.running.remove(job)
            self.is_full = False
            self.finished.append(job)

    # ---- ends

    def settle(self) -> None:
        """Tick until every copy has ended; then nothing may be held."""
        self.tick(self._is_settled)
        self.check()

    def _is_settled(self) -> bool:
        cache = self.cache
        if (
            cache._stores.open
            or cache._quarantine.entries
            or cache._ordered.entries
            or self.chain.num_under_way
        ):
            return False
        if cache._layerwise is not None and not cache._layerwise.is_idle:
            return False
        return self.chain._completions.is_empty()

    def assert_nothing_left(self) -> None:
        """No request is known, nothing is pinned, lent, locked or open."""
        self.settle()
        cache, chain, manager = self.cache, self.chain, self.manager
        if not cache.seam.reports_aborts:
            self._outlive_orphans()
        assert not cache._loads.open, cache._loads.open
        assert not cache._seam_handles, cache._seam_handles
        assert not cache.connector.num_seen
        open_tasks = manager._tasks.open_ids()
        assert not open_tasks, open_tasks
        assert chain.index.num_pins == 0
        assert chain.host.num_lent == 0
        assert chain.host.num_quarantined == 0
        assert cache.protected_size() == 0, f"{cache.protected_size()} tokens are locked"

    def _outlive_orphans(self) -> None:
        """Nobody tells the tree of requests that left the queue: loads of theirs end by themselves."""
        self.tick(lambda: not self.cache._loads.open)
        self.cache.connector.reset()

    def flush(self) -> bool:
        """``/flush_cache`` of an idle scheduler; what our hook on it does included."""
        assert not self.open_jobs()
        if not self.cache.may_flush():
            return False
        self.reset()
        return True

    def reset(self) -> None:
        """What SGLang does with the device's side, once it has decided to."""
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    def update_weights(self, *, flush: bool = True) -> None:
        """What our hooks and SGLang do when weights are updated."""
        self.cache.on_weights_changed("test")
        self.weights += 1
        if flush:
            self.cache.may_flush()
            self.reset()

    def poison_free(self) -> np.ndarray[Any, Any]:
        """Overwrite all free slots, as their next owners might; returns them."""
        free = np.array(self._free(), dtype=np.int64)
        for plane in self.planes:
            plane[free] = 0xAB
        return free

    def close(self) -> None:
        self.stream.abandon()
        self.transfer.holds_loads = self.transfer.holds_stores = False
        self.transfer.layers = LAYERS
        if isinstance(self.tiers.get("disk"), FaultTier):
            self.release()
        self.cache.release_host_resources()


@contextmanager
def world(folder: Path, **options: Any) -> Iterator[SglangWorld]:
    """A world that is closed at the end; if all went well, nothing may be left in it."""
    made = SglangWorld(folder, **options)
    try:
        yield made
        if not made.is_broken:
            made.assert_nothing_left()
    finally:
        made.close()


FAULTY: dict[str, Callable[[Tier], Tier]] = {"disk": FaultTier}
"""What makes a world's disk one that misbehaves when it is told to (``SglangWorld.disk``)."""
POLICY = {"load_threads": 2, "store_threads": 2, "load_deadline_s": LONG_S, "store_deadline_s": LONG_S}


def cpu(capacity: str = "2MiB", **policy: Any) -> dict[str, Any]:
    """A host tier."""
    return {"name": "host", "driver": "cpu", "options": {"capacity": capacity}} | POLICY | policy


def ssd(folder: Path, capacity: str = "4MiB", **policy: Any) -> dict[str, Any]:
    """A disk tier in ``folder``."""
    options = {"path": str(folder), "capacity": capacity, "min_free": "1MiB"}
    return {"name": "disk", "driver": "ssd", "options": options} | POLICY | policy
