"""FlexKVRadixCache: what SGLang's scheduler calls, in terms of the connector.

``match_prefix`` only asks; ``init_load_back`` begins a load, holds the scheduler up for a few
milliseconds at most, and says "ask again" until all promised tokens are in place (MP mode), or in host
slots and on their way (IP mode: the forward pass waits for each layer, see ``layerwise``).  A checkpoint
starts a store and keeps its node locked until the copy is over.

Device slots that we hold outside the tree (a load under way, or one that was given up while its copy
runs) are counted as protected until nothing can touch them any more.

Threads: the scheduler's thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flexkv_core import EngineError
from flexkv_core.config import EffectiveConfig

from . import compat
from .border import attempt, guarded
from .compat import RequestHandle
from .connector import FlexKVConnector, WaitBudget
from .counters import CounterLog
from .handover import Checkpoint, Loaded, Prompt, Verdict
from .identity import AdapterDigests
from .layerwise import LayerwiseLoads
from .ordered import OrderedCopies
from .prefill import PrefillTimes
from .quarantine import Quarantine
from .request_loads import Promise, RequestLoads
from .request_stores import RequestStores
from .seam_cache import SeamRadixCache
from .stale import StaleKV
from .startup import await_layers, choose_mode, log_ready, open_chain

logger = logging.getLogger(__name__)

_LAST_HOPE_S = 1.0
"""How long a pass the only request that runs waits for slots of stores: SGLang would abort it."""


class FlexKVRadixCache(SeamRadixCache):
    """SGLang's radix cache with a chain of tiers below it.

    Attributes:
        fails_open: Whether a fault of ours switches the cache off instead of being raised (in tests).
        is_broken: Whether that has happened.
    """

    fails_open = True
    is_broken = False

    def __init__(self, ctx: Any, effective: EffectiveConfig) -> None:
        """Open the chain for the context's KV pool.

        Raises:
            EngineError, LayoutError: the model or pool cannot be served.
            ConfigError, DriverError, TierError, HostMemoryError: a tier cannot be opened.
        """
        super().__init__(ctx)
        config, opened = effective.chain, open_chain(self, ctx, effective)
        manager = opened.manager
        self._engine = config.engine
        self._prefill = PrefillTimes()
        self.times_prefill = not config.engine.prefill_tokens_per_s and any(
            tier.load_or_recompute == "auto" for tier in config.tiers
        )
        self._counter_log = CounterLog(manager.metrics, config.engine.log_counters_s)
        self._stale = StaleKV(AdapterDigests(ctx.tp_worker), manager.metrics)
        self.connector = FlexKVConnector(manager, config.engine, first_tier=config.tiers[0].name)
        choice = choose_mode(config.engine, opened.planes)
        try:
            self._layerwise = await_layers(self, ctx, opened, config.engine, choice)
        except BaseException:  # an interrupt, too: threads and tiers must not be left open
            manager.shutdown()
            raise
        self._quarantine = Quarantine(self, manager)
        self._ordered = OrderedCopies(manager, choice)
        self._loads = RequestLoads(self, self.connector, self._quarantine, self._ordered, self._layerwise)
        self._stores = RequestStores(self, self.connector)
        self._num_deciding = 0
        self._last_hope = WaitBudget(_LAST_HOPE_S)
        self._endings = [
            self._loads.give_up_all,
            self.connector.poll,
            self._stores.end,
            self._quarantine.release,
            self._ordered.deliver,
            self._tick_layers,
        ]
        log_ready(ctx, effective, opened, self._layerwise)

    # ---- a fault of ours -----------------------------------------------------------------------

    def switch_off(self, where: str, fault: Exception) -> None:
        """Nothing is promised or stored any more."""
        if not self.is_broken:
            self.is_broken = True
            logger.error("[FlexKV] a fault in %s: the cache is off, serving goes on", where, exc_info=fault)
            self.connector.manager.metrics.count("adapter_faults", method=where)
            self.connector.reset()

    def _wind_up(self) -> None:
        """The cache is off; what was under way still ends, so that its locks and slots come back.

        A step that fails is left out from then on.

        Raises:
            EngineError: as a tick of a cache that is on.
        """
        if not (self._ordered.entries or self.holds_slots()):
            return
        for step in tuple(self._endings):
            try:
                step()
            except EngineError:
                raise
            except Exception:  # the other steps may still work
                self._endings.remove(step)
                logger.exception("[FlexKV] what was under way cannot be ended in order")

    # ---- match and load ------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        if self._layerwise is not None and self._layerwise.has_dead:
            params = self._visible(params, self._layerwise)
        return super().match_prefix(params)

    def _visible(self, params: Any, layerwise: LayerwiseLoads) -> Any:
        def nothing() -> Any:  # what is to be hidden is not known
            return params if params.req is None else replace(params, key=params.key[:0])

        return attempt(self, lambda: layerwise.visible(params), nothing, "match_prefix")

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """From 0.5.22: nothing beside dead slots, as for requests that SGLang keeps out of the tree."""
        layerwise = self._layerwise
        if layerwise is None or not attempt(
            self, lambda: layerwise.keeps_out(req, up_to), lambda: layerwise.has_dead, "checkpoint"
        ):
            super().checkpoint(req, up_to=up_to, **kwargs)

    @guarded(0)
    def on_match(self, handle: RequestHandle, prompt: Prompt, have: int) -> int:
        if self._stale.may_be(prompt.namespace):
            return 0
        under_way = self._loads.promised(handle, have)
        if under_way:
            return under_way
        scope = self._stale.scope(prompt.namespace)
        return self.connector.lookup_kv(handle, lambda: prompt.tokens, prompt.num_tokens, scope, have)

    @guarded(Verdict.RECOMPUTE)
    def on_load_back(
        self, handle: RequestHandle, req: Any, node: Any, have: int, count: int, *, may_wait: bool
    ) -> Loaded | Verdict:
        scope = self._stale.scope(compat.request_namespace(req))
        return self._loads.bring(Promise(handle, req, node, have, count, scope), may_wait=may_wait)

    @guarded(None)
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if not (checkpoint.is_finished or self._engine.store_running):
            return
        if self._stale.may_be(checkpoint.namespace):
            return
        if self._layerwise is not None and self._layerwise.is_dead(checkpoint):
            return
        self._stores.begin(checkpoint, self._stale.scope(checkpoint.namespace))

    # ---- life of a request ---------------------------------------------------------------------

    @guarded(None)
    def on_end(self, handle: RequestHandle) -> None:
        self._loads.give_up(handle)
        self.connector.forget(handle)

    @guarded(None)
    def on_abort(self, handle: RequestHandle) -> None:
        self.on_end(handle)

    # ---- passes and ticks ----------------------------------------------------------------------

    @guarded(None)
    def on_pass_begins(self, num_tokens: int) -> None:
        waits = bool(self._ordered.entries) or self._has_layers
        self._prefill.begins(0 if waits else num_tokens)  # a pass behind a copy tells nothing of computing

    @guarded(None)
    def on_pass_ends(self) -> None:
        timed = self._prefill.ends()
        if timed is not None:
            self.connector.manager.note_prefill(*timed)

    @guarded(None)
    def on_pass_reads(self, batch: Any) -> None:
        for req in batch.reqs if self._loads.open else ():
            self._loads.give_up(compat.request_handle(req))  # somebody else has brought its tokens meanwhile
        if self._layerwise is not None and not self._layerwise.is_idle:
            self._layerwise.begin_pass(batch)

    def on_pass_launched(self, scheduler: Any, batch: Any) -> None:
        layerwise = self._layerwise
        if layerwise is None or layerwise.is_idle:
            return
        was_broken = self.is_broken

        def abort_all() -> None:  # who builds on a load that failed is not known
            if was_broken:
                raise EngineError("a pass that a failed load has spoilt cannot be told from others")
            for req in batch.reqs:
                compat.abort_request(scheduler, req, "flexkv: a fault while layerwise loads were under way")

        attempt(self, lambda: layerwise.abort_failed(scheduler, batch), abort_all, "on_pass_launched")

    def on_tick(self) -> None:
        if self.is_broken:
            self._wind_up()
        else:
            self._tick()

    @guarded(None)
    def _tick(self) -> None:
        self.connector.begin_pass()
        self._last_hope.renew()
        self._counter_log.tick()
        self._stale.flush_if_owed()
        if self._stores.open:
            self._stores.end()
        if self._quarantine.entries:
            self._quarantine.release()
        self._ordered.deliver()
        self._tick_layers()
        self._loads.adopt_orphans()
        if self._stores.open or self._loads.open or self._quarantine.entries:
            time.sleep(0)  # SGLang's idle loop would keep the interpreter from the threads that copy

    def _tick_layers(self) -> None:
        if self._layerwise is not None:
            self._layerwise.tick()

    def on_batch_end(self) -> None:
        self.on_tick()

    @guarded(None)
    def on_evict(self, num_tokens: int) -> None:
        if self._stores.open or self._layerwise is not None:
            self.connector.poll()
        if self._stores.open:
            self._stores.end()
        if self._layerwise is not None:
            self._layerwise.settle()
        self._await_stores(num_tokens)

    @contextmanager
    def deciding(self, num_running: int) -> Iterator[None]:
        """While inside, SGLang asks whether so many requests may go on: want of slots costs an answer."""
        self._num_deciding = num_running
        try:
            yield
        finally:
            self._num_deciding = 0

    def _await_stores(self, num_tokens: int) -> None:
        """Where stores keep slots from going that a request needs to go on, wait for them."""
        while self._num_deciding and self._stores.open and self.evictable_size() < num_tokens:
            is_over = self._wait_for_store(self._stores.tasks[0])
            self._stores.end()
            if not is_over:
                return

    def _wait_for_store(self, task: int) -> bool:
        if self._num_deciding > 1:
            return self.connector.wait_over(task)
        with self._last_hope.spending() as left_s:
            return self.connector.wait_over(task, left_s)

    # ---- the device's slots --------------------------------------------------------------------

    @property
    def _has_layers(self) -> bool:
        """Whether loads are awaited layer by layer now, or have left slots behind."""
        return self._layerwise is not None and not self._layerwise.is_idle

    def tokens_held_for(self, handle: RequestHandle) -> int:
        return self._loads.held_for(handle)

    def holds_slots(self) -> bool:
        return bool(self._loads.open or self._stores.open or self._quarantine.entries) or self._has_layers

    def extra_protected_tokens(self) -> int:
        return self._loads.num_tokens + self._quarantine.num_tokens

    # ---- flush, weights, the end ---------------------------------------------------------------

    def may_flush(self) -> bool:
        self._loads.give_up_all()
        end = time.monotonic() + self._engine.shutdown_deadline_s
        while pending := [*self._stores.tasks, *self._writing()]:
            if not self.connector.wait_over(pending[0], max(0.0, end - time.monotonic())):
                return False
            if self.is_broken:  # what cannot be ended in order is never taken off its list
                return all(
                    self.connector.wait_over(task, max(0.0, end - time.monotonic())) for task in pending
                )
            self.on_tick()
        return True

    def _writing(self) -> list[int]:
        """Tasks whose copies may still write device slots."""
        by_layer = self._layerwise.tasks if self._layerwise is not None else []
        return [*self._quarantine.tasks, *self._ordered.tasks, *by_layer]

    def on_reset(self) -> None:
        if not self.may_flush():
            if self._writing():
                raise EngineError(
                    "a copy to the device does not end, and its slots are about to be given away: "
                    "ending here is better than KV that is overwritten unseen"
                )
            logger.error("[FlexKV] the device is reset while stores are under way: they are thrown away")
            for task in self._stores.abandon():
                self._ordered.add(task)
        if self._layerwise is not None:
            self._layerwise.reset()
        self._loads.open.clear()
        self._stores.open.clear()
        self._quarantine.entries.clear()
        self.connector.reset()
        self._stale.flushed()

    @guarded(None)
    def on_weights_changed(self, reason: str) -> None:
        self._stale.weights_change(reason)
        self._loads.give_up_all()
        self.connector.invalidate()

    def on_weights_settled(self, call: str, flush: Callable[[], bool], *, is_ok: bool) -> None:
        if not self.is_broken:
            self._stale.weights_settled(call, flush, is_ok=is_ok)

    @guarded(None)
    def on_adapter_loaded(self, lora_id: str) -> None:
        if self._stale.adapter_loaded(lora_id):
            self._loads.give_up_all()
            self.connector.reset()

    def on_sleep(self) -> None:
        if not self.may_flush():
            raise EngineError("device memory is about to go, and a copy to or from it does not end")

    def on_shutdown(self) -> None:
        self._loads.give_up_all()
        self._counter_log.log()
        self.connector.shutdown()
        if self._layerwise is not None:
            self._layerwise.close()
