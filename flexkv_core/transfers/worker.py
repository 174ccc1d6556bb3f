"""What every transfer shares: a queue of copies and the threads that work it off.

Threads: ``load``, ``store`` and ``close`` may be called from any thread; they check a job, touch
the queue and return.  The worker (``flexkv-copy-<device>``) begins copies and advances
them, piece by piece, a load's before a store's.  A subclass may have a worker for each direction
(``-load``, ``-store``) and may let the calling thread submit the first pieces of a copy that
need wait for nobody: a small copy is then under way before a worker would be awake.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import ExitStack

from ..errors import TransferError
from ..transfer import CopyJob, Ticket, Transfer
from .copy_queue import Copy, CopyQueue
from .planes import DevicePlanes
from .regions import HostRegions

_FENCE_POLL_S = 0.002
"""How long the worker waits for one fence before it looks at the other queue."""


_DIED = "a thread that copies has died"


class QueuedTransfer(Transfer):
    """A transfer whose copies are made by worker threads."""

    def __init__(
        self, planes: DevicePlanes, device_number: int, *, is_split: bool = False, pieces_at_once: int = 0
    ) -> None:
        """Prepare; the subclass calls ``start`` when it is ready.

        Args:
            planes: The pool.
            device_number: For the workers' names.
            is_split: Whether each direction has a worker of its own.
            pieces_at_once: Pieces of a copy that the calling thread may submit (see ``_may_submit``).
        """
        self.layout = planes.layout
        self.planes = planes
        self._regions = HostRegions()
        self._queue = CopyQueue(is_split=is_split)
        self._pieces_at_once = pieces_at_once
        name = f"flexkv-copy-{device_number}"
        ways = {f"{name}-load": (True,), f"{name}-store": (False,)} if is_split else {name: (True, False)}
        self._threads = [
            threading.Thread(target=self._work, args=(served,), name=thread, daemon=True)
            for thread, served in ways.items()
        ]

    def start(self) -> None:
        """Start the workers."""
        for thread in self._threads:
            thread.start()

    def load(self, job: CopyJob) -> Ticket:
        return self._submit(job, is_load=True)

    def store(self, job: CopyJob) -> Ticket:
        return self._submit(job, is_load=False)

    def close(self) -> None:
        with (
            ExitStack() as steps
        ):  # every one is taken, whatever another raises; the last one here is the first
            steps.callback(self._end_rest)
            for thread in self._threads:
                steps.callback(thread.join)
            for copy in self._queue.close():
                number = copy.ticket.job.number
                error = TransferError(f"copy {number}: closed before it began", job=number)
                steps.callback(copy.ticket.finish, 0.0, error)

    def _end_rest(self) -> None:
        """Fail what dead workers have left; a copy inside which one died has ended, and is queued still."""
        with ExitStack() as steps:
            for copy in self._queue.take_rest():
                if not copy.ticket.is_over:
                    steps.callback(self._fail, copy, RuntimeError(_DIED))

    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def _submit(self, job: CopyJob, *, is_load: bool) -> Ticket:
        self._queue.check_open(job)
        if not self.is_alive():
            raise TransferError(f"copy {job.number} refused: {_DIED}", job=job.number)
        copy = self._prepare(job, is_load=is_load)
        if self._pieces_at_once > 0 and self._may_submit(copy) and self._queue.add(copy, take=True):
            self._submit_first(copy)
            return copy.ticket
        if copy.settle is not None:
            copy.settle()
        self._queue.add(copy)
        return copy.ticket

    def _submit_first(self, copy: Copy) -> None:
        """Submit the first pieces of a taken copy, on the calling thread."""
        is_left = False
        try:
            for _ in range(self._pieces_at_once):
                is_left = self._advance(copy)
                if not is_left or not self._may_go(copy):
                    break
        finally:
            if is_left:
                self._queue.give_back(copy)
            else:
                self._queue.remove(copy)

    @abstractmethod
    def _prepare(self, job: CopyJob, *, is_load: bool) -> Copy:
        """Check a job and make its copy.  Raises TransferError; nothing moves then."""

    def _may_go(self, copy: Copy) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the copy's next piece has room now.  Called under the queue's lock."""
        return True

    def _may_begin(self, copy: Copy) -> bool:
        """Whether the copy's fence lets it begin."""
        return copy.ticket.job.after.is_passed()

    def _may_submit(self, copy: Copy) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the calling thread may begin this copy: it has room and need wait for nothing."""
        return False

    def _pause(self, copy: Copy) -> None:
        """Between a copy's pieces, on its worker: a place to let others run."""

    def _settle(self, copy: Copy) -> None:
        """After a failure: return when nothing of this copy moves any more."""

    def _work(self, ways: tuple[bool, ...]) -> None:
        while self._work_once(ways):
            pass

    def _work_once(self, ways: tuple[bool, ...]) -> bool:
        """One piece of one copy; False when closed and done.  Keeps nothing of a copy that ended."""
        heads = self._queue.heads(self._may_go, ways)
        if heads is None:
            return False
        ready = next((copy for copy in heads if copy.has_begun or self._has_come(copy)), None)
        if ready is None:
            self._has_come(heads[0], _FENCE_POLL_S)
        elif self._queue.begin(ready):
            if self._advance(ready):
                self._pause(ready)
            else:
                self._queue.remove(ready)
        return True

    def _has_come(self, copy: Copy, timeout_s: float = 0.0) -> bool:
        """Whether the copy's fence lets it begin, at once or in a while; one whose fence breaks fails."""
        if copy.ticket.is_over:
            return False
        try:
            return copy.ticket.job.after.wait(timeout_s) if timeout_s else self._may_begin(copy)
        except Exception as fault:  # noqa: BLE001 - what a fence asks is the device, and it may have failed
            if self._queue.begin(copy):
                self._fail(copy, fault)
                self._queue.remove(copy)
            return False

    def _advance(self, copy: Copy) -> bool:
        try:
            return copy.step()
        except BaseException as fault:
            # The thread's top: one copy fails, the next goes on.  An interrupt of the engine's
            # thread, which may be submitting, goes on to whom it was meant for.
            self._fail(copy, fault)
            if not isinstance(fault, Exception):
                raise
            return False

    def _fail(self, copy: Copy, fault: BaseException) -> None:
        number = copy.ticket.job.number
        error = TransferError(f"copy {number} failed: {fault!r}", job=number)
        error.__cause__ = fault
        self._settle(copy)
        copy.ticket.finish(0.0, error)
