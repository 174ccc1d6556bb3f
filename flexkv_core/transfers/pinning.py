"""Pinning a host region for a device: chunk by chunk, near the device, undone as a whole.

Chunks keep one call short and let the pages be touched by several threads beforehand, which
is what takes the time.  A copy may not span two chunks (see ``pieces.split_at``).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..memory import memlock_limit_bytes
from .gpu import Gpu, PinError
from .regions import Int64

_log = logging.getLogger(__name__)

_TOUCH_THREADS = 8
_TOUCH_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call.  Source: Linux, arch tables of system calls."""


def chunk_starts(address: int, num_bytes: int, chunk_bytes: int) -> Int64:
    """Where the chunks of a region begin."""
    return np.arange(address, address + num_bytes, chunk_bytes, dtype=np.int64)


def pin_region(gpu: Gpu, address: int, num_bytes: int, chunk_bytes: int) -> Int64:
    """Pin a region.

    Returns:
        Where its chunks begin.

    Raises:
        PinError: nothing of the region is pinned then.
    """
    _prefer_node(address, num_bytes, gpu.numa_node)
    _touch(address, num_bytes)
    starts = chunk_starts(address, num_bytes, chunk_bytes)
    done: list[int] = []
    try:
        for start in starts.tolist():
            gpu.pin(start, min(chunk_bytes, address + num_bytes - start))
            done.append(start)
    except PinError as fault:
        unpin_chunks(gpu, done)
        limit = memlock_limit_bytes()
        facts = f"{len(done) * chunk_bytes:,} of {num_bytes:,} B were pinned" + (
            "" if limit is None else f", and this process may lock {limit:,} B"
        )
        raise PinError(fault.status, fault.name, facts) from fault
    return starts


def unpin_chunks(gpu: Gpu, starts: list[int]) -> None:
    """Unpin chunks, all of them, whatever fails."""
    for start in reversed(starts):
        try:
            gpu.unpin(start)
        except Exception:  # noqa: BLE001 - clean-up: the next chunk must be unpinned too
            _log.exception("[FlexKV] could not unpin host memory at %#x", start)


def _prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Ask for pages on the device's memory node; a system that refuses gives what it likes."""
    number = _MBIND.get(platform.machine())
    if node < 0 or number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << (node % 64)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * 64 + 1),
        ctypes.c_uint(0),
    )
    if failed:
        _log.info("[FlexKV] host memory is not bound to node %d: errno %d", node, ctypes.get_errno())


def _touch(address: int, num_bytes: int) -> None:
    """Have all pages mapped, by several threads.  Contents stay; an old kernel does it at pinning."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    end = address + num_bytes
    first = address // mmap.PAGESIZE * mmap.PAGESIZE

    def populate(start: int) -> int:
        return int(libc.madvise(start, min(_TOUCH_BYTES, end - start), _MADV_POPULATE_WRITE))

    with ThreadPoolExecutor(_TOUCH_THREADS, thread_name_prefix="flexkv-pin") as threads:
        list(threads.map(populate, range(first, end, _TOUCH_BYTES)))
