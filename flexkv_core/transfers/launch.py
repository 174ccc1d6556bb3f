"""Launching a compiled triton kernel by the driver's own call.

Triton's launcher looks at every argument again and takes about 50 us; the driver's call takes 7.
The order and the sizes of the arguments are read off the compiled code; a kernel that this module does
not understand (another triton with other hidden arguments) is launched by triton.

Threads: one ``Launcher`` a kernel; a stream's launches come from one thread at a time.
"""

from __future__ import annotations

import ctypes
import logging
import re
import struct
from typing import Any

import torch

from ..errors import TransferError
from .gpu import Stream

_log = logging.getLogger(__name__)

_FORMATS = {"u64": "q", "s64": "q", "b64": "q", "u32": "i", "s32": "i", "b32": "i"}
"""Of a parameter in PTX: how ``struct`` packs it."""

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0
"""Source: cuda.h, CU_LAUNCH_PARAM_*."""

_UNSIGNED = ctypes.c_uint


def parameter_format(ptx: str) -> str | None:
    """How ``struct`` packs a kernel's arguments, natively aligned; None for a type that is not known."""
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        return None
    kinds = re.findall(r"\.param\s+\.(\w+)", entry.group(1))
    formats = [_FORMATS.get(kind) for kind in kinds]
    return None if None in formats else "@" + "".join(code for code in formats if code)


class DriverCalls:
    """``libcuda``'s functions for one use: with the interpreter's lock held, or let go."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare what is used of ``library``; a ``PyDLL`` keeps the lock."""
        self.launch = library.cuLaunchKernel
        self.launch.argtypes = (ctypes.c_void_p, *[_UNSIGNED] * 7, *[ctypes.c_void_p] * 3)
        self.copy = library.cuMemcpyAsync
        self.copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self.batch: Any = None
        self.before_stream: tuple[Any, ...] = ()
        found = getattr(library, "cuMemcpyBatchAsync_v2", None)
        if found is None:
            # CUDA 12.8 and 12.9 have one argument more: where to put the number of a bad copy.
            found = getattr(library, "cuMemcpyBatchAsync", None)
            self.before_stream = ((ctypes.c_size_t * 1)(),)
        if found is not None:
            size, pointer = ctypes.c_size_t, ctypes.c_void_p
            extra = [pointer] * len(self.before_stream)
            found.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, *extra, pointer)
            self.batch = found


class _Arguments:
    """One stream's argument buffer, as the driver wants it."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = ctypes.create_string_buffer(num_bytes)
        self._size = ctypes.c_size_t(num_bytes)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(self.buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END
        )
        self.address = ctypes.addressof(self._extra)


class Launcher:
    """One kernel, compiled for the current device."""

    def __init__(self, kernel: Any, num_arguments: int, constants: dict[str, Any], num_warps: int) -> None:
        """Compile.

        Args:
            kernel: A function under ``triton.jit`` whose arguments have annotations.
            num_arguments: Its arguments that are no constants; they stand first.
            constants: The others.
            num_warps: Warps of a thread block.
        """
        self._kernel, self._constants, self._num_warps = kernel, constants, num_warps
        self._threads = 32 * num_warps
        self._function = 0
        self._packing = struct.Struct("")
        self._hidden: tuple[int, ...] = ()
        self._arguments: dict[int, _Arguments] = {}
        compiled = kernel.warmup(*[1] * num_arguments, **constants, num_warps=num_warps, grid=(1,))
        try:
            self._read(compiled, num_arguments)
        except Exception as fault:  # noqa: BLE001 - another triton: its own launcher remains
            self._function = 0
            _log.info("[FlexKV] copies are launched by triton, which is slower: %r", fault)

    def _read(self, compiled: Any, num_arguments: int) -> None:
        """Find the function and its parameters in what triton compiled."""
        facts = compiled.metadata
        packing = parameter_format(compiled.asm["ptx"])
        if packing is None or facts.num_ctas != 1 or facts.shared:
            raise TransferError(f"parameters {packing}, {facts.num_ctas} CTAs, {facts.shared} B shared")
        if getattr(facts, "global_scratch_size", 0) or getattr(facts, "profile_scratch_size", 0):
            raise TransferError("the kernel wants scratch memory")
        hidden = packing[1 + num_arguments :]
        if len(packing) < 1 + num_arguments or hidden.strip("q"):
            raise TransferError(f"parameters {packing} for {num_arguments} arguments")
        compiled._init_handles()
        self._packing = struct.Struct(packing)
        self._hidden = (0,) * len(hidden)
        self._function = int(compiled.function)

    def __call__(self, calls: DriverCalls, stream: Stream, blocks: int, values: tuple[int, ...]) -> None:
        """Queue a launch of ``blocks`` thread blocks on ``stream``.

        Raises:
            TransferError: the driver refused it.
        """
        if not self._function:
            with torch.cuda.stream(stream):
                self._kernel[(blocks,)](*values, **self._constants, num_warps=self._num_warps)
            return
        handle = stream.cuda_stream
        arguments = self._arguments.get(handle)
        if arguments is None:
            arguments = self._arguments[handle] = _Arguments(self._packing.size)
        self._packing.pack_into(arguments.buffer, 0, *values, *self._hidden)
        status = calls.launch(
            self._function, blocks, 1, 1, self._threads, 1, 1, 0, handle, None, arguments.address
        )
        if status:
            raise TransferError(f"cuLaunchKernel failed with error {status}")
