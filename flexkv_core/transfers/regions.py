"""Host regions that a transfer may copy from and to, found by address.

Threads: any; one lock, held for a list update.  A region is forgotten when it closes: no array
over its memory is kept here then, so that it can be unmapped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..buffers import HostRegion
from ..errors import TransferError

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class HostMemory:
    """One registered region.

    Attributes:
        address: Where it begins in this process's memory.
        num_bytes: Its length.
        data: Its bytes, uint8, writable.
    """

    address: int
    num_bytes: int
    data: NDArray[np.uint8]

    def rows(self, row_bytes: int) -> NDArray[Any]:
        """Every run of ``row_bytes`` bytes as one item, by the offset at which it begins.

        The items overlap.  Taking or setting several by an index array copies whole rows, at any
        offset, in one call that releases the interpreter's lock.
        """
        rows: NDArray[Any] = np.ndarray(
            shape=(self.num_bytes - row_bytes + 1,), dtype=f"V{row_bytes}", buffer=self.data, strides=(1,)
        )
        return rows


class HostRegions:
    """The registered regions of one transfer."""

    def __init__(self) -> None:
        """None registered."""
        self._lock = threading.Lock()
        self._memories: list[HostMemory] = []

    def add(self, region: HostRegion, undo: Callable[[], None] | None = None) -> None:
        """Remember a region until it closes; ``undo`` runs then, before it is unmapped.

        Raises:
            TransferError: the region is closed, or known already.
        """
        if not region.is_open:
            raise TransferError("a closed host region cannot be registered")
        memory = HostMemory(region.address, region.num_bytes, np.frombuffer(region.view, dtype=np.uint8))
        with self._lock:
            if any(known.address == memory.address for known in self._memories):
                raise TransferError(f"the host region at {memory.address:#x} is registered already")
            self._memories.append(memory)
        address = memory.address

        def forget() -> None:
            self._forget(address)
            if undo is not None:
                undo()

        region.on_close.append(forget)

    def _forget(self, address: int) -> None:
        with self._lock:
            self._memories = [memory for memory in self._memories if memory.address != address]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._memories = []

    def has(self, address: int) -> bool:
        """Whether the region that begins at this address is registered."""
        with self._lock:
            return any(memory.address == address for memory in self._memories)

    def split(self, begin: Int64, end: Int64) -> Iterator[tuple[HostMemory, Int64]]:
        """Which of the runs of host memory lie in which region.

        Args:
            begin: Where each run begins.
            end: Where each run ends.

        Yields:
            A region and the numbers of the runs inside it.

        Raises:
            TransferError: a run lies in no registered region; raised at the end.
        """
        with self._lock:
            memories = list(self._memories)
        left = len(begin)
        for memory in memories:
            inside = np.flatnonzero((begin >= memory.address) & (end <= memory.address + memory.num_bytes))
            left -= len(inside)
            if len(inside):
                yield memory, inside
        if left:
            raise TransferError(f"{left} of {len(begin)} host slots lie in no registered region")
