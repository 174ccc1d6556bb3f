"""FlexKVRadixCache: what SGLang's scheduler calls, in terms of the connector.

``match_prefix`` only asks; ``init_load_back`` begins a load, holds the scheduler up for a few
milliseconds at most, and says "ask again" until all promised tokens are in place (MP mode), or in host
slots and on their way (IP mode: the forward pass waits for each layer, see ``layerwise``).  A checkpoint
starts a store and keeps its node locked until the copy is over.  A partial load never reaches SGLang.

Device slots that we hold outside the tree (a load under way, or one that was given up while its copy
runs) are counted as protected until nothing can touch them any more.

Threads: the scheduler's thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from flexkv_core import EngineError
from flexkv_core.config import EffectiveConfig
from flexkv_core.layerwise.counters import LayerCounters
from flexkv_core.layerwise.waits import LayerWaits
from flexkv_core.manager import NO_TASK, KVManager, KVResponseStatus, Scope
from flexkv_core.metrics import Metrics
from flexkv_core.transfer import Ticket, Transfer
from flexkv_core.transfers.planes import DevicePlanes
from flexkv_core.transfers.poison import PoisonedTransfer, poison_allocations

from . import compat
from .admission import MOST_PASSED_OVER
from .compat import RequestHandle, RequestNamespace
from .connector import FlexKVConnector, TransferLog
from .counters import CounterLog
from .identity import AdapterDigests, model_namespace
from .layerwise import LayerwiseLoads, ModeChoice, lacks, register_counter
from .pools import check_dtype, device_planes
from .prefill import PrefillTimes
from .seam_cache import Checkpoint, Loaded, Prompt, SeamRadixCache, Verdict
from .transfers import open_transfer
from .weights import WeightChanges

logger = logging.getLogger(__name__)

_ORPHAN_S = 1.0
_ORPHAN_TICKS = 8
"""A finished load that nobody has asked for so long, and for so many ticks (a pass of the scheduler has
two, and may take longer than a second), goes into the tree for whoever comes."""


@dataclass(eq=False)
class _Load:
    """A load that SGLang was not told of yet.

    Attributes:
        task: The manager's task.
        have: Tokens before the first loaded one.
        count: Tokens that it brings.
        key: SGLang's key of the whole prompt, copied.
        node: Where it hangs below; locked.
        slots: Device slots, once they are taken.
        asked: When SGLang last asked for it.
        asked_tick: The same, in ticks.
    """

    task: int
    have: int
    count: int
    key: Any
    node: Any
    slots: torch.Tensor | None = None
    asked: float = 0.0
    asked_tick: int = 0


@dataclass(eq=False)
class _Store:
    """A store whose device slots are locked in the tree."""

    task: int
    node: Any


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _fails_open(default: Any) -> Callable[[_Method], _Method]:
    """A fault of ours ends the cache, not the scheduler: from then on the engine computes.

    ``EngineError`` passes: it says that going on would give wrong answers.
    """

    def guard(method: _Method) -> _Method:
        @wraps(method)
        def call(self: FlexKVRadixCache, *args: Any, **kwargs: Any) -> Any:
            if self.is_broken:
                return default
            try:
                return method(self, *args, **kwargs)
            except EngineError:
                raise
            except Exception as exc:  # the border to the engine: nothing of ours may end its scheduler
                if not self.fails_open:
                    raise
                self._switch_off(method.__name__, exc)
                return default

        return cast("_Method", call)

    return guard


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
        config = effective.chain
        if config.engine.layerwise is True and lacks(ctx):
            raise EngineError(f"engine.layerwise: this SGLang has no {lacks(ctx)}; set it to false")
        self._loads: dict[RequestHandle, _Load] = {}
        self._stores: list[_Store] = []
        self._quarantine: list[tuple[int, torch.Tensor]] = []
        self._ordered: list[tuple[int, Ticket | None]] = []
        self._layerwise: LayerwiseLoads | None = None
        self._weights = WeightChanges()
        self._flush: Callable[[], bool] = lambda: False
        self._is_flushing = False
        self._mixed_adapters: set[str] = set()
        self._prefill = PrefillTimes()
        self.times_prefill = not config.engine.prefill_tokens_per_s and any(
            tier.load_or_recompute == "auto" for tier in config.tiers
        )
        self._ticks = 0
        super().__init__(ctx)
        pool = compat.kv_pool(ctx)
        planes = device_planes(pool, config.block_tokens, self.page_size)
        check_dtype(pool, config.kv_cache_dtype)
        metrics = Metrics()
        transfer = open_transfer(planes, ctx, metrics)
        if config.engine.debug_poison:
            transfer = PoisonedTransfer(transfer, planes, metrics)
            poison_allocations(self.token_to_kv_pool_allocator, transfer)
        self._engine = config.engine
        self._adapters = AdapterDigests(ctx.tp_worker)
        try:
            manager = KVManager(
                config,
                layout=planes.layout,
                namespace=model_namespace(ctx, pool, planes.layout, configured=config.namespace),
                transfer=transfer,
                metrics=metrics,
                on_receipt=TransferLog(is_on=config.engine.log_transfers),
                source=effective.file or "environment",
            )
            manager.start()
        except BaseException:
            transfer.close()
            raise
        self._counter_log = CounterLog(metrics, config.engine.log_counters_s)
        self.connector = FlexKVConnector(manager, config.engine, first_tier=config.tiers[0].name)
        self._endings = [
            self._give_up_all,
            self.connector.poll,
            self._end_stores,
            self._end_quarantines,
            self._end_ordered,
            self._tick_layers,
        ]
        self._token_bytes = planes.layout.token_bytes
        try:
            self._await_layers(ctx, planes, transfer, manager)
        except BaseException:
            manager.shutdown()
            raise
        logger.info(
            "[FlexKV] Connector ready rank=%d/%d: layerwise=%s, prefetch=%s, tiers=%s, %s, namespace=%s",
            ctx.tp_rank,
            ctx.tp_size,
            config.engine.layerwise if self._layerwise is not None else False,
            config.engine.prefetch,
            " -> ".join(tier.name for tier in config.tiers),
            planes.layout.describe(),
            manager.namespace.digest().hex()[:12],
        )

    def _await_layers(self, ctx: Any, planes: DevicePlanes, transfer: Transfer, manager: KVManager) -> None:
        """Have forward passes ask for each layer, unless no load will ever be awaited that way."""
        mode, has_streams = self._engine.layerwise, planes.device.type == "cuda"
        num_layers = planes.layout.num_layers
        self._mode = ModeChoice(mode, has_streams=has_streams, num_layers=num_layers)
        if not self._mode.may_be_by_layer:
            return
        missing = lacks(ctx)
        if missing:
            logger.warning("[FlexKV] loads are awaited as a whole: this SGLang has no %s", missing)
            return
        try:
            counters = LayerCounters(num_layers)
        except OSError as exc:
            if mode is True:
                raise EngineError(f"no descriptors for {num_layers} layers (ulimit -n): {exc}") from exc
            logger.warning("[FlexKV] loads are awaited as a whole: no descriptors for their layers: %s", exc)
            return
        waits = LayerWaits(
            counters,
            timeout_s=self._engine.load_deadline_s,
            rank=ctx.tp_rank,
            is_alive=transfer.is_alive,
        )
        register_counter(ctx, waits)
        self._layerwise = LayerwiseLoads(self, manager, waits, self._mode)

    # ---- a fault of ours -----------------------------------------------------------------------

    def _switch_off(self, where: str, fault: Exception) -> None:
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
        if not (self._ordered or self.holds_slots()):
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
        try:
            return layerwise.visible(params)
        except Exception as exc:  # what it would have hidden is not known: the request is given nothing
            if not self.fails_open:
                raise
            self._switch_off("match_prefix", exc)
            return params if params.req is None else replace(params, key=params.key[:0])

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """From 0.5.22: nothing beside dead slots, as for requests that SGLang keeps out of the tree."""
        if self._layerwise is None or not self._keeps_out(req, up_to, self._layerwise):
            super().checkpoint(req, up_to=up_to, **kwargs)

    def _keeps_out(self, req: Any, up_to: int, layerwise: LayerwiseLoads) -> bool:
        try:
            return layerwise.keeps_out(req, up_to)
        except Exception as exc:  # as a request that is barred from the tree: nobody is given what is there
            if not self.fails_open:
                raise
            self._switch_off("checkpoint", exc)
            return layerwise.has_dead

    @_fails_open(0)
    def on_match(self, handle: RequestHandle, prompt: Prompt, have: int) -> int:
        if self._weights.are_suspect or prompt.namespace.adapter in self._mixed_adapters:
            return 0
        load = self._loads.get(handle)
        if load is not None:
            if load.have == have:
                return load.count
            self._give_up(handle)
        return self.connector.lookup_kv(
            handle, lambda: prompt.tokens, prompt.num_tokens, self._scope(prompt.namespace), have
        )

    @_fails_open(Verdict.RECOMPUTE)
    def on_load_back(
        self, handle: RequestHandle, req: Any, node: Any, have: int, count: int, *, may_wait: bool
    ) -> Loaded | Verdict:
        is_late = self.connector.waited_s(handle) >= self._engine.load_deadline_s
        load = self._loads.get(handle)
        if load is not None and (load.have, load.count) != (have, count):
            self._give_up(handle)
            load = None
        verdict: Loaded | Verdict = Verdict.ASK_AGAIN
        if load is None and len(self._loads) <= MOST_PASSED_OVER:
            load = self._begin(handle, req, node, have, count)
            if load is None:
                return Verdict.RECOMPUTE
        if load is not None:
            load.asked, load.asked_tick = time.monotonic(), self._ticks
            verdict = self._progress(handle, load, req)
        if verdict is Verdict.ASK_AGAIN and (is_late or not may_wait):
            return self._wait_no_more(handle)
        return verdict

    def _wait_no_more(self, handle: RequestHandle) -> Verdict:
        """A copy cannot be aborted, but its request need not wait for it (HS-3)."""
        self._give_up(handle)
        self.connector.load_failed(handle)
        return Verdict.RECOMPUTE

    def _begin(self, handle: RequestHandle, req: Any, node: Any, have: int, count: int) -> _Load | None:
        scope = self._scope(compat.request_namespace(req))
        task = self.connector.start_load_kv(handle, have, count, scope)
        if task == NO_TASK:
            return None
        self.inc_lock_ref(node)
        key = compat.prompt_key(req, have + count)
        load = self._loads[handle] = _Load(task, have, count, key, node)
        return load

    def _progress(self, handle: RequestHandle, load: _Load, req: Any) -> Loaded | Verdict:
        """One step: staged, then slots, then copied, or on the way by layer.

        All loads of a pass wait ``load_wait_s`` together.
        """
        manager = self.connector.manager
        if load.slots is None:
            if not self.connector.wait_staged(load.task):
                return Verdict.ASK_AGAIN
            if not manager.is_over(load.task):
                load.slots = compat.alloc_slots(self, load.count)
                if load.slots is None:
                    manager.metrics.count("load_failures", tier="device", cause="no_device_slots")
                    self._give_up(handle)
                    return Verdict.RECOMPUTE
                by_layer = self._start_copy(load, load.slots)
                if by_layer is not None:
                    return self._collect(handle, load, req, by_layer)
        ticket = manager.ticket(load.task)
        is_ordered = ticket is not None and ticket.order_behind()
        if not is_ordered and not self.connector.wait_over(load.task):
            return Verdict.ASK_AGAIN
        return self._collect(handle, load, req)

    def _start_copy(self, load: _Load, slots: torch.Tensor) -> Ticket | None:
        """Begin to copy; returns the copy if passes can wait for it layer by layer."""
        layerwise = self._layerwise
        if layerwise is not None and layerwise.wants(load.count * self._token_bytes):
            return self.connector.start_load_kv_layerwise(load.task, slots)
        self.connector.retrieve_kv(load.task, slots)
        return None

    def _collect(
        self, handle: RequestHandle, load: _Load, req: Any, by_layer: Ticket | None = None
    ) -> Loaded | Verdict:
        """The load is over, or ordered before whatever the engine does next: into the tree with it."""
        storage = self.connector.storage_tokens(handle, load.have)
        placed = (
            self._into_tree_early(handle, load, by_layer)
            if by_layer is not None
            else self._into_tree(handle, load)
        )
        if placed is None:
            self.connector.load_failed(handle)
            return Verdict.RECOMPUTE
        compat.report_storage_tokens(req, min(storage, load.count))
        return Loaded(*placed)

    def _into_tree(self, handle: RequestHandle, load: _Load) -> tuple[Any, torch.Tensor] | None:
        answer = self.connector.result(load.task)
        del self._loads[handle]
        slots = load.slots
        placed = None
        ticket = self.connector.manager.ticket(load.task)
        if answer.status is KVResponseStatus.UNREADY and ticket is not None:
            # The device runs it before whatever the engine queues next.
            self._ordered.append((load.task, ticket))
        if answer.status in (KVResponseStatus.SUCCESS, KVResponseStatus.UNREADY) and slots is not None:
            placed = compat.insert_loaded(self, load.key, load.have, slots)
        elif slots is not None:
            compat.free_slots(self, slots)
        self.dec_lock_ref(load.node)
        return placed

    def _into_tree_early(
        self, handle: RequestHandle, load: _Load, ticket: Ticket
    ) -> tuple[Any, torch.Tensor] | None:
        """Its copy runs, and passes wait for each layer: what the tree does not take waits for its end."""
        slots, layerwise = load.slots, self._layerwise
        if slots is None or layerwise is None:
            raise AssertionError("a load that runs by layer has slots")

        def set_aside(unused: torch.Tensor) -> None:
            if len(unused):
                self._quarantine.append((load.task, unused))

        awaited = layerwise.open(load.task, ticket)  # before anybody can find the slots
        placed = compat.insert_loaded(self, load.key, load.have, slots, set_aside)
        del self._loads[handle]
        self.dec_lock_ref(load.node)
        if placed is not None:
            layerwise.hold(awaited, load.key, load.have, placed[0], slots)
        return placed

    def _give_up(self, handle: RequestHandle) -> None:
        """Let a load go: its slots are free once its copy has ended."""
        load = self._loads.pop(handle, None)
        if load is None:
            return
        self.connector.release(load.task)
        self.dec_lock_ref(load.node)
        if load.slots is not None:
            self._quarantine.append((load.task, load.slots))
            self._end_quarantines()

    def _give_up_all(self) -> None:
        for handle in list(self._loads):
            self._give_up(handle)

    def _end_quarantines(self) -> None:
        manager = self.connector.manager
        still = []
        for task, slots in self._quarantine:
            if manager.is_over(task):
                manager.try_wait([task])
                compat.free_slots(self, slots)
            else:
                still.append((task, slots))
        self._quarantine = still
        manager.metrics.gauge("quarantined_slots", sum(len(slots) for _, slots in still))

    # ---- stores --------------------------------------------------------------------------------

    @_fails_open(None)
    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if not (checkpoint.is_finished or self._engine.store_running):
            return
        if self._weights.are_suspect or checkpoint.namespace.adapter in self._mixed_adapters:
            return
        if self._layerwise is not None and self._layerwise.is_dead(checkpoint):
            return
        task = self.connector.store_kv(
            checkpoint.handle,
            lambda: checkpoint.tokens,
            checkpoint.num_tokens,
            self._scope(checkpoint.namespace),
            checkpoint.slots,
            is_finished=checkpoint.is_finished,
        )
        if task != NO_TASK:
            self.inc_lock_ref(checkpoint.node)
            self._stores.append(_Store(task, checkpoint.node))

    def _end_stores(self) -> None:
        manager = self.connector.manager
        still = []
        for store in self._stores:
            if manager.is_over(store.task):
                manager.try_wait([store.task])
                self.dec_lock_ref(store.node)
            else:
                still.append(store)
        self._stores = still

    # ---- life of a request ---------------------------------------------------------------------

    @_fails_open(None)
    def on_end(self, handle: RequestHandle) -> None:
        self._give_up(handle)
        self.connector.forget(handle)

    @_fails_open(None)
    def on_abort(self, handle: RequestHandle) -> None:
        self.on_end(handle)

    # ---- ticks ---------------------------------------------------------------------------------

    @_fails_open(None)
    def on_pass_begins(self, num_tokens: int) -> None:
        waits = bool(self._ordered) or (self._layerwise is not None and not self._layerwise.is_idle)
        self._prefill.begins(0 if waits else num_tokens)  # a pass behind a copy tells nothing of computing

    @_fails_open(None)
    def on_pass_ends(self) -> None:
        timed = self._prefill.ends()
        if timed is not None:
            self.connector.manager.note_prefill(*timed)

    def on_tick(self) -> None:
        if self.is_broken:
            self._wind_up()
        else:
            self._tick()

    @_fails_open(None)
    def _tick(self) -> None:
        self._ticks += 1
        self.connector.begin_pass()
        self._counter_log.tick()
        self._flush_if_owed()
        if self._stores:
            self._end_stores()
        if self._quarantine:
            self._end_quarantines()
        if self._ordered:
            self._end_ordered()
        self._tick_layers()
        if self._loads:
            self._adopt_orphans()
        if self._stores or self._loads or self._quarantine:
            time.sleep(0)  # SGLang's idle loop would keep the interpreter from the threads that copy

    def _end_ordered(self) -> None:
        self._ordered = [entry for entry in self._ordered if not self._is_delivered(*entry)]

    def _tick_layers(self) -> None:
        if self._layerwise is not None:
            self._layerwise.tick()

    def _is_delivered(self, task: int, ticket: Ticket | None) -> bool:
        """Whether a copy that the engine was ordered behind has ended.

        Raises:
            EngineError: it failed, and the engine has used its slots meanwhile: better no answer than a
                wrong one.
        """
        answer = self.connector.manager.try_wait([task]).get(task)
        if answer is None:
            return False
        if ticket is not None and ticket.error is not None:
            raise EngineError(f"a restore failed on the device after its slots were used: {ticket.error}")
        if ticket is not None:
            self._mode.observe(ticket)
        return True

    def on_batch_end(self) -> None:
        self.on_tick()

    @_fails_open(None)
    def on_pass_reads(self, batch: Any) -> None:
        if self._layerwise is not None and not self._layerwise.is_idle:
            self._layerwise.begin_pass(batch)

    def on_pass_launched(self, scheduler: Any, batch: Any) -> None:
        layerwise = self._layerwise
        if layerwise is None or layerwise.is_idle:
            return
        try:
            layerwise.abort_failed(scheduler, batch)
        except EngineError:
            raise
        except (
            Exception
        ) as exc:  # who builds on a load that failed is not known: all of this pass are aborted
            if not self.fails_open:
                raise
            if self.is_broken:
                raise EngineError("no pass can be told from one that a failed load has spoilt") from exc
            self._switch_off("on_pass_launched", exc)
            for req in batch.reqs:
                compat.abort_request(scheduler, req, "flexkv: a fault while layerwise loads were under way")

    def _adopt_orphans(self) -> None:
        """Loads whose request went away without a word: what they brought is the tree's."""
        oldest = time.monotonic() - _ORPHAN_S
        for handle, load in list(self._loads.items()):
            if load.asked > oldest or load.asked_tick > self._ticks - _ORPHAN_TICKS:
                continue
            if self.connector.manager.is_over(load.task):
                self._into_tree(handle, load)
                self.connector.forget(handle)
            elif load.slots is None:
                self._give_up(handle)

    @_fails_open(None)
    def on_evict(self, num_tokens: int) -> None:  # noqa: ARG002 - any number: ended stores unlock what may go
        if self._stores or self._layerwise is not None:
            self.connector.poll()
        if self._stores:
            self._end_stores()
        if self._layerwise is not None:
            self._layerwise.settle()

    def tokens_held_for(self, handle: RequestHandle) -> int:
        load = self._loads.get(handle)
        return load.count if load is not None and load.slots is not None else 0

    def holds_slots(self) -> bool:
        is_layerwise = self._layerwise is not None and not self._layerwise.is_idle
        return bool(self._loads or self._stores or self._quarantine) or is_layerwise

    def extra_protected_tokens(self) -> int:
        held = sum(load.count for load in self._loads.values() if load.slots is not None)
        return held + sum(len(slots) for _, slots in self._quarantine)

    # ---- flush, weights, the end ---------------------------------------------------------------

    def may_flush(self) -> bool:
        self._give_up_all()
        end = time.monotonic() + self._engine.shutdown_deadline_s
        while pending := self._copying():
            if not self.connector.wait_over(pending[0], max(0.0, end - time.monotonic())):
                return False
            if self.is_broken:  # nothing is taken off its lists any more
                return all(
                    self.connector.wait_over(task, max(0.0, end - time.monotonic())) for task in pending
                )
            self.on_tick()
        return True

    def _copying(self) -> list[int]:
        """Tasks whose copies may still touch a device slot."""
        held = [store.task for store in self._stores]
        held += [task for task, _ in (*self._quarantine, *self._ordered)]
        return held + (self._layerwise.tasks if self._layerwise is not None else [])

    def on_reset(self) -> None:
        if not self.may_flush():
            if self._quarantine or self._ordered or (self._layerwise is not None and self._layerwise.tasks):
                raise EngineError(
                    "a copy to the device does not end, and its slots are about to be given away: "
                    "ending here is better than KV that is overwritten unseen"
                )
            logger.error("[FlexKV] the device is reset while stores are under way: they are thrown away")
            for store in self._stores:
                self.connector.release(store.task)  # what it reads from now on is not its tokens' KV
            self._ordered += [(store.task, None) for store in self._stores]
        if self._layerwise is not None:
            self._layerwise.reset()
        self._loads.clear()
        self._stores.clear()
        self._quarantine.clear()
        self.connector.reset()
        self._mixed_adapters.clear()
        self._weights.flushed()
        self.connector.manager.metrics.gauge("weights_suspect", int(self._weights.are_suspect))

    @_fails_open(None)
    def on_weights_changed(self, reason: str) -> None:
        if not self._weights.are_suspect:  # a session may bring its tensors in a hundred calls
            logger.warning(
                "[FlexKV] %s: all tiers are invalidated; nothing is stored or restored before the next flush",
                reason,
            )
        self._weights.begins()
        self.connector.manager.metrics.gauge("weights_suspect", 1)
        self._give_up_all()
        self.connector.invalidate()

    def on_weights_settled(self, call: str, flush: Callable[[], bool], *, is_ok: bool) -> None:
        if self.is_broken:
            return
        self._weights.ended(call, is_ok=is_ok)
        self._flush = flush
        if not is_ok:
            logger.warning(
                "[FlexKV] %s has failed, and may have changed some weights: the device is flushed when "
                "no request runs",
                call,
            )
        self._flush_if_owed()

    def _flush_if_owed(self) -> None:
        """Empty the device where SGLang does not, once nothing runs; a flush ticks, too."""
        if self._weights.want_flush and not self._is_flushing:
            self._is_flushing = True
            try:
                self._flush()
            finally:
                self._is_flushing = False

    @_fails_open(None)
    def on_adapter_loaded(self, lora_id: str) -> None:
        if not self._adapters.loaded(lora_id):
            return
        logger.warning(
            "[FlexKV] LoRA adapter %s was loaded with another content: until the next flush nothing of it is "
            "stored or restored",
            lora_id,
        )
        self._mixed_adapters.add(lora_id)
        self._give_up_all()
        self.connector.reset()

    def on_sleep(self) -> None:
        if not self.may_flush():
            raise EngineError("device memory is about to go, and a copy to or from it does not end")

    def on_shutdown(self) -> None:
        self._give_up_all()
        self._counter_log.log()
        self.connector.shutdown()
        if self._layerwise is not None:
            self._layerwise.close()

    def _scope(self, namespace: RequestNamespace) -> Scope:
        return Scope(
            adapter=self._adapters.name(namespace.adapter),
            adapter_digest=self._adapters.of(namespace.adapter),
            extra_key=namespace.extra_key,
            cache_salt=namespace.salt,
        )
