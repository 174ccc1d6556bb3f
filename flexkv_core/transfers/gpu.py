"""The few things that a device must be able to do, and how CUDA does them.

``CudaTransfer`` is written against ``Gpu``; the tests run it against a simulated device that
executes streams in any order that their events allow.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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


@dataclass(frozen=True, slots=True)
class Move:
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


class Gpu(ABC):
    """One device.  Every method may raise; what was queued before stays queued."""

    @abstractmethod
    def bind(self) -> None:
        """Make this device the calling thread's."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream of our own."""

    @abstractmethod
    def event(self) -> Event:
        """A new event, not recorded yet."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Further work on ``stream`` waits for ``event`` as it is recorded now."""

    @abstractmethod
    def drain(self, stream: Stream) -> None:
        """Block until all that ``stream`` holds has ended."""

    @abstractmethod
    def allocate(self, num_bytes: int, stream: Stream) -> Any:
        """Device memory for use on ``stream``, with ``data_ptr()``; goes when it is forgotten."""

    @abstractmethod
    def upload(self, table: Int64, stream: Stream) -> Any:
        """A copy of ``table`` on the device, usable by later work on ``stream``, with ``data_ptr()``."""

    @abstractmethod
    def upload_job(self, table: Int64, slots: Any, stream: Stream) -> Any:
        """As ``upload``, of ``table``, then ``slots`` (an array, or a tensor on the device), then a 0."""

    @abstractmethod
    def last_word(self, uploaded: Any) -> int:
        """The last word of an uploaded table.  Any thread; blocks, and waits for no other stream."""

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on this device."""

    @abstractmethod
    def copy(self, stream: Stream, target: int, source: int, num_bytes: int) -> None:
        """Queue a copy of bytes between any two addresses."""

    @abstractmethod
    def move(self, stream: Stream, move: Move) -> None:
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
    """

    def __init__(self, status: int, name: str) -> None:
        self.status = status
        hint = _PIN_HINTS.get(status, "")
        super().__init__(f"cuMemHostRegister failed with error {status} ({name}){': ' if hint else ''}{hint}")


_PIN_HINTS = {
    2: "the memory cannot be locked: raise the limit (ulimit -l unlimited, docker --ulimit memlock=-1 or "
    "--cap-add IPC_LOCK), or lower the tier's capacity",
    100: "this process sees no CUDA device: look at CUDA_VISIBLE_DEVICES and at the container's GPUs, and "
    "note that a process forked after CUDA was initialised has none",
    712: "somebody has pinned this memory already",
    801: "this system cannot map host memory for the device",
}
"""What to do, by error number.  Source: cuda.h, CUresult."""

_PORTABLE_AND_MAPPED = 3

_MOST_ITEMS = 2**31 - 1


class CudaGpu(Gpu):
    """A CUDA device, through torch, triton and the driver's own copy call."""

    def __init__(self, device: torch.device, *, stream_priority: int = -1) -> None:
        """Load what is needed.

        Args:
            device: A CUDA device.
            stream_priority: Our kernels are few and short; at high priority they start between
                the thread blocks of a large product instead of behind it.

        Raises:
            TransferError: there is no triton or no CUDA driver.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._priority = stream_priority
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            import triton.language as tl

            from . import kernel
        except (OSError, ImportError) as fault:
            raise TransferError(f"copies on {device} need the CUDA driver and triton: {fault}") from fault
        self._kernel = kernel
        self._words = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
        self._pin = self._driver.cuMemHostRegister_v2
        self._pin.argtypes = (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint)
        self._unpin = self._driver.cuMemHostUnregister
        self._unpin.argtypes = (ctypes.c_uint64,)
        self._mapped_at = self._driver.cuMemHostGetDevicePointer_v2
        self._mapped_at.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64, ctypes.c_uint)
        self._copy = self._driver.cuMemcpyAsync
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._copy.restype = ctypes.c_int

    def bind(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.current_stream(self.device).query()

    def stream(self) -> Stream:
        return torch.cuda.Stream(self.device, priority=self._priority)

    def event(self) -> Event:
        event: Event = torch.cuda.Event(blocking=True)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def drain(self, stream: Stream) -> None:
        stream.synchronize()

    def allocate(self, num_bytes: int, stream: Stream) -> Any:
        with torch.cuda.stream(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, table: Int64, stream: Stream) -> Any:
        pinned = torch.empty(table.size, dtype=torch.int64, pin_memory=True)
        np.copyto(pinned.numpy(), table.reshape(-1))
        with torch.cuda.stream(stream):
            # torch keeps pinned memory that it handed out until the copy from it has ended.
            return pinned.to(self.device, non_blocking=True)

    def upload_job(self, table: Int64, slots: Any, stream: Stream) -> Any:
        if not isinstance(slots, torch.Tensor):
            return self.upload(np.concatenate([table.reshape(-1), slots, [0]]), stream)
        head = self.upload(np.append(table.reshape(-1), 0), stream)
        with torch.cuda.stream(stream):
            return torch.cat([head[:-1], slots, head[-1:]])

    def last_word(self, uploaded: Any) -> int:
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            return int(uploaded[-1].item())

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.device == self.device)

    def copy(self, stream: Stream, target: int, source: int, num_bytes: int) -> None:
        status = self._copy(target, source, num_bytes, stream.cuda_stream)
        if status:
            raise TransferError(f"cuMemcpyAsync of {num_bytes} B failed with error {status}")

    def move(self, stream: Stream, move: Move) -> None:
        tile = self._kernel.TILE
        chunks = max(1, -(-move.longest_run // tile))
        items = move.num_spans * move.num_planes * chunks
        if not 0 < items <= _MOST_ITEMS or move.longest_run > _MOST_ITEMS - tile:
            raise TransferError(f"a launch of {items} tiles is beyond the kernel's numbers")
        with torch.cuda.stream(stream):
            self._kernel.move_rows[(min(move.blocks, items),)](
                move.planes,
                move.job,
                move.slots_at,
                move.num_slots,
                move.fault_at,
                move.first_span,
                move.first_plane,
                move.num_planes,
                chunks,
                items,
                move.ring,
                move.group_words,
                move.offset0,
                int(move.is_staged),
                int(move.to_device),
                WORD=self._words[move.word_bytes],
                WORD_BYTES=move.word_bytes,
                TILE=tile,
                num_warps=self._kernel.NUM_WARPS,
            )

    def pin(self, address: int, num_bytes: int) -> None:
        # The driver's call, not the runtime's: a failure leaves no "last error" behind that the
        # next kernel launch of somebody else would report as its own.
        status = self._pin(address, num_bytes, _PORTABLE_AND_MAPPED)
        if status:
            raise PinError(status, self._error_name(status))
        mapped = ctypes.c_uint64()
        if self._mapped_at(ctypes.byref(mapped), address, 0) or mapped.value != address:
            self.unpin(address)
            raise PinError(801, "mapped at another address")

    def unpin(self, address: int) -> None:
        status = self._unpin(address)
        if status:
            raise TransferError(
                f"cuMemHostUnregister failed with error {status} ({self._error_name(status)})"
            )

    @property
    def numa_node(self) -> int:
        facts = torch.cuda.get_device_properties(self.device)
        try:
            place = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
            return int(Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text())
        except (AttributeError, OSError, ValueError):
            return -1

    def _error_name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(status, ctypes.byref(name))
        return (name.value or b"unknown").decode()

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())
