"""LayerWaits: the loads that an engine's next forward passes build on, awaited layer by layer.

A pass waits for the loads that it was said to read (``begin_pass``); one of which nothing was said waits for
every load that has not ended.  On a device with streams the wait is an event on the stream
(``Ticket.order_layer``); elsewhere, and where a stream cannot wait, the calling thread waits for the counter.

A wait that fails does not raise: it would end the engine in the middle of a pass.  The load is marked,
later layers do not wait for it again, and ``take_failed`` hands it to whoever drops the pass' results.

Threads: the engine's thread only; copies signal from theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..transfer import Ticket
from .counters import Counter, LayerCounters

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
"""How often a waiter looks whether anybody still copies: death is seen within a second."""


@dataclass(eq=False)
class LayerLoad:
    """One load that is awaited layer by layer.

    Attributes:
        ticket: Its copy.
        task: The engine's number of it.
        counter: Where its layers are counted.
        generation: Of the counter.
        deadline: When a wait for it fails, in monotonic seconds.
        ready_to: The last layer that is known to be there; -1 for none.
        asked_to: The last layer that passes have asked for; -1 for none.
        had: Layers that were in place when the last pass began: for those behind it must ask.
        is_ordered: A stream was told to wait for it.
        is_used: So it was by a pass whose results are kept: a failure from now on is seen too late.
        failure: Which layer did not come, and why; empty while all is well.
    """

    ticket: Ticket
    task: int
    counter: Counter
    generation: int
    deadline: float
    ready_to: int = -1
    asked_to: int = -1
    had: int = 0
    is_ordered: bool = False
    is_used: bool = False
    failure: str = ""


class LayerWaits:
    """The layerwise loads of one engine rank."""

    def __init__(
        self,
        counters: LayerCounters,
        *,
        timeout_s: float,
        rank: int = 0,
        is_alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No loads yet.

        Args:
            counters: Owned from now on.
            timeout_s: Longest time from a load's start to each of its layers.
            rank: For messages.
            is_alive: Whether whoever copies still lives; asked a few times a second while waiting.
            clock: Monotonic seconds.
        """
        self.num_layers = counters.num_layers
        self._counters = counters
        self._timeout_s = timeout_s
        self._rank = rank
        self._is_alive = is_alive
        self._clock = clock
        self._batch: Counter | None = None
        self._loads: list[LayerLoad] = []
        self._reads: Sequence[LayerLoad] | None = None
        self._asked = self._deepest = -1
        self._failed: list[LayerLoad] = []

    @property
    def num_open(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    @property
    def may_open(self) -> bool:
        """Whether a counter is free for a load; else it has to be awaited as a whole."""
        return self._batch is not None or self._counters.has_idle

    def begin_batch(self) -> None:
        """A pass begins: loads from now on are for another one."""
        self._batch = None
        self._asked = -1
        for load in self._loads:
            load.had = load.ticket.num_layers_ready

    def begin_pass(self, reads: Sequence[LayerLoad]) -> None:
        """Until ``end_pass`` whoever asks for layers reads these loads, and no other."""
        self._reads = reads

    def end_pass(self) -> None:
        """Its results are kept, but for what ``take_failed`` gave.  Who asks now may read any load."""
        self._reads = None
        for load in self._loads:
            load.is_used = load.is_used or (load.is_ordered and not load.failure)

    def open(self, ticket: Ticket, task: int, *, by_worker: bool = False) -> LayerLoad:
        """Have passes wait for a load.  ``may_open`` must say so.

        Args:
            ticket: The running copy.
            task: Its number, for messages.
            by_worker: A worker in another process copies, and signals the counter itself; the ticket's end
                is what it says when it has signalled for the last time.
        """
        batch = self._batch = self._batch or self._counters.take()
        if batch is None:
            raise AssertionError("no counter is free: ask may_open first")
        load = LayerLoad(ticket, task, batch, batch.generation, self._clock() + self._timeout_s)
        self._loads.append(load)
        signal = batch.add()
        if not by_worker:
            ticket.listen(signal)
        return load

    def wait_until(self, layer: int) -> None:
        """Let the calling pass read ``layer`` and all before it, of its loads.  Blocks where it must."""
        self._asked = max(self._asked, layer)
        for load in self._loads if self._reads is None else self._reads:
            load.asked_to = max(load.asked_to, layer)
            if load.ready_to < layer and not load.failure:
                self._wait(load, layer)

    def fail_unasked(self, reads: Sequence[LayerLoad]) -> bool:
        """After a pass that reads ``reads``: those fail of which nobody has asked for all that it has read.

        Such a pass does not call us (it is replayed as a graph that nobody told us of): it may have read
        anything, also where the copy has ended meanwhile.  What an earlier pass has asked for is there for
        this one: it waited, or the stream that both run on does.  Which layers a pass reads is what others
        have asked for: a model may skip the last ones.  Returns whether there were any.
        """
        self._deepest = max(self._deepest, self._asked if reads else -1)
        last = self._deepest if self._deepest >= 0 else self.num_layers - 1
        found = [load for load in reads if max(load.asked_to + 1, load.had) <= last and not load.failure]
        for load in found:
            self._fail(load, load.asked_to + 1, "the pass that reads it did not ask for it")
        return bool(found)

    def take_failed(self) -> list[LayerLoad]:
        """Loads whose layers were not there when a pass needed them, each once."""
        failed, self._failed = self._failed, []
        return failed

    def collect(self) -> list[LayerLoad]:
        """Loads whose copies have ended, each once: their device slots are free of them."""
        ended = [load for load in self._loads if load.ticket.is_over]
        if ended:
            self._loads = [load for load in self._loads if not load.ticket.is_over]
            for load in ended:
                load.counter.release()
        return ended

    def close(self) -> None:
        """Close the counters.  After the transfer, whose threads signal them."""
        self._counters.close()

    def _wait(self, load: LayerLoad, layer: int) -> None:
        """Until the layer is there, or this stream is told to wait for it: whichever can be first."""
        ticket = load.ticket
        while True:
            if ticket.is_layer_ready(layer):
                load.ready_to = layer
                return None
            began = self._clock()
            look_s = max(0.0, min(_LOOK_S, load.deadline - began))
            if ticket.order_layer(layer, look_s):
                if ticket.is_layer_ready(layer):
                    continue
                load.is_ordered = True  # this stream; another one that reads the layer is ordered in its turn
                return None
            # Where nothing can be ordered that was answered at once, and the time is left for the bytes.
            is_counted = load.counter.wait(layer, max(0.0, began + look_s - self._clock()))
            if ticket.error is not None:
                return self._fail(load, layer, str(ticket.error))
            if is_counted:
                load.ready_to = layer
                return None
            if not self._is_alive():
                return self._fail_all(layer, "whoever copies it has died")
            if self._clock() >= load.deadline:
                return self._fail(load, layer, f"not there {self._timeout_s:g} s after the load began")

    def _fail_all(self, layer: int, why: str) -> None:
        """Nobody copies any more: what is not there now will never be."""
        for load in self._loads:
            if not load.failure and not load.ticket.is_layer_ready(layer):
                self._fail(load, layer, why)

    def _fail(self, load: LayerLoad, layer: int, why: str) -> None:
        load.failure = (
            f"rank {self._rank}, task {load.task}, counter {load.counter.index} "
            f"(generation {load.generation}), layer {layer}: {why}"
        )
        logger.error("[FlexKV] layerwise load failed: %s", load.failure)
        self._failed.append(load)
