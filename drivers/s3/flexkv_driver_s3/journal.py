"""Small objects that say what was stored or removed lately: one listing tells the news of all writers.

Each call that stores or evicts writes one entry, ``TIME-WRITER-NUMBER``, with its keys and their values'
lengths (``GONE`` for removed ones).
Readers list the entries after the time of their last look less ``OVERLAP_S`` (clocks differ, and an entry
appears a little after its time), and read those that they have not read.  A writer removes its
own entries after ``KEEP_S``; whoever starts removes those that a dead writer left.

Nothing depends on it but freshness: an entry that is missed is made good by the next whole listing.

Threads: ``Journal`` is used under the tier's refresh lock (``read_news``) or is guarded by ``_lock`` (the
writer's side).
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

from flexkv_core import BlockKey

from .errors import is_missing
from .index import KeyIndex
from .names import Names
from .refusals import RefusedError, TooLongError
from .service import Service

OVERLAP_S = 30.0
KEEP_S = 600.0
ABANDONED_S = 6 * 3600.0
_MAGIC = b"FLEXKVJ\x01"
_ROW = struct.Struct("<32sQ")
_ENTRY_BYTES = 64 << 10
GONE = (1 << 64) - 1
"""In place of a length: the value was removed."""


class Journal:
    """This process's entries, and what it has read of others'."""

    def __init__(self, names: Names) -> None:
        """Nothing written or read yet; the news begins now."""
        self._names = names
        self._lock = threading.Lock()
        self._writer = os.urandom(6).hex()
        self._number = 0
        self._mine: deque[tuple[float, str]] = deque()
        self._read: set[str] = set()
        self._since = time.time()

    def write(self, service: Service, rows: Sequence[tuple[BlockKey, int]]) -> None:
        """Tell others of stored or removed values (at most some 1,600), and remove old entries.

        Raises:
            What ``Service.put`` raises; what was stored or removed is so nevertheless.
        """
        now = time.time()
        with self._lock:
            self._number += 1
            name = f"{self._names.journal}{_stamp(now)}-{self._writer}-{self._number:x}"
            self._mine.append((now, name))
            old: list[str] = []
            while self._mine and self._mine[0][0] < now - KEEP_S:
                old.append(self._mine.popleft()[1])
        service.put(name, encode(rows))
        if old:
            service.delete(old)

    def read_news(self, service: Service, index: KeyIndex, deadline: float) -> bool:
        """Add what others stored lately to ``index``; False if ``deadline`` came before the end."""
        began = time.time()
        after = self._names.journal + _stamp(self._since - OVERLAP_S)
        is_more = True
        while is_more:
            page, is_more = service.page(self._names.journal, after)
            for name, _ in page:
                after = name
                if name not in self._read and f"-{self._writer}-" not in name:
                    self._apply(index, name, _read_entry(service, name))
                    self._read.add(name)
                    if time.monotonic() >= deadline:
                        return False
            is_more = is_more and bool(page)
        self._since = began
        # An entry is not listed again once its time is before the overlap.
        floor = self._names.journal + _stamp(began - 2 * OVERLAP_S)
        self._read = {name for name in self._read if name > floor}
        return True

    def _apply(self, index: KeyIndex, name: str, rows: list[tuple[BlockKey, int]]) -> None:
        # A writer's clock may be ahead: nothing that we find out from now on is older than its news.
        when = min(_time_of(name.removeprefix(self._names.journal)), time.time())
        index.add(((key, num_bytes) for key, num_bytes in rows if num_bytes != GONE), when)
        index.discard_older([key for key, num_bytes in rows if num_bytes == GONE], when)

    def sweep(self, service: Service) -> None:
        """Remove entries that dead writers left long ago, at most one page."""
        limit = self._names.journal + _stamp(time.time() - ABANDONED_S)
        page, _ = service.page(self._names.journal)
        old = [name for name, _ in page if name < limit]
        if old:
            service.delete(old)

    def after_fork(self) -> None:
        """In a child: a writer of its own, without the parent's entries."""
        self._lock = threading.Lock()
        self._writer = os.urandom(6).hex()
        self._mine = deque()


def encode(rows: Sequence[tuple[BlockKey, int]]) -> bytes:
    """An entry's bytes."""
    return _MAGIC + b"".join(_ROW.pack(key, num_bytes) for key, num_bytes in rows)


def decode(entry: bytes) -> list[tuple[BlockKey, int]]:
    """The rows of an entry; none if it is foreign or damaged."""
    body = entry[len(_MAGIC) :]
    if not entry.startswith(_MAGIC) or len(body) % _ROW.size:
        return []
    return [(bytes(key), num_bytes) for key, num_bytes in _ROW.iter_unpack(body)]


def _read_entry(service: Service, name: str) -> list[tuple[BlockKey, int]]:
    try:
        return decode(service.get(name, _ENTRY_BYTES))
    except TooLongError:
        return []
    except RefusedError as exc:
        if is_missing(exc):
            return []
        raise


def _time_of(entry: str) -> float:
    stamp = entry.partition("-")[0]
    return int(stamp) / 1000 if stamp.isdigit() else 0.0


def _stamp(when: float) -> str:
    return f"{int(when * 1000):014d}"
