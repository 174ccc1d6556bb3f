"""IP mode: loads whose layers the forward pass awaits, from their admission to the end of their copies.

A loaded node is in the tree, locked by us until its copy has ended, so that nobody's eviction or abort
gives its slots away under the copy.  If a layer does not come, the pass goes on with what is there and
its results are dropped: each request of the batch that builds on these slots is aborted, whoever loaded
them.  Until the dead slots are out of the tree, nobody is given them and none of them is stored.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flexkv_core import EngineError
from flexkv_core.layerwise.waits import LayerLoad, LayerWaits
from flexkv_core.manager import KVManager
from flexkv_core.transfer import Ticket

from . import compat
from .mode_choice import ModeChoice

if TYPE_CHECKING:
    from .handover import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Open:
    """A loaded span of the tree whose copy has not ended, or whose copy has failed.

    Attributes:
        load: How it is awaited.
        key: SGLang's key up to the span's end, a copy.
        have: Tokens before the span.
        node: The tree's node at its end, locked.
        slots: What the copy writes: 1-D int64 on the device.
    """

    load: LayerLoad
    key: Any
    have: int
    node: Any
    slots: torch.Tensor


class LayerwiseLoads:
    """All loads of one tree that are, or were, awaited layer by layer and whose slots are not settled."""

    def __init__(self, tree: Any, manager: KVManager, waits: LayerWaits, choice: ModeChoice) -> None:
        """None yet."""
        self._tree = tree
        self._manager = manager
        self._waits = waits
        self._choice = choice
        self._open: list[_Open] = []
        self._dead: list[_Open] = []

    @property
    def tasks(self) -> list[int]:
        """Tasks whose copies may still move bytes."""
        return [entry.load.task for entry in (*self._open, *self._dead) if not entry.load.ticket.is_over]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held."""
        return not self._open and not self._dead

    @property
    def has_dead(self) -> bool:
        """Whether there are slots in the tree that a failed load left behind."""
        return bool(self._dead)

    @property
    def holders(self) -> list[Any]:
        """The nodes that are locked here."""
        return [entry.node for entry in (*self._open, *self._dead)]

    def wants(self, num_bytes: int) -> bool:
        """Whether a load of so many bytes is to be awaited layer by layer, and can be."""
        return self._choice.by_layer(num_bytes) and self._waits.may_open

    def open(self, task: int, ticket: Ticket) -> LayerLoad:
        """From now on passes wait for this load.  Before the tree has its slots: ``hold`` follows then."""
        return self._waits.open(ticket, task)

    def hold(self, load: LayerLoad, key: Any, have: int, node: Any, slots: torch.Tensor) -> None:
        """The tree has the slots of an open load: they are locked until its copy has ended."""
        self._tree.inc_lock_ref(node)
        self._open.append(_Open(load, key, have, node, slots))

    def _entry(self, load: LayerLoad) -> _Open | None:
        """What is held for a load; None where the tree took none of it, so that nothing builds on it."""
        return next((entry for entry in self._open if entry.load is load), None)

    def tick(self) -> None:
        """A pass of the scheduler begins.  Raises as ``settle``."""
        self._waits.begin_batch()
        self.settle()

    def settle(self) -> None:
        """Unlock what has come; take out what has not, once it can be.

        Raises:
            EngineError: a copy failed on the device after a pass was ordered behind it: what the pass read
                is not known, and better no answer than a wrong one.
        """
        for load in self._waits.collect():
            self._manager.try_wait([load.task])
            _check_unused(load)
            entry = self._entry(load)
            if entry is None:
                continue
            self._open.remove(entry)
            if load.ticket.error is None:
                self._choice.observe(load.ticket)
                self._tree.dec_lock_ref(entry.node)
                continue
            self._bury(entry, str(load.ticket.error))
        if self._dead:
            self._dead = [entry for entry in self._dead if not self._is_gone(entry)]

    def _bury(self, entry: _Open, why: str) -> None:
        entry.load.failure = entry.load.failure or why
        self._manager.metrics.count("layerwise_failures")
        self._dead.append(entry)

    def _is_gone(self, entry: _Open) -> bool:
        """Take dead slots out of the tree, once no byte moves and no request holds them any more."""
        top = _span(entry)[-1]  # all locks below are counted in it
        if not entry.load.ticket.is_over or top.lock_ref > 1:
            return False
        self._tree.dec_lock_ref(entry.node)
        _drop(self._tree, top)
        logger.info("[FlexKV] %d slots of a failed load are free again", len(entry.slots))
        return True

    def begin_pass(self, batch: Any) -> None:
        """A pass of these requests is launched next: it waits for the loads that they build on."""
        self._waits.begin_pass(self._read_by(batch))

    def _read_by(self, batch: Any) -> list[LayerLoad]:
        """Loads that some request of a batch builds on: the tree says so, without a word from the device."""
        spans = [(entry.load, _span(entry)) for entry in self._open]
        path: set[Any] = set()
        for req in batch.reqs if spans else ():
            node = req.last_node
            while node is not None and node not in path:
                path.add(node)
                node = node.parent
        return [load for load, span in spans if not path.isdisjoint(span)]

    def abort_failed(self, scheduler: Any, batch: Any) -> None:
        """After a forward pass: drop its results for each request that builds on slots of a failed load.

        Raises as ``settle``.
        """
        try:
            self._bury_failed(batch)
        finally:
            self._waits.end_pass()
        for entry in self._dead:
            for req in batch.reqs:
                if self._builds_on(req, entry.slots) and compat.abort_request(
                    scheduler, req, f"flexkv: a layerwise load failed: {entry.load.failure}"
                ):
                    self._manager.metrics.count("layerwise_aborts")
                    logger.error("[FlexKV] request %r is aborted: %s", req.rid, entry.load.failure)

    def _bury_failed(self, batch: Any) -> None:
        if batch.forward_mode.is_extend() and self._waits.fail_unasked(self._read_by(batch)):
            logger.error("[FlexKV] a prefill did not ask for its layers: from now on loads are awaited whole")
            self._choice.take_none()
        for load in self._waits.take_failed():
            _check_unused(load)
            entry = self._entry(load)
            if entry is not None:
                self._open.remove(entry)
                self._bury(entry, load.failure)

    def _builds_on(self, req: Any, slots: torch.Tensor) -> bool:
        row = self._tree.req_to_token_pool.req_to_token[compat.request_row(req)]
        return has_any(row[: compat.protected_len(req)], slots)

    def is_dead(self, checkpoint: Checkpoint) -> bool:
        """Whether some of the slots that are handed over hold what a failed load left."""
        if not self._dead:
            return False
        slots = checkpoint.slots(0, checkpoint.num_tokens)
        return any(has_any(slots, entry.slots) for entry in self._dead)

    def visible(self, params: Any) -> Any:
        """A query without what failed loads left.

        What SGLang asks of its own after an insert, without a request, must find all that it has put there.
        """
        key = params.key
        if params.req is not None:
            for entry in self._dead:
                if _reaches_into(key, entry):
                    key = key[: entry.have]
        return params if key is params.key else replace(params, key=key)

    def keeps_out(self, req: Any, up_to: int) -> bool:
        """Whether a request's first tokens must stay out of the tree: it would give dead slots for its own.

        Before 0.5.22 SGLang does not ask: a request whose own slots the tree takes for doubles is aborted.
        """
        key = compat.prompt_key(req, up_to) if self._dead else None
        return any(_reaches_into(key, entry) for entry in self._dead)

    def reset(self) -> None:
        """The tree forgets everything; nothing may be moving any more."""
        self._waits.collect()
        self._open.clear()
        self._dead.clear()

    def close(self) -> None:
        """After the transfer was closed."""
        self._waits.close()


def _check_unused(load: LayerLoad) -> None:
    """Raises EngineError for a load that has failed where a pass was ordered behind it and is trusted."""
    if load.is_used and load.ticket.error is not None:
        raise EngineError(f"a restore failed on the device after it was used: {load.ticket.error}")


def _span(entry: _Open) -> list[Any]:
    """The nodes that a load has filled, from its end to its beginning; they may have been split since."""
    nodes, start = [entry.node], len(entry.key) - len(entry.node.key)
    while start > entry.have:
        nodes.append(nodes[-1].parent)
        start -= len(nodes[-1].key)
    return nodes


def _drop(tree: Any, top: Any) -> None:
    """Take an unlocked node and all below it out of the tree, and free their slots.

    Source: sglang 0.5.17 to 0.5.23, mem_cache/radix_cache.py, evict.
    """
    nodes = [top]
    for node in nodes:  # grows while it is read: parents come before their children
        nodes += node.children.values()
    for node in reversed(nodes):
        compat.free_slots(tree, node.value)
        tree._delete_leaf(node)
        if hasattr(tree, "kv_events"):
            tree.kv_events.record_remove(node)
        else:
            tree._record_remove_event(node)


def has_any(slots: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether two lists of slots have one in common."""
    return bool(torch.isin(slots.to(torch.int64), of).any())


def _reaches_into(key: Any, entry: _Open) -> bool:
    """Whether a key of SGLang goes on into a span as the span's own does; never from another namespace."""
    for name in ("extra_key", "cache_salt"):
        if getattr(key, name, None) != getattr(entry.key, name, None):
            return False
    count = entry.have + 1
    tokens, others = (one.raw_token_ids()[:count] for one in (key, entry.key))
    if type(tokens) is not type(others):  # an array never equals a list
        tokens, others = list(tokens), list(others)
    return len(tokens) == count and bool(tokens == others)
