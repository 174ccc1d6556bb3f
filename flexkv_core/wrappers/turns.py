"""Turns at a driver that takes fewer calls at once than the core has threads for it.

Each lane has a thread of its own, or loads would wait behind whole queues of stores.  Where the driver
takes fewer calls than that, they take turns: who reads goes before who writes, but not for ever.

Threads: any; ``_free`` covers the counts, and is not held while a call is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .deadline import countdown, running_call

_LOOK_EVERY_S = 0.05
"""How often who waits looks at its deadline, which is told on the executor's clock."""
_MOST_BEFORE = 4
"""Readers that go before a writer that waits."""


class Turns:
    """At most so many calls at once."""

    def __init__(self, most: int) -> None:
        """``most`` calls, all of them free."""
        self._num_free = most
        self._num_readers = self._num_writers = 0
        self._num_before = 0
        self._inside: list[Callable[[], float]] = []
        self._free = threading.Condition()

    @property
    def is_stuck(self) -> bool:
        """Whether every call that is inside should have come back by its deadline, and has not."""
        with self._free:
            return self._is_stuck()

    @contextmanager
    def turn(self, *, reads: bool) -> Iterator[bool]:
        """Wait for a turn; False if the call's deadline came first."""
        left_s = countdown()
        has_turn = self._take(left_s, reads=reads)
        try:
            yield has_turn
        finally:
            if has_turn:
                self._give(left_s)

    def _take(self, left_s: Callable[[], float], *, reads: bool) -> bool:
        with self._free:
            self._num_readers += reads
            self._num_writers += not reads
            try:
                while True:
                    may_go = self._may_go(reads=reads)
                    # Before the look at the deadline: who is given up as one that waits gets no turn.
                    self._tell(waits=not may_go)
                    if left_s() <= 0:
                        self._tell(waits=True)
                        return False
                    if may_go:
                        break
                    self._free.wait(min(left_s(), _LOOK_EVERY_S))
                self._num_free -= 1
                self._inside.append(left_s)
                self._num_before = self._num_before + 1 if reads and self._num_writers else 0
                return True
            finally:
                self._num_readers -= reads
                self._num_writers -= not reads
                self._free.notify_all()  # one less: perhaps nobody goes before another now

    def _may_go(self, *, reads: bool) -> bool:
        """Called by one that is counted among those that wait."""
        is_writers_turn = self._num_writers > 0 and self._num_before >= _MOST_BEFORE
        goes_first = not is_writers_turn if reads else is_writers_turn or not self._num_readers
        return goes_first and self._num_free > 0

    def _is_stuck(self) -> bool:
        return not self._num_free and all(left_s() <= 0 for left_s in self._inside)

    def _tell(self, *, waits: bool) -> None:
        """For whoever gives the call up from outside: one that waits while others go says nothing of them."""
        call = running_call()
        if call is not None:
            call.waits_for_turn = waits and not self._is_stuck()

    def _give(self, left_s: Callable[[], float]) -> None:
        with self._free:
            self._num_free += 1
            self._inside.remove(left_s)
            self._free.notify_all()
