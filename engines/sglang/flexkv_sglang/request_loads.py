"""Loads of requests: from their first question at admission until the tree has what they bring.

A load is staged in host slots, then copied into device slots, and put into the tree when it is over, or
ordered before whatever the engine does next, or awaited by the pass layer by layer (``layerwise``).  A
partial load never reaches SGLang.

Threads: the scheduler's only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from flexkv_core.manager import NO_TASK, KVResponseStatus, Scope
from flexkv_core.transfer import Ticket

from . import compat
from .admission import MOST_PASSED_OVER
from .compat import RequestHandle
from .connector import FlexKVConnector
from .handover import Loaded, Verdict
from .layerwise import LayerwiseLoads
from .ordered import OrderedCopies
from .quarantine import Quarantine

_ORPHAN_S = 1.0
_ORPHAN_TICKS = 8
"""A finished load that nobody has asked for so long, and for so many ticks (a pass of the scheduler has
two, and may take longer than a second), goes into the tree for whoever comes; see ``adopt_orphans``."""


@dataclass(frozen=True)
class Promise:
    """What a request was promised, as it is asked for at admission.

    Attributes:
        handle: The attempt.
        req: SGLang's request.
        node: Where the load hangs below.
        have: Tokens before the first promised one.
        count: Promised tokens.
        scope: What separates the request.
    """

    handle: RequestHandle
    req: Any
    node: Any
    have: int
    count: int
    scope: Scope


@dataclass(eq=False)
class Load:
    """A load that SGLang was not told of yet.

    Attributes:
        task: The manager's task.
        have: Tokens before the first loaded one.
        count: Tokens that it brings.
        key: SGLang's key of the whole prompt, copied.
        node: Where it hangs below; locked.
        priority: Its request's, for SGLang's eviction by priority.
        slots: Device slots, once they are taken.
        asked: When SGLang last asked for it.
        asked_tick: The same, in ticks.
    """

    task: int
    have: int
    count: int
    key: Any
    node: Any
    priority: int
    slots: torch.Tensor | None = None
    asked: float = 0.0
    asked_tick: int = 0


class RequestLoads:
    """The loads under way.

    Attributes:
        open: By request; SGLang was not told of them yet.
    """

    def __init__(
        self,
        tree: Any,
        connector: FlexKVConnector,
        quarantine: Quarantine,
        ordered: OrderedCopies,
        layerwise: LayerwiseLoads | None,
    ) -> None:
        """None yet.

        Args:
            tree: The radix cache.
            connector: What the loads run through.
            quarantine: Where slots go whose load was given up.
            ordered: Where copies go that the engine goes on behind.
            layerwise: Loads that passes wait for layer by layer; None where there are none.
        """
        self.open: dict[RequestHandle, Load] = {}
        self._tree = tree
        self._connector = connector
        self._manager = connector.manager
        self._quarantine = quarantine
        self._ordered = ordered
        self._layerwise = layerwise
        self._ticks = 0

    @property
    def num_tokens(self) -> int:
        """Device slots that are held, outside the tree."""
        return sum(map(self.held_for, self.open))

    def held_for(self, handle: RequestHandle) -> int:
        """Those of them that are held for one request."""
        load = self.open.get(handle)
        return load.count if load is not None and load.slots is not None else 0

    def promised(self, handle: RequestHandle, have: int) -> int:
        """What a request's load brings behind ``have``; 0 without one.  One behind another is given up."""
        load = self.open.get(handle)
        if load is None:
            return 0
        if load.have == have:
            return load.count
        self.give_up(handle)
        return 0

    def bring(self, promise: Promise, *, may_wait: bool) -> Loaded | Verdict:
        """Begin what was promised, or go on with it; see ``SeamRadixCache.on_load_back``."""
        handle = promise.handle
        is_late = self._connector.is_late(handle)
        load = self.open.get(handle)
        if load is not None and (load.have, load.count) != (promise.have, promise.count):
            self.give_up(handle)
            load = None
        verdict: Loaded | Verdict = Verdict.ASK_AGAIN
        if load is None and len(self.open) <= MOST_PASSED_OVER:
            load = self._begin(promise)
            if load is None:
                return Verdict.RECOMPUTE
        if load is not None:
            timeout_s = self._patience(load, promise.req, may_wait=may_wait)
            load.asked, load.asked_tick = time.monotonic(), self._ticks
            verdict = self._progress(handle, load, promise.req, timeout_s, may_wait=may_wait)
        if verdict is Verdict.ASK_AGAIN and (is_late or not may_wait):
            return self._wait_no_more(handle)
        return verdict

    def give_up(self, handle: RequestHandle) -> None:
        """Let a load go: its slots are free once its copy has ended."""
        load = self.open.pop(handle, None)
        if load is None:
            return
        self._connector.release(load.task)
        self._tree.dec_lock_ref(load.node)
        if load.slots is not None:
            self._quarantine.add(load.task, load.slots)
            self._quarantine.release()

    def give_up_all(self) -> None:
        """Let all loads go."""
        for handle in list(self.open):
            self.give_up(handle)

    def adopt_orphans(self) -> None:
        """Once a tick: what loads have brought that nobody asks for is the tree's.

        One that still runs may be a live request's: somebody else's chunks may spend every pass.  It is given
        up only where nobody tells of aborts, or where it keeps others from beginning theirs.
        """
        self._ticks += 1
        tells = self._tree.seam.reports_aborts
        oldest = time.monotonic() - _ORPHAN_S
        for handle, load in list(self.open.items()):
            if load.asked > oldest or load.asked_tick > self._ticks - _ORPHAN_TICKS:
                continue
            if self._manager.is_over(load.task):
                self._into_tree(handle, load)
                if not tells:
                    self._connector.forget(handle)
            elif load.slots is None and not (tells and len(self.open) <= MOST_PASSED_OVER):
                self.give_up(handle)

    # ---- one load ------------------------------------------------------------------------------

    def _begin(self, promise: Promise) -> Load | None:
        task = self._connector.start_load_kv(promise.handle, promise.have, promise.count, promise.scope)
        if task == NO_TASK:
            return None
        self._tree.inc_lock_ref(promise.node)
        key = compat.prompt_key(promise.req, promise.have + promise.count)
        priority = compat.priority(promise.req)
        load = Load(task, promise.have, promise.count, key, promise.node, priority)
        self.open[promise.handle] = load
        return load

    def _patience(self, load: Load, req: Any, *, may_wait: bool) -> float | None:
        """How long a load is waited for; None: all loads of a pass wait ``load_wait_s`` together."""
        if not may_wait and load.slots is not None and not self._tree.has_room(req):
            return self._connector.load_deadline_s  # slots that are given up leave no room to compute it
        # Who waits longer than one pass holds nobody else up any more.
        return 0.0 if load.asked and self._tree.others_run else None

    def _progress(
        self, handle: RequestHandle, load: Load, req: Any, timeout_s: float | None, *, may_wait: bool
    ) -> Loaded | Verdict:
        """One step: staged, then slots, then copied, or on the way by layer.

        Who may not wait takes no slots for a copy that may last: they could be neither used nor given back.
        """
        manager = self._manager
        if load.slots is None:
            if not may_wait and not self._is_by_layer(load):
                return Verdict.ASK_AGAIN
            if not self._connector.wait_staged(load.task, timeout_s):
                return Verdict.ASK_AGAIN
            if not manager.is_over(load.task):
                load.slots = compat.alloc_slots(self._tree, load.count)
                if load.slots is None:
                    manager.metrics.count("load_failures", tier="device", cause="no_device_slots")
                    self.give_up(handle)
                    return Verdict.RECOMPUTE
                by_layer = self._start_copy(load, load.slots)
                if by_layer is not None:
                    return self._collect(handle, load, req, by_layer)
        connector = self._connector
        if connector.order_behind(load.task, timeout_s) or connector.wait_over(load.task, timeout_s):
            return self._collect(handle, load, req)
        return Verdict.ASK_AGAIN

    def _is_by_layer(self, load: Load) -> bool:
        num_bytes = load.count * self._manager.layout.token_bytes
        return self._layerwise is not None and self._layerwise.wants(num_bytes)

    def _start_copy(self, load: Load, slots: torch.Tensor) -> Ticket | None:
        """Begin to copy; returns the copy if passes can wait for it layer by layer."""
        if self._is_by_layer(load):
            return self._connector.start_load_kv_layerwise(load.task, slots)
        self._connector.retrieve_kv(load.task, slots)
        return None

    def _wait_no_more(self, handle: RequestHandle) -> Verdict:
        """A copy cannot be aborted, but its request need not wait for it (HS-3)."""
        self.give_up(handle)
        self._connector.load_failed(handle)
        return Verdict.RECOMPUTE

    def _collect(
        self, handle: RequestHandle, load: Load, req: Any, by_layer: Ticket | None = None
    ) -> Loaded | Verdict:
        """The load is over, or ordered before whatever the engine does next: into the tree with it."""
        storage = self._connector.storage_tokens(handle, load.have)
        placed = (
            self._into_tree_early(handle, load, by_layer)
            if by_layer is not None
            else self._into_tree(handle, load)
        )
        if placed is None:
            self._connector.load_failed(handle)
            return Verdict.RECOMPUTE
        compat.report_storage_tokens(req, min(storage, load.count))
        return Loaded(*placed)

    def _into_tree(self, handle: RequestHandle, load: Load) -> tuple[Any, torch.Tensor] | None:
        answer = self._connector.result(load.task)
        del self.open[handle]
        slots = load.slots
        placed = None
        ticket = self._manager.ticket(load.task)
        if answer.status is KVResponseStatus.UNREADY and ticket is not None:
            # The device runs it before whatever the engine queues next.
            self._ordered.add(load.task, ticket)
        if answer.status in (KVResponseStatus.SUCCESS, KVResponseStatus.UNREADY) and slots is not None:
            placed = compat.insert_loaded(self._tree, load.key, load.have, slots, priority=load.priority)
        elif slots is not None:
            compat.free_slots(self._tree, slots)
        self._tree.dec_lock_ref(load.node)
        return placed

    def _into_tree_early(
        self, handle: RequestHandle, load: Load, ticket: Ticket
    ) -> tuple[Any, torch.Tensor] | None:
        """Its copy runs, and passes wait for each layer: what the tree does not take waits for its end."""
        slots, layerwise = load.slots, self._layerwise
        if slots is None or layerwise is None:
            raise AssertionError("a load that runs by layer has slots")

        def set_aside(unused: torch.Tensor) -> None:
            self._quarantine.add(load.task, unused)

        awaited = layerwise.open(load.task, ticket)  # before anybody can find the slots
        placed = compat.insert_loaded(
            self._tree, load.key, load.have, slots, set_aside, priority=load.priority
        )
        del self.open[handle]
        self._tree.dec_lock_ref(load.node)
        if placed is not None:
            layerwise.hold(awaited, load.key, load.have, placed[0], slots)
        return placed
