"""Tasks: the loads, stores and prefetches that an engine has asked for, until it knows how they ended.

A task has one terminal state, which is delivered once; then it is unknown.  One that nobody waits for
is remembered for a while after its end, and a store that was never launched is given up.

Threads: the manager's owner.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..chain.jobs import LoadJob, LoadState, StoreJob, StoreState
from .masks import mask_of

_LEASE_S = 60.0
_ENDED_KEPT = 10_000
NO_TASK = -1


class KVResponseStatus(str, Enum):
    """How a task ended, or that it has not."""

    SUCCESS = "success"
    NOT_FOUND = "not_found"
    UNREADY = "unready"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class KVResponse:
    """A task's end.

    Attributes:
        status: How it ended.
        task_id: Which task.
        return_mask: Bool per token of the sequence: moved or not; a list of masks for a batch.
        cause: Why it did not succeed; empty otherwise.
    """

    status: KVResponseStatus
    task_id: int
    return_mask: Any = None
    cause: str = ""


@dataclass(frozen=True)
class Progress:
    """How far a load or prefetch is.

    Attributes:
        num_tokens: Tokens that it brings.
        num_ready: Of these, tokens that lie in host slots.
        is_over: Whether it has ended.
    """

    num_tokens: int
    num_ready: int
    is_over: bool


@dataclass(eq=False)
class Task:
    """One thing that an engine may wait for.

    Attributes:
        task_id: Its number, from 1.
        num_tokens: Length of the sequence.
        job: What runs; None for a batch, where there was nothing to do, and once only the end is kept.
        ranges: Tokens that it moves.
        children: The tasks of a batch.
        is_launched: Whether the engine has given it device slots.
        end: How and why it ended, once that is all that is kept of it.
    """

    task_id: int
    num_tokens: int = 0
    job: LoadJob | StoreJob | None = None
    ranges: Sequence[tuple[int, int]] = ()
    children: tuple[int, ...] = ()
    is_launched: bool = False
    end: tuple[KVResponseStatus, str] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to do, so that it has ended from the start."""
        return self.job is None and not self.children and self.end is None

    @property
    def cause(self) -> str:
        """Why it did not succeed; empty otherwise."""
        if self.end is not None:
            return self.end[1]
        return self.job.cause if self.job is not None else ""

    def keep_end(self) -> None:
        """Let go of the job if it has ended: its plan and slots are many bytes a token."""
        status = self.status
        if self.job is not None and status is not None:
            self.end, self.job = (status, self.cause), None

    @property
    def status(self) -> KVResponseStatus | None:
        """How it ended; None while it has not, and for a batch."""
        if self.end is not None:
            return self.end[0]
        if self.is_empty:
            return KVResponseStatus.SUCCESS
        job = self.job
        if job is None or not job.is_over:
            return None
        if job.state in (LoadState.DONE, StoreState.DONE):
            return KVResponseStatus.SUCCESS
        if job.state in (LoadState.CANCELLED, StoreState.CANCELLED):
            return KVResponseStatus.CANCELLED
        return KVResponseStatus.TIMEOUT if job.cause == "timeout" else KVResponseStatus.FAILED


class Tasks:
    """All tasks of a manager whose end has not been delivered."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """None yet; ``clock`` gives monotonic seconds."""
        self._clock = clock
        self._tasks: dict[int, Task] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._leases: deque[tuple[float, int]] = deque()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def num_leases(self) -> int:
        """Tasks that are looked at now and then."""
        return len(self._leases)

    @property
    def num_open(self) -> int:
        """Tasks with something to do, or a batch of them."""
        return sum(not task.is_empty and task.end is None for task in self._tasks.values())

    def open_ids(self) -> list[int]:
        """Tasks that are not known to have ended."""
        return [task_id for task_id in self._tasks if task_id not in self._ended]

    def get(self, task_id: int) -> Task | None:
        """The task, unless it is unknown or its end was delivered."""
        return self._tasks.get(task_id)

    def new(self, num_tokens: int, job: LoadJob | StoreJob | None, ranges: Sequence[tuple[int, int]]) -> Task:
        """A task for ``job``; without one it has ended."""
        return self._add(Task(next(self._numbers), num_tokens, job, ranges))

    def new_batch(self, task_ids: Sequence[int]) -> Task:
        """One task that ends when all of ``task_ids`` have ended."""
        return self._add(Task(next(self._numbers), children=tuple(task_ids)))

    def _add(self, task: Task) -> Task:
        self._tasks[task.task_id] = task
        if task.is_empty:
            self._remember_ended(task.task_id)
        else:
            self._leases.append((self._clock() + _LEASE_S, task.task_id))
        return task

    def _remember_ended(self, task_id: int) -> None:
        """Ended tasks that nobody waits for hold nothing but their record; keep so many."""
        self._ended[task_id] = None
        if len(self._ended) > _ENDED_KEPT:
            oldest, _ = self._ended.popitem(last=False)
            self._tasks.pop(oldest, None)

    def launchable(self, task_id: int, slots: Any) -> Task:
        """The task, if it can be launched with ``slots``.

        Raises:
            ValueError: it is unknown, empty or launched already, or moves another number of tokens.
        """
        task = self._tasks.get(task_id)
        if task is None or task.is_empty or task.children or task.is_launched:
            raise ValueError(f"task {task_id} is unknown, empty or launched already")
        wanted = sum(stop - start for start, stop in task.ranges)
        if len(slots) != wanted:
            raise ValueError(f"task {task_id} moves {wanted} tokens, {len(slots)} slots were given")
        return task

    def is_over(self, task_id: int) -> bool:
        """Whether nothing of the task touches any slot; True for unknown tasks."""
        task = self._tasks.get(task_id)
        if task is None:
            return True
        return all(map(self.is_over, task.children)) if task.job is None else task.job.is_over

    def answer(self, task_id: int) -> KVResponse | None:
        """Deliver a task's end, once; None while a launched task has not ended."""
        task = self._tasks.get(task_id)
        if task is None:
            return KVResponse(KVResponseStatus.NOT_FOUND, task_id)
        if task.children:
            return self._batch_answer(task)
        status = task.status
        if status is None:
            return None if task.is_launched else KVResponse(KVResponseStatus.UNREADY, task_id)
        self._delivered(task_id)
        ranges = task.ranges if status is KVResponseStatus.SUCCESS else ()
        return KVResponse(status, task_id, mask_of(task.num_tokens, ranges), task.cause)

    def _batch_answer(self, batch: Task) -> KVResponse | None:
        if not all(self._has_ended(child) for child in batch.children):
            return None
        answers = [self.answer(child) for child in batch.children]
        self._delivered(batch.task_id)
        parts = [answer for answer in answers if answer is not None]
        worst = next((a for a in parts if a.status is not KVResponseStatus.SUCCESS), None)
        return KVResponse(
            worst.status if worst is not None else KVResponseStatus.SUCCESS,
            batch.task_id,
            [answer.return_mask for answer in parts],
            worst.cause if worst is not None else "",
        )

    def _has_ended(self, task_id: int) -> bool:
        task = self._tasks.get(task_id)
        return task is None or task.status is not None

    def _delivered(self, task_id: int) -> None:
        del self._tasks[task_id]
        self._ended.pop(task_id, None)

    def take_abandoned(self) -> list[tuple[int, StoreJob]]:
        """Look at tasks whose lease is over.

        One that has ended and that nobody waited for is only remembered for a while, as empty ones are: how
        it ended, no more.

        Returns:
            Stores that were never launched.  They hold host slots: the caller gives them up.
        """
        now = self._clock()
        abandoned = []
        while self._leases and self._leases[0][0] <= now:
            _, task_id = self._leases.popleft()
            task = self._tasks.get(task_id)
            if task is None:
                continue
            if self.is_over(task_id):
                task.keep_end()
                self._remember_ended(task_id)
                continue
            if isinstance(task.job, StoreJob) and not task.is_launched:
                abandoned.append((task_id, task.job))
            self._leases.append((now + _LEASE_S, task_id))
        return abandoned
