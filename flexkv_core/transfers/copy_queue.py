"""Copies that wait for their worker: loads before stores, in order of arrival.

Threads: the engine's thread adds; one worker takes; others may wake it.  ``CopyQueue`` has one
lock (its condition); nothing else is locked while it is held, and no ticket is finished under it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from ..errors import TransferError
from ..transfer import CopyJob, Ticket


class Copy:
    """One queued or running copy, as the worker sees it.

    A worker calls ``step`` until it returns False; each step is short, so that a load that
    arrives during a long store does not wait for its end.
    """

    def __init__(self, ticket: Ticket, steps: Iterator[None], *, is_load: bool) -> None:
        """A copy whose work is done by advancing ``steps``."""
        self.ticket = ticket
        self.is_load = is_load
        self.has_begun = False
        self._steps = steps

    def step(self) -> bool:
        """Do the next piece; False when there is none left."""
        return next(self._steps, self) is not self


class CopyQueue:
    """Two queues; the first load goes before the first store."""

    def __init__(self) -> None:
        """Empty and open."""
        self._changed = threading.Condition()
        self._loads: deque[Copy] = deque()
        self._stores: deque[Copy] = deque()
        self._is_closed = False

    def check_open(self, job: CopyJob) -> None:
        """Raises TransferError if nothing may be added any more."""
        if self._is_closed:
            raise TransferError("the transfer is closed", job=job.number)

    def add(self, copy: Copy) -> None:
        """Queue a copy.

        Raises:
            TransferError: closed.
        """
        with self._changed:
            self.check_open(copy.ticket.job)
            (self._loads if copy.is_load else self._stores).append(copy)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let ``heads`` look again: what ``may_go`` depends on has changed."""
        with self._changed:
            self._changed.notify_all()

    def heads(self, may_go: Callable[[Copy], bool]) -> list[Copy] | None:
        """The first load and the first store, as far as they may go; waits until one may.

        Args:
            may_go: Whether a copy's next piece has room; quick, locks nothing, called under the lock.

        Returns:
            None when the queue is closed and empty.
        """
        with self._changed:
            while True:
                heads = [queue[0] for queue in (self._loads, self._stores) if queue]
                ready = [copy for copy in heads if may_go(copy)]
                if ready:
                    return ready
                if self._is_closed and not heads:
                    return None
                self._changed.wait()

    def begin(self, copy: Copy) -> bool:
        """Mark a copy as begun: ``close`` lets it run to its end.  False if ``close`` was first."""
        with self._changed:
            copy.has_begun = copy.has_begun or not self._is_closed
            return copy.has_begun

    def remove(self, copy: Copy) -> None:
        """Take a copy out, which must be at the head of its queue."""
        with self._changed:
            queue = self._loads if copy.is_load else self._stores
            if queue.popleft() is not copy:
                raise AssertionError("only the first copy of a queue may be taken out")

    def close(self) -> list[Copy]:
        """Take no more; returns the copies that have not begun, which are out of the queue now."""
        with self._changed:
            self._is_closed = True
            waiting = [copy for queue in (self._loads, self._stores) for copy in queue if not copy.has_begun]
            self._loads = deque(copy for copy in self._loads if copy.has_begun)
            self._stores = deque(copy for copy in self._stores if copy.has_begun)
            self._changed.notify_all()
        return waiting
