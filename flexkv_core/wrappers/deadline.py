"""How long the running call still has: told by the executor, asked by wrappers that wait.

Threads: the deadline belongs to the worker's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_call = threading.local()


@contextmanager
def within(deadline: float, clock: Callable[[], float]) -> Iterator[None]:
    """While inside, ``remaining_s`` of this thread counts down to ``deadline``."""
    _call.deadline, _call.clock = deadline, clock
    try:
        yield
    finally:
        del _call.deadline, _call.clock


def remaining_s() -> float:
    """Seconds until this thread's call is given up; infinity outside of a call."""
    deadline: float | None = getattr(_call, "deadline", None)
    if deadline is None:
        return float("inf")
    return deadline - float(_call.clock())
