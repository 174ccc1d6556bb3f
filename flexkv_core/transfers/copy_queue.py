"""Copies that wait for their worker: loads before stores, in order of arrival.

Loads that are awaited layer by layer take turns, so that the first layers of all of them come before
the last layer of any.

Threads: the engine's thread adds; one worker, or one for each direction, advances; others may wake
it.  One thread at a time advances copies of a direction: while a copy is *taken* by the thread
that added it, the direction's worker waits.  ``CopyQueue`` has one lock, under a condition for
each worker; nothing else is locked while it is held, and no ticket is finished under it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

from ..errors import TransferError
from ..transfer import CopyJob, Ticket


class Copy:
    """One queued or running copy, as the worker sees it.

    A worker calls ``step`` until it returns False; each step is short, so that a load that
    arrives during a long store does not wait for its end.
    """

    def __init__(
        self,
        ticket: Ticket,
        steps: Iterator[None],
        *,
        is_load: bool,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """A copy whose work is done by advancing ``steps``.

        Args:
            ticket: Its ticket.
            steps: Its work.
            is_load: Its direction.
            settle: What must be done before it may wait: reading what is the caller's, say.
        """
        self.settle = settle
        self.ticket = ticket
        self.is_load = is_load
        self.has_begun = False
        self.is_taken = False
        self.num_steps = 0
        self._steps = steps

    def step(self) -> bool:
        """Do the next piece; False when there is none left."""
        self.num_steps += 1
        return next(self._steps, self) is not self


class CopyQueue:
    """Two queues; loads go before stores."""

    def __init__(self, *, is_split: bool = False) -> None:
        """Empty and open.

        Args:
            is_split: Whether each direction has a worker of its own, which is woken for it alone.
        """
        self._lock = threading.Lock()
        loads = threading.Condition(self._lock)
        self._changed = {True: loads, False: threading.Condition(self._lock) if is_split else loads}
        self._loads: deque[Copy] = deque()
        self._stores: deque[Copy] = deque()
        self._is_closed = False

    def check_open(self, job: CopyJob) -> None:
        """Raises TransferError if nothing may be added any more."""
        if self._is_closed:
            raise TransferError("the transfer is closed", job=job.number)

    def add(self, copy: Copy, *, take: bool = False) -> bool:
        """Queue a copy.

        Args:
            copy: The copy.
            take: Queue it only if no other copy of this direction is queued; the calling thread
                then advances it, and calls ``give_back`` or ``remove``.

        Returns:
            Whether it is queued.

        Raises:
            TransferError: closed.
        """
        with self._lock:
            self.check_open(copy.ticket.job)
            queue = self._queue_of(copy)
            if take and queue:
                return False
            copy.is_taken = copy.has_begun = take
            queue.append(copy)
            if not take:
                self._changed[copy.is_load].notify_all()
            return True

    def give_back(self, copy: Copy) -> None:
        """Leave the rest of a taken copy to the worker."""
        with self._lock:
            copy.is_taken = False
            self._changed[copy.is_load].notify_all()

    def wake(self, *, is_load: bool) -> None:
        """Let ``heads`` look again: what ``may_go`` depends on has changed."""
        with self._lock:
            self._changed[is_load].notify_all()

    def heads(
        self, may_go: Callable[[Copy], bool], ways: Sequence[bool] = (True, False)
    ) -> list[Copy] | None:
        """Loads, the best one first, and the next store, as far as they may go; waits until one may.

        Args:
            may_go: Whether a copy's next piece has room; quick, locks nothing, called under the lock.
            ways: The directions in question: True for loads, False for stores.

        Returns:
            None when the queue is closed and empty.
        """
        with self._lock:
            while True:
                queues = (self._loads if is_load else self._stores for is_load in ways)
                heads = [copy for queue in queues for copy in _candidates(queue)]
                ready = [copy for copy in heads if not copy.is_taken and may_go(copy)]
                if ready:
                    return ready
                if self._is_closed and not heads:
                    return None
                self._changed[ways[0]].wait()

    def begin(self, copy: Copy) -> bool:
        """Mark a copy as begun: ``close`` lets it run to its end.  False if ``close`` was first."""
        with self._lock:
            copy.has_begun = copy.has_begun or not self._is_closed
            return copy.has_begun

    def remove(self, copy: Copy) -> None:
        """Take a copy out that has ended."""
        with self._lock:
            queue = self._queue_of(copy)
            queue.remove(copy)
            if queue or self._is_closed:
                self._changed[copy.is_load].notify_all()

    def _queue_of(self, copy: Copy) -> deque[Copy]:
        return self._loads if copy.is_load else self._stores

    def close(self) -> list[Copy]:
        """Take no more; returns the copies that have not begun, which are out of the queue now."""
        with self._lock:
            self._is_closed = True
            waiting = [copy for queue in (self._loads, self._stores) for copy in queue if not copy.has_begun]
            self._loads = deque(copy for copy in self._loads if copy.has_begun)
            self._stores = deque(copy for copy in self._stores if copy.has_begun)
            for changed in self._changed.values():
                changed.notify_all()
        return waiting

    def take_rest(self) -> list[Copy]:
        """After ``close``, when no worker runs any more: copies that one has left when it died."""
        with self._lock:
            rest = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
        return rest


def _candidates(queue: deque[Copy]) -> list[Copy]:
    """The first copy; if layerwise loads stand first all of them, those with the fewest turns first."""
    if not queue or queue[0].is_taken or not queue[0].ticket.job.layerwise:
        return list(islice(queue, 1))
    return sorted(takewhile(lambda copy: copy.ticket.job.layerwise, queue), key=lambda copy: copy.num_steps)
