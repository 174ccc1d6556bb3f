"""Transfer: the interface between device memory and host slots, whole or layer by layer.

A transfer copies rows: token t of a block, in each plane, between a *host slot* and a *device
slot* (a token's index in the engine's KV pool).  One ticket serves both modes: the synchronous
one waits for all layers before the forward pass, the layerwise one hands the engine a wait for
each layer.

Ordering, which is the whole art (``fence``): a store must not read a device slot before the
forward pass that writes it has done so; a load must not write one that an earlier forward pass
may still write.  Both are given a fence taken after that work was queued.  A source or target
stays leased from plan to completion: nobody frees it before the ticket is terminal.

Threads: ``load``, ``store`` and ``fence`` are called by the engine's thread and do not wait for
a copy; a ticket may be asked from any thread.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from .buffers import HostRegion, Slot, SlotPool
from .errors import TransferError
from .layout import BlockLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A run of one block's tokens.

    Attributes:
        slot: The host slot that holds the block's value.
        num_tokens: Tokens of the whole value: it decides where each plane begins.
        first: First token of the run inside the block.
        last: One behind the last.
    """

    slot: Slot
    num_tokens: int
    first: int
    last: int


class HostSpans(Sequence[BlockSpan]):
    """Spans in slots of one pool, kept as columns: cheap to make, and to read as arrays.

    Attributes:
        pool: Where the slots are.
        slots: Number of each span's slot.
        num_tokens: Per span, tokens of the whole value.
        first: Per span, its first token.
        last: Per span, one behind its last token.
    """

    __slots__ = ("first", "last", "num_tokens", "pool", "slots")

    def __init__(
        self,
        pool: SlotPool,
        slots: Sequence[int],
        num_tokens: Sequence[int],
        first: Sequence[int],
        last: Sequence[int],
    ) -> None:
        """Columns of equal length."""
        self.pool = pool
        self.slots = array("q", slots)
        self.num_tokens = array("q", num_tokens)
        self.first = array("q", first)
        self.last = array("q", last)

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, at: int) -> BlockSpan: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[BlockSpan]: ...

    def __getitem__(self, at: int | slice) -> BlockSpan | Sequence[BlockSpan]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return BlockSpan(self.pool.slot(self.slots[at]), self.num_tokens[at], self.first[at], self.last[at])

    @property
    def total_tokens(self) -> int:
        """Tokens that all spans move."""
        return sum(self.last) - sum(self.first)


class Fence(ABC):
    """A point in the device's work: everything queued before it was taken.

    A backend decides what it is (a CUDA event, nothing at all on a CPU).
    """

    @abstractmethod
    def is_passed(self) -> bool:
        """Whether all that work has ended.  Does not block."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Block until it has, at most ``timeout_s``; False on expiry."""


class PassedFence(Fence):
    """A fence behind which nothing is running: forward passes on a CPU have ended when they return."""

    def is_passed(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - nothing to wait for
        return True


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One copy, as the chain asks for it.

    Attributes:
        number: For logs; unique in the process.
        spans: Runs of blocks, in the order of the device slots.
        device_slots: ``array('q')`` or 1-D int64 tensor (on the CPU, or on the transfer's own device, where
            the fence orders its making), one per token of all spans.
        after: What must have ended on the device before a byte moves.
        layerwise: Loads: layers are awaited one by one, so the first go first.
    """

    number: int
    spans: Sequence[BlockSpan]
    device_slots: Any
    after: Fence
    layerwise: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the spans move."""
        if isinstance(self.spans, HostSpans):
            return self.spans.total_tokens
        return sum(span.last - span.first for span in self.spans)


class Ticket:
    """One running copy: reaches exactly one terminal state, which can be asked but not changed.

    Attributes:
        seconds: From its beginning to its end, what it had to wait for included.
        pace: Bytes that were moved in seconds in which nothing else held them up; (0, 0.0) where that is not
            known.  Set by the transfer before the end.

    Threads: the transfer's thread finishes it; any thread asks.
    """

    def __init__(self, job: CopyJob, num_bytes: int, num_layers: int) -> None:
        """A ticket for ``job``, which moves ``num_bytes`` in ``num_layers`` layers."""
        self.job = job
        self.num_bytes = num_bytes
        self.num_layers = num_layers
        self.seconds = 0.0
        self.pace: tuple[int, float] = (0, 0.0)
        self.error: TransferError | None = None
        self._layers_done = 0
        self._is_over = False
        self._changed = threading.Condition()
        self._listeners: list[Callable[[int], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the copy reached its end, in success or failure: no byte will move any more."""
        return self._is_over

    @property
    def is_ok(self) -> bool:
        """Whether all bytes lie where they should."""
        return self._is_over and self.error is None

    @property
    def num_layers_ready(self) -> int:
        """How many layers' bytes lie where they should, counted from the first."""
        return 0 if self.error is not None else self._layers_done

    def is_layer_ready(self, layer: int) -> bool:
        """Whether this layer's bytes lie where they should."""
        return self.error is None and self._layers_done > layer

    def wait(self, timeout_s: float) -> bool:
        """Block until the end, at most ``timeout_s`` seconds; False on expiry."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, timeout_s)

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        """Block until ``layer`` (or the end) is reached; True if the layer's bytes may be read."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers_done > layer or self._is_over, timeout_s)
            return self._layers_done > layer and self.error is None

    def order_behind(self, timeout_s: float) -> bool:  # noqa: ARG002 - for subclasses
        """Order the engine's further device work behind this copy without waiting for its bytes.

        True where that was done (a device with streams): the slots may then be used at once.  A copy is
        waited for, ``timeout_s`` at most, until it is submitted.
        """
        return False

    def order_layer(self, layer: int, timeout_s: float) -> bool:  # noqa: ARG002 - for subclasses
        """Order the engine's further device work behind this layer of a load.

        False if that cannot be done: a device without streams, a stream that is being captured, a
        load that failed or whose layer is not submitted within ``timeout_s``; ``wait_layer`` remains.
        """
        return False

    def listen(self, listener: Callable[[int], None]) -> None:
        """Have ``listener`` told how many layers are in place: now, and whenever that changes.

        A copy that failed tells of all layers at its end, so that nobody waits on: look at ``error``.
        Calls come one at a time, from the transfer's threads; they must be quick.  The last one comes before
        ``is_over``: one that sets ``error`` there makes the copy a failed one.
        """
        with self._changed:
            self._listeners.append(listener)
            listener(self.num_layers if self._is_over else self._layers_done)

    def finish_layer(self, layer: int) -> None:
        """For the transfer: layers up to and with ``layer`` are in place."""
        with self._changed:
            self._layers_done = max(self._layers_done, layer + 1)
            self._tell(self._layers_done)

    def _tell(self, num_layers: int) -> None:
        """Wake whoever waits; the condition is held."""
        for listener in self._listeners:
            listener(num_layers)
        self._changed.notify_all()

    def finish(self, seconds: float, error: TransferError | None = None) -> None:
        """For the transfer: the end.  A second call is an error."""
        with self._changed:
            if self._is_over:
                raise AssertionError(f"copy {self.job.number} ended twice")
            self.seconds = seconds
            self.error = error
            if error is None:
                self._layers_done = self.num_layers
            self._tell(self.num_layers)  # a listener may still find fault with the copy
            self._listeners.clear()
            self._is_over = True
            self._changed.notify_all()


class Transfer(ABC):
    """Copies between one device's KV pool and host slots."""

    layout: BlockLayout
    """What the device's pool looks like, block by block."""

    @abstractmethod
    def register(self, region: HostRegion) -> None:
        """Host memory that slots will lie in: pin it, remember it.  Undone when the region closes."""

    @abstractmethod
    def fence(self) -> Fence:
        """A fence behind all device work that the engine has queued so far."""

    @abstractmethod
    def load(self, job: CopyJob) -> Ticket:
        """Host to device.  Raises TransferError if the job cannot be queued; nothing moves then.

        Whatever else it raises means the same, and is logged as a fault of its own.
        """

    @abstractmethod
    def store(self, job: CopyJob) -> Ticket:
        """Device to host.  As ``load``."""

    def is_alive(self) -> bool:
        """Whether copies can still end: False when what makes them has died.  Any thread."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Wait for running copies, which are never aborted; join threads.  May be called twice."""


def begin_copy(start: Callable[[CopyJob], Ticket], job: CopyJob) -> Ticket:
    """Hand ``job`` to a transfer's ``load`` or ``store``.

    Raises:
        TransferError: it was not taken.  A transfer is foreign code: whatever it raises becomes one, and is
            logged here if it is none, so that the job ends and lets go of what it holds.
    """
    try:
        return start(job)
    except TransferError:
        raise
    except Exception as exc:  # foreign code
        logger.exception("[FlexKV] a fault of the transfer: copy %d was not begun", job.number)
        raise TransferError(f"{type(exc).__name__}: {exc}", job=job.number) from exc
