"""What every transfer shares: a queue of copies and the one thread that works it off.

Threads: ``load``, ``store`` and ``close`` may be called from any thread; they check a job, touch
the queue and return.  The worker (``flexkv-copy-<device>``) alone begins copies and advances
them, piece by piece, a load's before a store's.
"""

from __future__ import annotations

import threading
from abc import abstractmethod

from ..errors import TransferError
from ..transfer import CopyJob, Ticket, Transfer
from .copy_queue import Copy, CopyQueue
from .planes import DevicePlanes
from .regions import HostRegions

_FENCE_POLL_S = 0.002
"""How long the worker waits for one fence before it looks at the other queue."""


class QueuedTransfer(Transfer):
    """A transfer whose copies are made by one worker thread."""

    def __init__(self, planes: DevicePlanes, device_number: int) -> None:
        """Prepare; the subclass calls ``start`` when it is ready."""
        self.layout = planes.layout
        self.planes = planes
        self._regions = HostRegions()
        self._queue = CopyQueue()
        self._thread = threading.Thread(target=self._work, name=f"flexkv-copy-{device_number}", daemon=True)

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def load(self, job: CopyJob) -> Ticket:
        return self._submit(job, is_load=True)

    def store(self, job: CopyJob) -> Ticket:
        return self._submit(job, is_load=False)

    def close(self) -> None:
        for copy in self._queue.close():
            number = copy.ticket.job.number
            copy.ticket.finish(0.0, TransferError(f"copy {number}: closed before it began", job=number))
        self._thread.join()

    def _submit(self, job: CopyJob, *, is_load: bool) -> Ticket:
        self._queue.check_open(job)
        copy = self._prepare(job, is_load=is_load)
        self._queue.add(copy)
        return copy.ticket

    @abstractmethod
    def _prepare(self, job: CopyJob, *, is_load: bool) -> Copy:
        """Check a job and make its copy.  Raises TransferError; nothing moves then."""

    def _may_go(self, copy: Copy) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the copy's next piece has room now.  Called under the queue's lock."""
        return True

    def _may_begin(self, copy: Copy) -> bool:
        """Whether the copy's fence lets it begin."""
        return copy.ticket.job.after.is_passed()

    def _settle(self, copy: Copy) -> None:
        """After a failure: return when nothing of this copy moves any more."""

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """One piece of one copy; False when closed and done.  Keeps nothing of a copy that ended."""
        heads = self._queue.heads(self._may_go)
        if heads is None:
            return False
        ready = next((copy for copy in heads if copy.has_begun or self._may_begin(copy)), None)
        if ready is None:
            heads[0].ticket.job.after.wait(_FENCE_POLL_S)
        elif self._queue.begin(ready) and not self._advance(ready):
            self._queue.remove(ready)
        return True

    def _advance(self, copy: Copy) -> bool:
        try:
            return copy.step()
        except Exception as fault:  # noqa: BLE001 - the thread's top: one copy fails, the next goes on
            number = copy.ticket.job.number
            error = TransferError(f"copy {number} failed: {fault!r}", job=number)
            error.__cause__ = fault
            self._settle(copy)
            copy.ticket.finish(0.0, error)
            return False
