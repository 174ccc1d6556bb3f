"""The few things that a device must be able to do.

``CudaTransfer`` is written against ``Gpu``; ``cuda_gpu`` does them with CUDA, and the tests run it
against a simulated device that executes streams in any order that their events allow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import TransferError
from .regions import Int64

Stream = Any
"""A queue of work on the device, executed in order."""


class Event(ABC):
    """A place in a stream.  Interface of ``torch.cuda.Event``; never recorded counts as passed."""

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Put the place behind all that ``stream`` holds now; a later call moves it."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the stream has got there."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until it has, without holding the interpreter's lock."""

    @abstractmethod
    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds on the device from here to ``end_event``.  Both timed, and passed."""


class Move(NamedTuple):
    """One launch of the row kernel.  All addresses are device addresses; sizes in words.

    Attributes: as the arguments of ``kernel.move_rows``, and ``blocks``, the thread blocks.
    """

    planes: int
    job: int
    slots_at: int
    num_slots: int
    fault_at: int
    first_span: int
    first_plane: int
    num_planes: int
    longest_run: int
    num_spans: int
    ring: int
    group_words: int
    offset0: int
    is_staged: bool
    to_device: bool
    word_bytes: int
    blocks: int


class Memory(Protocol):
    """Memory on the device; goes when it is forgotten."""

    def data_ptr(self) -> int:
        """Its address."""


class Table(Memory, Protocol):
    """Words on the device and the host's copy of them, which the device can read.

    Attributes:
        host: int64 ``[words]``, writable; ``Gpu.send`` reads it when its turn comes.
    """

    host: Int64


class Gpu(ABC):
    """One device.  Every method may raise; what was queued before stays queued.

    ``may_block`` says that much is queued already, or host memory is not pinned: a call may then have to wait
    until the device has worked some of it off, and lets other threads of the interpreter run meanwhile.
    """

    @abstractmethod
    def bind(self) -> None:
        """Make this device the calling thread's."""

    @abstractmethod
    def is_bound(self) -> bool:
        """Whether the calling thread can submit here now: bound, and not capturing a graph."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream of our own."""

    @abstractmethod
    def event(self, *, timed: bool = False) -> Event:
        """A new event, not recorded yet; ``timed`` for ``elapsed_time``."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Further work on ``stream`` waits for ``event`` as it is recorded now."""

    @abstractmethod
    def drain(self, stream: Stream) -> None:
        """Block until all that ``stream`` holds has ended."""

    @abstractmethod
    def allocate(self, num_bytes: int, stream: Stream) -> Memory:
        """Device memory for use on ``stream``."""

    @abstractmethod
    def table(self, num_words: int, stream: Stream) -> Table:
        """A table for use on ``stream``, contents undefined."""

    @abstractmethod
    def send(self, stream: Stream, table: Table, num_words: int, *, may_block: bool) -> None:
        """Queue the sending of a table's first words.

        By a kernel, not a copy engine: there it would wait behind the bulk of others' copies.
        """

    @abstractmethod
    def put(self, stream: Stream, table: Table, at: int, words: torch.Tensor) -> None:
        """Queue a copy of words that lie on the device into a table."""

    @abstractmethod
    def word(self, table: Table, at: int) -> int:
        """A word of a table, as it is on the device now.  Any thread; blocks, waits for no other stream."""

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on this device."""

    @abstractmethod
    def copy_run(self, stream: Stream, target: int, source: int, num_bytes: int, *, may_block: bool) -> None:
        """Queue one copy by the copy engine."""

    @abstractmethod
    def copy(self, stream: Stream, runs: Int64, *, is_pinned: bool, may_block: bool) -> None:
        """Queue copies by the copy engine, in no order among themselves.

        Args:
            stream: Where.
            runs: int64 ``[3, count]``, C-contiguous: targets, sources, bytes.
            is_pinned: Whether all host memory among them is pinned.
            may_block: See the class.
        """

    @abstractmethod
    def move(self, stream: Stream, move: Move, *, may_block: bool) -> None:
        """Queue a launch of the row kernel."""

    @abstractmethod
    def pin(self, address: int, num_bytes: int) -> None:
        """Lock host memory and map it for the device at the same address.  Raises PinError."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo ``pin``."""

    @property
    def numa_node(self) -> int:
        """The memory node that the device is nearest to; -1 if unknown."""
        return -1

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""


class PinError(TransferError):
    """Host memory could not be pinned.

    Attributes:
        status: The driver's error number.
        name: And its name.
    """

    def __init__(self, status: int, name: str, facts: str = "") -> None:
        """By the name that users search for, whichever call it was; ``facts`` says how far it came."""
        self.status, self.name = status, name
        parts = [f"cudaHostRegister failed with error code {status} ({name})", facts, _PIN_HINTS.get(status)]
        super().__init__(": ".join(part for part in parts if part))


_PIN_HINTS = {
    2: "the memory cannot be locked: raise the limit (ulimit -l unlimited, docker --ulimit memlock=-1 or "
    "--cap-add IPC_LOCK), or lower the tier's capacity",
    100: "this process sees no CUDA device: look at CUDA_VISIBLE_DEVICES and at the container's GPUs, and "
    "note that a process forked after CUDA was initialised has none",
    712: "somebody has pinned this memory already",
    801: "this system cannot map host memory for the device",
}
"""What to do, by error number.  Source: cuda.h, CUresult."""
