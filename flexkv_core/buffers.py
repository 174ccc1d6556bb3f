"""Host memory: one region cut into equal slots, handed out as memoryviews.

Threads: a ``SlotPool`` may be used from any thread; its free list is under its own lock, and
nothing else is locked while that lock is held.  A region is written by whoever holds a slot.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .memory import HUGE_PAGE_BYTES, check_host_memory


@dataclass(frozen=True, slots=True)
class Slot:
    """A block-sized place in a host region.

    Attributes:
        index: Number of the slot in its pool.
        view: All bytes of the slot, writable.
        address: Where the slot begins in this process's memory.
    """

    index: int
    view: memoryview
    address: int


class HostRegion:
    """One run of anonymous host memory, page aligned, optionally of huge pages.

    Unpinned; whoever copies to a device registers it (see ``transfer.Transfer.register``).
    """

    def __init__(self, num_bytes: int, *, huge_pages: bool = False) -> None:
        """Map ``num_bytes`` (rounded up to whole pages).

        Raises:
            HostMemoryError: a limit of this machine, container or process forbids it; found out
                before the memory is mapped.
        """
        step = HUGE_PAGE_BYTES if huge_pages else mmap.PAGESIZE
        self.num_bytes = -(-max(num_bytes, 1) // step) * step
        check_host_memory(self.num_bytes, huge_pages=huge_pages)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if huge_pages:
            flags |= 0x40000  # MAP_HUGETLB, which the mmap module does not name
        self._map = mmap.mmap(-1, self.num_bytes, flags=flags)
        if not huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.huge_pages = huge_pages
        self.on_close: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """Whether the memory is still mapped."""
        return not self._map.closed

    def close(self) -> None:
        """Run ``on_close`` (unpinning, for one), then unmap if nobody holds a view any more."""
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            callback()
        if self._map.closed:
            return
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            # Views of slots are still out (a worker that hangs in a driver, a tensor): the
            # memory goes when they do.
            return


class SlotPool:
    """A region cut into equal slots with a free list.

    ``capacity == free + taken`` holds at all times; giving a slot back twice is an error.
    """

    def __init__(self, region: HostRegion, slot_bytes: int, capacity: int | None = None) -> None:
        """Cut ``region`` into slots of ``slot_bytes``; as many as fit, or ``capacity``."""
        fits = region.num_bytes // slot_bytes
        self.region = region
        self.slot_bytes = slot_bytes
        self.capacity = fits if capacity is None else min(capacity, fits)
        self._lock = threading.Lock()
        self._free = list(range(self.capacity - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that ``take`` can still give."""
        return len(self._free)

    def view(self, index: int) -> memoryview:
        """All bytes of a slot, writable, whoever holds it."""
        start = index * self.slot_bytes
        return self.region.view[start : start + self.slot_bytes]

    def views(self, indices: Sequence[int], num_bytes: int) -> list[memoryview]:
        """The first ``num_bytes`` of each slot, writable."""
        region, size = self.region.view, self.slot_bytes
        return [region[index * size : index * size + num_bytes] for index in indices]

    def slot(self, index: int) -> Slot:
        """The slot of this number, whoever holds it."""
        return Slot(index, self.view(index), self.region.address + index * self.slot_bytes)

    def take(self, count: int) -> list[int]:
        """Numbers of up to ``count`` free slots; fewer when there are fewer."""
        with self._lock:
            keep = max(0, len(self._free) - max(0, count))
            picked = self._free[keep:]
            del self._free[keep:]
            picked.reverse()
            self._taken.update(picked)
        return picked

    def give(self, slots: Sequence[int]) -> None:
        """Give taken slots back.

        Raises:
            ValueError: a slot is not taken, or named twice; none was given back.
        """
        with self._lock:
            mine = set(slots)
            if len(mine) < len(slots) or not mine <= self._taken:
                raise ValueError(f"slots given back twice, or no slots: {_wrong(slots, self._taken)}")
            self._taken -= mine
            self._free += slots


def _wrong(slots: Sequence[int], taken: set[int]) -> list[int]:
    """Those that are not taken, or named twice; the first few."""
    return sorted({slot for slot in slots if slot not in taken or slots.count(slot) > 1})[:8]
