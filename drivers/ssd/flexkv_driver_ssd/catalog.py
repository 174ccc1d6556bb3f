"""Which slot holds which key's value, in memory and in the slabs' indexes, and who reads it.

Threads: any.  ``_lock`` covers ``_entries``, every field of an ``Entry``, and each directory's
``free`` and ``num_used``; it is held for dictionary work and, at most once a minute for each
block, for one 64-byte write, never for a value.  A directory's ``_growing`` is taken before it.
A slot belongs to the entry that was given it until it is free again, which waits for the loads
that read it: no load sees another key's bytes, and no two threads write one record.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from flexkv_core import BlockKey

from .directory import Directory, Place
from .slab import Record

logger = logging.getLogger(__name__)

_TOUCH_S = 60.0
"""The index's times of use lag by no more than this, so a killed process forgets little."""


class Entry:
    """One value: where it lies and who reads it.  A retired entry is no key's value any more."""

    __slots__ = ("is_cleared", "is_retired", "place", "readers", "record", "used_at")

    def __init__(self, place: Place, record: Record) -> None:
        self.place = place
        self.record = record
        self.used_at = min(record.used_at, time.time())  # a clock that was ahead is not believed
        self.readers = 0
        self.is_retired = False
        self.is_cleared = False


class Catalog:
    """Entries by key, and the free slots of all directories."""

    def __init__(self, directories: Sequence[Directory]) -> None:
        """Rebuild keys, free lists and counts from the indexes.  Raises OSError."""
        self._directories = directories
        self._lock = threading.Lock()
        self._entries: dict[BlockKey, Entry] = {}
        self._is_noted = False
        for directory in directories:
            for place, record in directory.records():
                if record is None:
                    directory.free.append(place)
                else:
                    self._adopt(Entry(place, record))
        last = max((one.record.sequence for one in self._entries.values()), default=0)
        self._sequence = itertools.count(last + 1)

    def _adopt(self, entry: Entry) -> None:
        entry.place.directory.num_used += 1
        rival = self._entries.get(entry.record.key)
        if rival is not None and rival.record.sequence > entry.record.sequence:
            entry, rival = rival, entry
        self._entries[entry.record.key] = entry
        if rival is not None:  # killed between entering a new value and freeing the old one
            self.retire(rival)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return sum(one.num_used for one in self._directories)

    def get(self, key: BlockKey) -> Entry | None:
        """The entry of ``key``, for what it says of the value, not for reading it."""
        return self._entries.get(key)

    def oldest_first(self) -> list[Entry]:
        """All entries, the longest unused first."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda one: one.used_at)

    def borrow(self, key: BlockKey) -> Entry | None:
        """The entry of ``key``, whose slot stays as it is until ``give_back``."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.readers += 1
            return entry

    def give_back(self, entry: Entry) -> None:
        """The end of a ``borrow``."""
        with self._lock:
            entry.readers -= 1
            entry.used_at = time.time()
            if abs(entry.used_at - entry.record.used_at) > _TOUCH_S:
                self._write_time(entry)
            self._free_if_unread(entry)

    def take(self, key: BlockKey, num_bytes: int) -> Entry | None:
        """An entry with a free slot for a new value of ``key``, not yet visible; None where there is no room.

        The slot comes from the directory that holds the fewest blocks, among those with room.

        Raises:
            OSError: a directory could not grow, for another reason than room.
        """
        place = self._take_place()
        if place is None:
            return None
        return Entry(place, Record(key, num_bytes, next(self._sequence), time.time()))

    def _take_place(self) -> Place | None:
        full: list[Directory] = []
        while True:
            with self._lock:
                able = [one for one in self._directories if one not in full and (one.free or one.may_grow())]
                if not able:
                    return None
                least = min(able, key=lambda one: one.num_used)
                if least.free:
                    least.num_used += 1
                    return least.free.popleft()
            if not least.grow(self._add_free):
                full.append(least)

    def _add_free(self, places: Iterator[Place]) -> None:
        with self._lock:
            for place in places:
                place.directory.free.append(place)

    def publish(self, entry: Entry) -> None:
        """Make a written entry its key's value, in the index and in memory; the older one is retired.

        Raises:
            OSError: the index cannot be written; the key keeps its older value.
        """
        slab, slot = entry.place.slab, entry.place.slot
        slab.publish(slot, entry.record)
        with self._lock:
            old = self._entries.get(entry.record.key)
            self._entries[entry.record.key] = entry
        if old is not None:
            self.retire(old)

    def remove(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Retire the keys' entries; tells per key whether there was one."""
        with self._lock:
            gone = [self._entries.pop(key, None) for key in keys]
        for entry in gone:
            if entry is not None:
                self.retire(entry)
        return [entry is not None for entry in gone]

    def retire(self, entry: Entry) -> None:
        """Take an entry that is no key's value out of the index, and free its slot once nobody reads it."""
        with self._lock:
            entry.is_retired = True  # from here on nobody else writes the slot's record
        try:
            entry.place.slab.clear(entry.place.slot)
        except OSError as exc:
            # After a restart the value is there again or, its slot used since, found out by the core.
            self._note(exc, entry.place)
        with self._lock:
            entry.is_cleared = True
            self._free_if_unread(entry)

    def _free_if_unread(self, entry: Entry) -> None:
        """Under ``_lock``.  True at most once an entry: it has no readers again after the last one."""
        if entry.is_cleared and not entry.readers:
            entry.place.directory.free.append(entry.place)
            entry.place.directory.num_used -= 1

    def _write_time(self, entry: Entry) -> None:
        """Under ``_lock``."""
        if entry.is_retired:
            return
        old = entry.record
        entry.record = Record(old.key, old.num_bytes, old.sequence, entry.used_at)
        try:
            entry.place.slab.publish(entry.place.slot, entry.record)
        except OSError as exc:
            self._note(exc, entry.place)

    def _note(self, exc: OSError, place: Place) -> None:
        """An index that cannot be written, said once: no call's outcome tells it."""
        if not self._is_noted:
            self._is_noted = True
            logger.warning("[FlexKV] the index of %s cannot be written: %s", place.slab.path, exc)

    def close(self) -> None:
        """Write down the times of use, and forget everything."""
        with self._lock:
            for entry in self._entries.values():
                if entry.used_at != entry.record.used_at:
                    self._write_time(entry)
            self._entries.clear()
