"""Where pieces lie in a circular buffer, and what must have ended before a place is used again.

Pure but for the events, which it keeps and does not touch.

Threads: the lane's submitting thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .gpu import Event

_ALIGNMENT = 256

_MOST_PIECES = 64
"""Pieces remembered at once; with more, a producer also waits for ends that it need not wait for."""


class Ring:
    """A circular buffer of ``num_bytes``."""

    def __init__(self, num_bytes: int, new_event: Callable[[], Event]) -> None:
        """An empty ring."""
        self._num_bytes = num_bytes
        self._new_event = new_event
        self._end = 0
        """Bytes placed since the start, with what was left out at the buffer's end."""
        self._live: deque[tuple[int, Event]] = deque()
        self._spare: list[Event] = []

    def place(self, num_bytes: int) -> tuple[int, Event | None]:
        """Room for a piece.

        Args:
            num_bytes: At most the ring's.

        Returns:
            Where it begins, and an event behind all that used this room before, if anything did: the
            producer waits for it before it writes.  The event may be recorded again afterwards.
        """
        begin = self._end
        at = begin % self._num_bytes
        if at + num_bytes > self._num_bytes:
            begin += self._num_bytes - at
        self._begin, self._end = begin, begin + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        behind = None
        while self._live and (
            self._live[0][0] < self._end - self._num_bytes or len(self._live) >= _MOST_PIECES
        ):
            behind = self._live.popleft()[1]
            self._spare.append(behind)
        return begin % self._num_bytes, behind

    def keep(self) -> Event:
        """The event to be recorded behind the consumer of the piece that was placed last."""
        event = self._spare.pop() if self._spare else self._new_event()
        self._live.append((self._begin, event))
        return event
