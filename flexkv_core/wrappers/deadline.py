"""How long the running call still has, and which call it is: told by the executor, asked by wrappers.

Threads: what is told belongs to the worker's thread; a ``countdown`` may be asked by any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_thread = threading.local()


class RunningCall(Protocol):
    """What wrappers know of the call that runs on their thread.

    Attributes:
        whole: What it is a piece of, by which whoever gives it up names it.
        waits_for_turn: It has not reached the tier: it waits while others go first.
    """

    @property
    def whole(self) -> object: ...

    waits_for_turn: bool


@contextmanager
def within(deadline: float, clock: Callable[[], float], call: RunningCall | None = None) -> Iterator[None]:
    """While inside, ``remaining_s`` of this thread counts down to ``deadline``, and ``call`` is what runs."""
    _thread.deadline, _thread.clock, _thread.call = deadline, clock, call
    try:
        yield
    finally:
        del _thread.deadline, _thread.clock, _thread.call


def countdown() -> Callable[[], float]:
    """What tells the seconds until this thread's call is given up; infinity outside of a call."""
    deadline: float | None = getattr(_thread, "deadline", None)
    if deadline is None:
        return lambda: float("inf")
    until, clock = deadline, _thread.clock
    return lambda: until - float(clock())


def remaining_s() -> float:
    """Seconds until this thread's call is given up; infinity outside of a call."""
    return countdown()()


def running_call() -> RunningCall | None:
    """The call that runs on this thread; None outside of one, or if it was not told."""
    call: RunningCall | None = getattr(_thread, "call", None)
    return call
