"""Time and threads that move when a test says so."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class FakeClock:
    """A clock in place of ``time.monotonic`` and ``time.sleep``.

    Threads: any; a sleeper wakes when another thread advances the clock.
    """

    def __init__(self, now: float = 1000.0) -> None:
        """A clock that shows ``now`` until it is advanced."""
        self._now = now
        self._changed = threading.Condition()
        self._sleepers = 0

    def __call__(self) -> float:
        """What the clock shows, in seconds."""
        return self._now

    @property
    def num_sleepers(self) -> int:
        """Threads inside ``sleep``."""
        return self._sleepers

    def advance(self, seconds: float) -> None:
        """Move on, waking sleepers whose time has come."""
        with self._changed:
            self._now += seconds
            self._changed.notify_all()

    def sleep(self, seconds: float, *, guard_s: float = 60.0) -> None:
        """Block until the clock was advanced by ``seconds``; fails after ``guard_s`` real seconds."""
        with self._changed:
            until = self._now + seconds
            self._sleepers += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._now >= until, guard_s):
                    raise AssertionError("nobody advanced the clock")
            finally:
                self._sleepers -= 1

    def wait_for_sleepers(self, count: int, timeout_s: float = 60.0) -> None:
        """Block until ``count`` threads sleep.  Raises AssertionError on expiry."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._sleepers >= count, timeout_s):
                raise AssertionError(f"{self._sleepers} threads sleep, {count} expected")


class ManualExecutor:
    """An executor whose work runs when it is stepped, in the stepping thread.

    ``submit``, ``shutdown`` and futures are those of ``concurrent.futures``.
    """

    def __init__(self) -> None:
        """No work yet."""
        self._work: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self.is_shut_down = False

    def submit(self, function: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        """Queue a call.  Raises RuntimeError after ``shutdown``."""
        if self.is_shut_down:
            raise RuntimeError("cannot schedule new work after shutdown")
        future: Future[T] = Future()
        self._work.append((future, lambda: function(*args, **kwargs)))  # type: ignore[arg-type]  # Future is invariant
        return future

    @property
    def num_queued(self) -> int:
        """Calls that have not run."""
        return len(self._work)

    def step(self, at: int = 0) -> bool:
        """Run the queued call number ``at`` (0: the oldest); False if there is none."""
        if at >= len(self._work):
            return False
        future, call = self._work[at]
        del self._work[at]
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as exc:  # noqa: BLE001 - as executors do: the future carries it
                future.set_exception(exc)
        return True

    def run_all(self) -> int:
        """Run everything queued, also what that queues; returns how many calls ran."""
        count = 0
        while self.step():
            count += 1
        return count

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; run what is queued (``wait``) or cancel it."""
        self.is_shut_down = True
        if cancel_futures:
            for future, _ in self._work:
                future.cancel()
            self._work.clear()
        if wait:
            self.run_all()
