"""Blocks in slab files, striped over directories, found again after a restart or a kill.

A value is written to a free slot and then entered into the slab's index (see ``slab``), which
makes it visible at once and for good.  Storing a key again takes a fresh slot, enters it with a
higher sequence number, and frees the old one.  Where a key's slot is stands in memory; no call
but ``load`` and ``store`` touches a slab.

Threads: any.  ``_calls`` counts running calls, for ``close``; everything else that is shared is
the catalog's, and under its lock.  After a fork the tier is the parent's: the child's is closed.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from flexkv_core import (
    DONE,
    MISS,
    BlockKey,
    BufferState,
    Outcome,
    Status,
    StoredBlock,
    Tier,
    TierCapabilities,
    TierContext,
    TierFullError,
    TierUnavailableError,
    TierUsage,
    failed,
    loaded,
)

from .calls import CallGate
from .catalog import Catalog, Entry
from .config import SsdConfig
from .directory import Directory, Place
from .folder import open_error
from .slab import PAGE, Geometry, aligned_buffer

logger = logging.getLogger(__name__)

STATUS_OF = {
    errno.ENOSPC: Status.NO_SPACE,
    errno.EDQUOT: Status.NO_SPACE,
    errno.EFBIG: Status.NO_SPACE,
    errno.EACCES: Status.DENIED,
    errno.EPERM: Status.DENIED,
    errno.EROFS: Status.DENIED,
    # What Linux says of a sector that cannot be read any more, of failed protection information,
    # and of file systems that find their own checksums wrong:
    errno.ENODATA: Status.CORRUPT,
    errno.EILSEQ: Status.CORRUPT,
    errno.EBADMSG: Status.CORRUPT,
    errno.EUCLEAN: Status.CORRUPT,
}
"""Everything else, EIO first, is ``UNAVAILABLE``: another try may succeed."""

_CONCURRENCY = 16
"""The core gives half to loads and half to stores; eight large reads at once fill an NVMe disk."""
_LIST_THREADS = 8
_MAX_LOOKUP = 4096
"""A lookup asks a dictionary."""
_CALL_BYTES = 4 << 20
"""About so much is worth one call: enough to hide its cost, little enough to keep all threads busy."""
_MOST_BLOCKS = 256
"""Keys of one call at most, however short their values are."""
_LIST_CHUNK = 32
"""Heads that one thread reads in a row: fewer, and handing out the work costs more than the reads."""


class SsdTier(Tier):
    """Values in slots of slab files."""

    def __init__(self, config: SsdConfig, context: TierContext) -> None:
        """Claim the directories and find what lies there.

        Raises:
            TierAccessError: a directory cannot be made or written, or another process owns it.
            TierFullError: there is no room for one block.
        """
        slot_bytes = -(-max(context.value_bytes, 1) // PAGE) * PAGE
        num_slots = config.capacity // slot_bytes
        if num_slots < 1:
            raise TierFullError(
                f"capacity {config.capacity:,} B holds no block of {slot_bytes:,} B: raise it",
                tier=context.name,
                operation="open",
            )
        self.capabilities = TierCapabilities(
            persistent=config.persistent,
            can_list=True,
            capacity_bytes=num_slots * slot_bytes,
            max_value_bytes=slot_bytes,
            max_batch=min(_MOST_BLOCKS, max(4, _CALL_BYTES // slot_bytes)),
            max_lookup=_MAX_LOOKUP,
            max_concurrency=_CONCURRENCY,
            alignment_bytes=PAGE,
        )
        self._name = context.name
        self._slot_bytes = slot_bytes
        self._head_bytes = context.head_bytes
        self._calls = CallGate(context.name)
        geometry = Geometry(slot_bytes, context.fingerprint, context.identity)
        self._directories, self._catalog = _open(config, num_slots, geometry, context.name)
        _open_tiers.add(self)
        self._report(config)

    def _report(self, config: SsdConfig) -> None:
        buffered = [str(one.path) for one in self._directories if not one.is_direct]
        if buffered and config.direct_io == "auto":
            logger.warning(
                "[FlexKV] tier %s: no direct I/O in %s: blocks go through the page cache",
                self._name,
                ", ".join(buffered),
            )
        logger.info(
            "[FlexKV] tier %s: %d of %d blocks of %.2f MiB are there, %d damaged left out, in %s",
            self._name,
            len(self._catalog),
            self.capabilities.capacity_bytes // self._slot_bytes,
            self._slot_bytes / (1 << 20),
            sum(one.num_skipped for one in self._directories),
            "; ".join(str(one.path) for one in self._directories),
        )

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._calls.running("lookup"):
            found = [self._catalog.get(key) for key in keys]
            return [MISS if one is None else Outcome(Status.OK, one.record.num_bytes) for one in found]

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        with self._calls.running("load"):
            return [self._load_one(key, view) for key, view in zip(keys, into, strict=True)]

    def _load_one(self, key: BlockKey, view: memoryview) -> Outcome:
        entry = self._catalog.borrow(key)
        if entry is None:
            return MISS
        try:
            return _read(entry, view)
        finally:
            self._catalog.give_back(entry)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        with self._calls.running("store"):
            return [self._store_one(key, value) for key, value in zip(keys, values, strict=True)]

    def _store_one(self, key: BlockKey, value: memoryview) -> Outcome:
        if len(value) > self._slot_bytes:
            return failed(Status.INVALID, f"value of {len(value)} B, slot of {self._slot_bytes} B")
        try:
            entry = self._catalog.take(key, len(value))
        except OSError as exc:
            status = STATUS_OF.get(exc.errno or 0, Status.UNAVAILABLE)
            return failed(status, f"another slab cannot be made: {exc}")
        if entry is None:
            line = "no free slot, and no directory may grow: capacity, min_free or the disk allows no more"
            return failed(Status.NO_SPACE, line)
        with ExitStack() as undo:
            undo.callback(self._catalog.retire, entry)
            try:
                entry.place.slab.write(entry.place.slot, value)
                self._catalog.publish(entry)
            except OSError as exc:
                return _failed(exc, "write", entry.place, BufferState.UNTOUCHED)
            undo.pop_all()
        return Outcome(Status.OK, len(value))

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._calls.running("evict"):
            return [DONE if was_there else MISS for was_there in self._catalog.remove(keys)]

    def list_blocks(self) -> Iterator[list[StoredBlock]]:
        with self._calls.running("list"):
            entries = self._catalog.oldest_first()
        step = _LIST_THREADS * _LIST_CHUNK
        with ThreadPoolExecutor(_LIST_THREADS, f"flexkv-{self._name}-list") as pool:
            for start in range(0, len(entries), step):
                stop = min(start + step, len(entries))
                chunks = [entries[at : min(at + _LIST_CHUNK, stop)] for at in range(start, stop, _LIST_CHUNK)]
                with self._calls.running("list"):
                    found = list(pool.map(self._describe, chunks))
                yield [block for blocks in found for block in blocks]

    def _describe(self, entries: Sequence[Entry]) -> list[StoredBlock]:
        buffer = aligned_buffer(self._head_bytes)
        blocks = []
        for entry in entries:
            record = entry.record
            head = buffer[: min(self._head_bytes, record.num_bytes)]
            try:
                got = entry.place.slab.read(entry.place.slot, head)
            except OSError as exc:
                logger.warning("[FlexKV] tier %s: %s is left out: %s", self._name, entry.place.slab.path, exc)
                continue
            blocks.append(StoredBlock(record.key, record.num_bytes, bytes(head[:got]), entry.used_at))
        return blocks

    def usage(self) -> TierUsage:
        used = self._catalog.num_used * self._slot_bytes
        return TierUsage(len(self._catalog), used, self.capabilities.capacity_bytes)

    def check_health(self) -> None:
        with self._calls.running("lookup"):
            for directory in self._directories:
                try:
                    directory.check()
                except OSError as exc:
                    raise TierUnavailableError(
                        f"{directory.path}: {exc}", tier=self._name, operation="lookup"
                    ) from exc

    def close(self) -> None:
        if not self._calls.close():
            return
        self._catalog.close()
        for directory in self._directories:
            directory.close()

    def after_fork(self) -> None:
        """In a child: closed.  Slots have one owner, and a child that lives on must not keep the folder."""
        self._calls.after_fork()
        for directory in self._directories:
            directory.let_go()


_open_tiers: weakref.WeakSet[SsdTier] = weakref.WeakSet()


def _after_fork() -> None:
    for tier in list(_open_tiers):
        tier.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _open(
    config: SsdConfig, num_slots: int, geometry: Geometry, tier: str
) -> tuple[list[Directory], Catalog]:
    directories: list[Directory] = []
    with ExitStack() as undo:
        for number, path in enumerate(config.path):
            share = num_slots // len(config.path) + (number < num_slots % len(config.path))
            directories.append(Directory(path, share, geometry, config, tier))
            undo.callback(directories[-1].close)
        try:
            catalog = Catalog(directories)
        except OSError as exc:
            raise open_error(config.path[0], exc, tier) from exc
        undo.pop_all()
    return directories, catalog


def _read(entry: Entry, view: memoryview) -> Outcome:
    num_bytes = entry.record.num_bytes
    if num_bytes > len(view):
        return failed(Status.CORRUPT, f"value of {num_bytes} B, buffer of {len(view)} B")
    try:
        got = entry.place.slab.read(entry.place.slot, view[:num_bytes])
    except OSError as exc:
        return _failed(exc, "read", entry.place, BufferState.UNCERTAIN)
    if got < num_bytes:
        reason = f"short read: {got} of {num_bytes} B in {entry.place.slab.path}"
        return failed(Status.CORRUPT, reason, BufferState.UNCERTAIN)
    return loaded(num_bytes)


def _failed(exc: OSError, operation: str, place: Place, buffer: BufferState) -> Outcome:
    status = STATUS_OF.get(exc.errno or 0, Status.UNAVAILABLE)
    where = f"{operation} of slot {place.slot} in {place.slab.path}"
    return failed(status, f"{where}: {exc.strerror or exc}", buffer)


def open_tier(config: SsdConfig, context: TierContext) -> SsdTier:
    """Open the directories that ``config`` names."""
    return SsdTier(config, context)
