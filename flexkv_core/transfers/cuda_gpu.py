"""A CUDA device, through torch, triton and the driver's own calls.

Threads: any that is bound; a stream's work is queued by one thread at a time.  Calls that
return at once keep the interpreter's lock: giving it up and waiting for it again, beside a busy
engine, would take longer than the call.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from ..errors import TransferError
from .gpu import Event, Gpu, Memory, Move, PinError, Stream, Table
from .launch import DriverCalls, Launcher
from .regions import Int64

_PORTABLE_AND_MAPPED = 3

_MOST_ITEMS = 2**31 - 1

_FEWEST_IN_BATCH = 3
"""A batch costs the processor what four single copies do, but between single copies the engine
pauses for some microseconds."""

_NOT_SUPPORTED = 801

_IN_STREAM_ORDER = 1
"""Source: cuda.h, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM."""


class CudaTable:
    """Words on the device, and pinned words of the host that the device reads."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        """Allocate, for the current stream."""
        self._pinned = torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        self.host: Int64 = self._pinned.numpy()
        self.on_device = torch.empty(num_words, dtype=torch.int64, device=device)
        self.addresses = (self._pinned.data_ptr(), self.on_device.data_ptr())

    def data_ptr(self) -> int:
        return int(self.addresses[1])


class CudaGpu(Gpu):
    """A CUDA device."""

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
            self._quick = ctypes.PyDLL("libcuda.so.1")
            import triton.language as tl

            from . import kernel
        except (OSError, ImportError) as fault:
            raise TransferError(f"copies on {device} need the CUDA driver and triton: {fault}") from fault
        self._calls = {True: DriverCalls(self._driver), False: DriverCalls(self._quick)}
        self._kernel = kernel
        self._words = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
        self._movers: dict[int, Launcher] = {}
        self._sender: Launcher | None = None
        self._reader: Stream | None = None
        self._attributes = (ctypes.c_int * 6)(_IN_STREAM_ORDER)
        self._first = (ctypes.c_size_t * 1)(0)
        self._has_batches = self._calls[True].batch is not None
        self._context = 0
        self._pin = self._driver.cuMemHostRegister_v2
        self._pin.argtypes = (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint)
        self._unpin = self._driver.cuMemHostUnregister
        self._unpin.argtypes = (ctypes.c_uint64,)
        self._mapped_at = self._driver.cuMemHostGetDevicePointer_v2
        self._mapped_at.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64, ctypes.c_uint)

    def bind(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.current_stream(self.device).query()
        self._context = self._current_context()

    def is_bound(self) -> bool:
        return bool(self._context) and self._current_context() == self._context and not self.is_capturing()

    def _current_context(self) -> int:
        context = ctypes.c_void_p()
        self._quick.cuCtxGetCurrent(ctypes.byref(context))
        return int(context.value or 0)

    def stream(self) -> Stream:
        return torch.cuda.Stream(self.device, priority=self._priority)

    def event(self, *, timed: bool = False) -> Event:
        event: Event = torch.cuda.Event(blocking=True, enable_timing=timed)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def drain(self, stream: Stream) -> None:
        stream.synchronize()

    def allocate(self, num_bytes: int, stream: Stream) -> Memory:
        with torch.cuda.stream(stream):
            memory: Memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            return memory

    def table(self, num_words: int, stream: Stream) -> Table:
        with torch.cuda.stream(stream):
            return CudaTable(num_words, self.device)

    def send(self, stream: Stream, table: Table, num_words: int, *, may_block: bool) -> None:
        assert isinstance(table, CudaTable)
        tile = self._kernel.SEND_TILE
        if self._sender is None:
            self._sender = Launcher(self._kernel.send_words, 3, {"TILE": tile}, self._kernel.SEND_WARPS)
        self._sender(self._calls[may_block], stream, -(-num_words // tile), (*table.addresses, num_words))

    def put(self, stream: Stream, table: Table, at: int, words: torch.Tensor) -> None:
        assert isinstance(table, CudaTable)
        with torch.cuda.stream(stream):
            table.on_device[at : at + len(words)].copy_(words, non_blocking=True)

    def word(self, table: Table, at: int) -> int:
        assert isinstance(table, CudaTable)
        if self._reader is None:  # one of ours: others' work may be queued on a stream of torch's common pool
            self._reader = self.stream()
        with torch.cuda.stream(self._reader):
            return int(table.on_device[at].item())

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.device == self.device)

    def copy_run(self, stream: Stream, target: int, source: int, num_bytes: int, *, may_block: bool) -> None:
        status = self._calls[may_block].copy(target, source, num_bytes, stream.cuda_stream)
        if status:
            raise TransferError(f"cuMemcpyAsync of {num_bytes} B failed with error {status}")

    def copy(self, stream: Stream, runs: Int64, *, is_pinned: bool, may_block: bool) -> None:
        calls, count, handle = self._calls[may_block], runs.shape[1], stream.cuda_stream
        if is_pinned and self._has_batches and count >= _FEWEST_IN_BATCH:
            at, step = runs.ctypes.data, 8 * count
            places = (at, at + step, at + 2 * step, count, self._attributes, self._first, 1)
            status = calls.batch(*places, *calls.before_stream, handle)
            if not status:
                return
            if status != _NOT_SUPPORTED:
                raise TransferError(f"cuMemcpyBatchAsync of {count} copies failed with error {status}")
            self._has_batches = False
        for target, source, num_bytes in runs.T.tolist():
            self.copy_run(stream, target, source, num_bytes, may_block=may_block)

    def move(self, stream: Stream, move: Move, *, may_block: bool) -> None:
        tile = self._kernel.TILE
        chunks = max(1, -(-move.longest_run // tile))
        items = move.num_spans * move.num_planes * chunks
        if not 0 < items <= _MOST_ITEMS or move.longest_run > _MOST_ITEMS - tile:
            raise TransferError(f"a launch of {items} tiles is beyond the kernel's numbers")
        values = (
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
        )
        mover = self._movers.get(move.word_bytes) or self._compile(move.word_bytes, len(values))
        mover(self._calls[may_block], stream, min(move.blocks, items), values)

    def _compile(self, word_bytes: int, num_arguments: int) -> Launcher:
        constants: dict[str, Any] = {"WORD": self._words[word_bytes], "WORD_BYTES": word_bytes}
        constants["TILE"] = self._kernel.TILE
        mover = Launcher(self._kernel.move_rows, num_arguments, constants, self._kernel.NUM_WARPS)
        self._movers[word_bytes] = mover
        return mover

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
