"""What the bucket holds, as far as this process knows: keys with their values' lengths.

Threads: any; ``_lock`` covers all fields and is held for dictionary operations only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from flexkv_core import BlockKey


class KeyIndex:
    """Keys with their values' lengths."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._lock = threading.Lock()
        self._entries: dict[BlockKey, tuple[int, int, float]] = {}  # length, listing, when met
        self._pass = 0
        self._used_bytes = 0

    def lengths(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """Per key its value's length, or None."""
        with self._lock:
            found = [self._entries.get(key) for key in keys]
        return [None if entry is None else entry[0] for entry in found]

    def add(self, rows: Iterable[tuple[BlockKey, int]], when: float) -> None:
        """Values that were there at ``when`` (seconds since the epoch), with their lengths."""
        with self._lock:
            for key, num_bytes in rows:
                old = self._entries.get(key)
                self._used_bytes += num_bytes - (old[0] if old is not None else 0)
                latest = max(when, old[2]) if old is not None else when
                self._entries[key] = (num_bytes, self._pass, latest)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Values that are not there."""
        with self._lock:
            self._remove(keys)

    def discard_older(self, keys: Iterable[BlockKey], when: float) -> None:
        """Values that were removed at ``when`` (seconds since the epoch), unless added later.

        What was added in the future was not: the clock was set back since.
        """
        now = time.time()
        with self._lock:
            entries = self._entries
            self._remove([key for key in keys if key in entries and not when < entries[key][2] <= now])

    def _remove(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._used_bytes -= entry[0]

    def begin_pass(self) -> None:
        """A listing begins: what is not added from now on is gone when it ends."""
        with self._lock:
            self._pass += 1

    def end_pass(self) -> None:
        """A listing has met everything."""
        with self._lock:
            gone = [key for key, entry in self._entries.items() if entry[1] < self._pass]
            self._remove(gone)

    def totals(self) -> tuple[int, int]:
        """Number of values and their bytes."""
        with self._lock:
            return len(self._entries), self._used_bytes

    def after_fork(self) -> None:
        """In a child: no other thread is left that could hold the lock."""
        self._lock = threading.Lock()
