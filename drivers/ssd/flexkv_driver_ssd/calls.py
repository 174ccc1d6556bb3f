"""A gate that counts running calls, so that ``close`` can wait for them.

Threads: any; one condition covers both fields.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flexkv_core import TierClosedError


class CallGate:
    """Open until ``close``; calls that began before it are waited for, later ones refused."""

    def __init__(self, tier: str) -> None:
        """An open gate of the tier of this name."""
        self._tier = tier
        self._changed = threading.Condition()
        self._num_running = 0
        self._is_closed = False

    @contextmanager
    def running(self, operation: str) -> Iterator[None]:
        """Around one call.  Raises TierClosedError after ``close``."""
        with self._changed:
            if self._is_closed:
                raise TierClosedError(f"tier {self._tier} is closed", tier=self._tier, operation=operation)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                if not self._num_running:
                    self._changed.notify_all()

    def after_fork(self) -> None:
        """In a child: closed, whatever another thread of the parent was at."""
        self._changed = threading.Condition()
        self._num_running = 0
        self._is_closed = True

    def close(self) -> bool:
        """Let no call in any more, wait for those that run; tells whether this call was the first."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
            self._changed.wait_for(lambda: not self._num_running)
            return is_first
