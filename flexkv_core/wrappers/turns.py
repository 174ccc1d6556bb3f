"""Turns at a driver that takes fewer calls at once than the core has threads for it.

Each lane has a thread of its own, or loads would wait behind whole queues of stores.  Where the driver
takes fewer calls than that, they take turns: who reads goes before who writes.

Threads: any; ``_free`` covers the counts, and is not held while a call is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .deadline import remaining_s

_LOOK_EVERY_S = 0.05
"""How often who waits looks at its deadline, which is told on the executor's clock."""


class Turns:
    """At most so many calls at once."""

    def __init__(self, most: int) -> None:
        """``most`` calls, all of them free."""
        self._num_free = most
        self._num_readers = 0
        self._free = threading.Condition()

    @contextmanager
    def turn(self, *, reads: bool) -> Iterator[bool]:
        """Wait for a turn; False if the call's deadline came first."""
        has_turn = self._take(reads=reads)
        try:
            yield has_turn
        finally:
            if has_turn:
                self._give()

    def _take(self, *, reads: bool) -> bool:
        with self._free:
            self._num_readers += reads
            try:
                while not self._num_free or (self._num_readers and not reads):
                    left_s = remaining_s()
                    if left_s <= 0:
                        return False
                    self._free.wait(min(left_s, _LOOK_EVERY_S))
                self._num_free -= 1
                return True
            finally:
                self._num_readers -= reads
                self._free.notify_all()  # one reader less: perhaps nobody goes before a writer now

    def _give(self) -> None:
        with self._free:
            self._num_free += 1
            self._free.notify_all()
