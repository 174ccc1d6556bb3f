"""One slab: a file of equal slots, and beside it the index that says what lies in them.

``NNNNN.slab`` is one header page and then the slots; it is allocated in full before it is used,
never sparse, and read and written with direct I/O where the file system takes it.
``NNNNN.index`` begins with the same page and then holds one record of 64 bytes a slot: checksum,
key, length, sequence number, time of last use.  All zero means free.

A value is visible exactly while its record is in the index.  The record is written after the
value, by one small write, and zeroed before the slot is used again, so a writer killed at any
point leaves the old value or none.  The index is a file of its own, written through the page
cache, because such writes cost about a microsecond and outlive the process; in the slab they
would wait for every direct write under way.  Nothing is flushed: after a power failure index and
slab may disagree, which the checksum in the core's header finds out.

Threads: any.  A slab has no state but two descriptors; who may touch a slot is the tier's to know.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
SCHEMA = 1
_MAGIC = b"FLEXKVS\x01"
_HEADER = struct.Struct("<8sIIQ16s16s")
_NUM_SLOTS = struct.Struct("<I")
_NUM_SLOTS_AT = struct.calcsize("<8sI")
_IDENTITY_AT = 256
_RECORD = struct.Struct("<II32sQQd")
RECORD_BYTES = _RECORD.size
_FREE = bytes(RECORD_BYTES)
_LIVE = 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all slabs of one folder have in common.

    Attributes:
        slot_bytes: Size of a slot, a multiple of ``PAGE``.
        fingerprint: The layout's 16 bytes.
        identity: JSON for people.
    """

    slot_bytes: int
    fingerprint: bytes
    identity: str


@dataclass(frozen=True, slots=True)
class Record:
    """One slot's line in the index.

    Attributes:
        key: The value's key.
        num_bytes: The value's length.
        sequence: Raised with each store; of two records of one key the higher one counts.
        used_at: Seconds since the epoch.
    """

    key: bytes
    num_bytes: int
    sequence: int
    used_at: float


class BadSlabError(Exception):
    """These files are no slab of this folder; the text says why in a few words."""


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed memory whose address and length suit direct I/O."""
    return memoryview(mmap.mmap(-1, -(-max(num_bytes, 1) // PAGE) * PAGE))


def read_fully(fd: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from ``offset``; returns the bytes read, fewer only where the file ends."""
    return _repeat(os.preadv, fd, view, offset)


def write_fully(fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``.  Raises OSError if the file system takes less."""
    if _repeat(os.pwritev, fd, view, offset) < len(view):
        raise OSError(errno.EIO, "short write")


def _repeat(call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview, offset: int) -> int:
    done = 0
    while True:
        start = done
        done += call(fd, [view[start:]], offset + start)
        if done >= len(view):
            return done
        # Direct I/O goes on from a page's beginning only; the rest of that page is done again.
        done -= done % PAGE
        if done == start:
            return done


class Slab:
    """An open slab of ``num_slots`` slots."""

    def __init__(self, path: Path, geometry: Geometry, *, is_direct: bool) -> None:
        """Open and check the slab at ``path`` (its ``.slab`` file).

        Raises:
            BadSlabError: one of its files is missing, cut before the first slot, foreign or another's.
            OSError: they cannot be read.
        """
        self.path = path
        self._slot_bytes = geometry.slot_bytes
        self._is_direct = is_direct
        flags = os.O_RDWR | os.O_NOFOLLOW
        self._fd = self._index_fd = -1
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                self._fd = os.open(path, flags | (os.O_DIRECT if is_direct else 0))
                self._index_fd = os.open(index_path(path), flags)
            except FileNotFoundError as exc:
                raise BadSlabError("a file of the pair is missing") from exc
            named = self._check_headers(geometry)
            fits = (os.fstat(self._fd).st_size - PAGE) // geometry.slot_bytes
            self.num_slots = min(named, fits)
            self.num_cut = named - self.num_slots
            undo.pop_all()

    def _check_headers(self, geometry: Geometry) -> int:
        page = aligned_buffer(PAGE)
        heads = []
        for fd in (self._fd, self._index_fd):
            if read_fully(fd, page, 0) < PAGE:
                raise BadSlabError("no header")
            heads.append(_HEADER.unpack_from(page))
        magic, schema, num_slots, slot_bytes, fingerprint, number = heads[0]
        if magic != _MAGIC or schema != SCHEMA:
            raise BadSlabError("not a slab")
        if slot_bytes != geometry.slot_bytes or fingerprint != geometry.fingerprint:
            raise BadSlabError("foreign layout")
        if (magic, schema, slot_bytes, fingerprint, number) != (*heads[1][:2], *heads[1][3:]):
            raise BadSlabError("slab and index do not belong together")
        return min(int(num_slots), int(heads[1][2]))  # they differ where a process was killed in ``shrink``

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab's slots."""
        return self.num_slots * self._slot_bytes

    def _place(self, slot: int) -> int:
        return PAGE + slot * self._slot_bytes

    def read(self, slot: int, view: memoryview) -> int:
        """Fill ``view`` from the slot's front; returns the bytes read, fewer where the file was cut."""
        try:
            return read_fully(self._fd, view, self._place(slot))
        except OSError as exc:
            if exc.errno != errno.EINVAL or not self._is_direct:
                raise
        # The view's address or length does not suit direct I/O.
        bounce = aligned_buffer(len(view))
        got = min(read_fully(self._fd, bounce, self._place(slot)), len(view))
        view[:got] = bounce[:got]
        return got

    def write(self, slot: int, value: memoryview) -> None:
        """Write ``value`` at the slot's front.  Raises OSError."""
        try:
            write_fully(self._fd, value, self._place(slot))
        except OSError as exc:
            if exc.errno != errno.EINVAL or not self._is_direct:
                raise
        else:
            return
        bounce = aligned_buffer(len(value))
        bounce[: len(value)] = value
        write_fully(self._fd, bounce, self._place(slot))

    def publish(self, slot: int, record: Record) -> None:
        """Write the slot's record: from here on the value outlives the process.  Raises OSError."""
        body = struct.pack("<I32sQQd", _LIVE, record.key, record.num_bytes, record.sequence, record.used_at)
        self._write_record(slot, struct.pack("<I", zlib.crc32(body)) + body)

    def clear(self, slot: int) -> None:
        """Zero the slot's record: from here on the slot is free, also after a restart.  Raises OSError."""
        self._write_record(slot, _FREE)

    def _write_record(self, slot: int, data: bytes) -> None:
        if os.pwrite(self._index_fd, data, PAGE + slot * RECORD_BYTES) != RECORD_BYTES:
            raise OSError(errno.EIO, "short write to the index")

    def records(self) -> Iterator[tuple[int, Record | None]]:
        """The slots that are not free, in order, each with its record, or None for a damaged one."""
        raw = os.pread(self._index_fd, self.num_slots * RECORD_BYTES, PAGE)
        raw = raw[: len(raw) - len(raw) % RECORD_BYTES]
        for slot, fields in enumerate(_RECORD.iter_unpack(raw)):
            total, state, key, num_bytes, sequence, used_at = fields
            if not total and not state:
                continue
            body = raw[slot * RECORD_BYTES + 4 : (slot + 1) * RECORD_BYTES]
            is_sound = state == _LIVE and total == zlib.crc32(body) and num_bytes <= self._slot_bytes
            yield slot, Record(key, num_bytes, sequence, used_at) if is_sound else None

    def check(self) -> None:
        """Read the header pages from the medium.  Raises OSError."""
        page = aligned_buffer(PAGE)
        if read_fully(self._fd, page, 0) < PAGE:
            raise OSError(errno.EIO, f"{self.path} was cut")

    def shrink(self, num_slots: int) -> None:
        """Give the slots from ``num_slots`` on back to the file system.  Raises OSError."""
        page = aligned_buffer(PAGE)
        for fd in (self._index_fd, self._fd):
            read_fully(fd, page, 0)
            _NUM_SLOTS.pack_into(page, _NUM_SLOTS_AT, num_slots)
            write_fully(fd, page, 0)
        os.ftruncate(self._fd, self._place(num_slots))
        self.num_slots = num_slots

    def close(self) -> None:
        """Close both files.  May be called twice."""
        for fd in (self._fd, self._index_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._index_fd = -1


def index_path(slab: Path) -> Path:
    """Where the index of the slab at ``slab`` lies."""
    return slab.with_suffix(".index")


def create_slab(path: Path, num_slots: int, geometry: Geometry, *, is_direct: bool) -> Slab:
    """Make a slab of ``num_slots`` free slots, its space allocated; leaves nothing behind if it fails.

    Raises:
        OSError: ENOSPC, EDQUOT or EFBIG where there is no room, or what else went wrong.
    """
    page = aligned_buffer(PAGE)
    _HEADER.pack_into(
        page, 0, _MAGIC, SCHEMA, num_slots, geometry.slot_bytes, geometry.fingerprint, os.urandom(16)
    )
    identity = geometry.identity.encode()[: PAGE - _IDENTITY_AT]
    page[_IDENTITY_AT : _IDENTITY_AT + len(identity)] = identity
    with ExitStack() as undo:
        undo.callback(remove_slab, path)
        _allocate(path, page, PAGE + num_slots * geometry.slot_bytes)
        # The index last: a slab without one is a left-over of a killed process.
        _allocate(index_path(path), page, PAGE + num_slots * RECORD_BYTES)
        slab = Slab(path, geometry, is_direct=is_direct)
        undo.pop_all()
    return slab


def _allocate(path: Path, header: memoryview, num_bytes: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        write_fully(fd, header, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_slab(path: Path) -> None:
    """Delete a slab's files; one that is not there is no error."""
    index_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
