"""How long tests wait: far longer than anything takes, also where a machine is slow, busy, or stands still.

A test that waits for what must come gives it ``DEADLINE_S``, which an idle machine never uses up.  One that
is about a time-out gives that to the party whose time must end, and to nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 120.0
"""Longest wait for what takes milliseconds on an idle machine."""

CHILD_S = 900.0
"""The same for a process that takes seconds there: most of that is imports."""

_POLL_S = 0.002


def wait_until(
    condition: Callable[[], object], what: str = "the condition holds", deadline_s: float = DEADLINE_S
) -> None:
    """Look until ``condition`` holds; fails at the deadline.  Nothing is polled but the condition."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(_POLL_S)
