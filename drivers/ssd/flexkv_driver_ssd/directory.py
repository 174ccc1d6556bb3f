"""One directory's slabs: its free slots, how it grows, and the room that it may take.

Slots are handed out first-in first-out, so a slot that fails is not tried again at once, and a
fresh slab is written from front to back.

Threads: ``free`` and ``num_used`` are the catalog's, under its lock.  ``grow`` takes ``_growing``
and then, through ``on_grown``, the catalog's lock; never the other way round.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from flexkv_core import TierAccessError, TierFullError

from .config import SsdConfig
from .folder import Folder, LeftOver, open_error, remove_left_over
from .slab import (
    PAGE,
    RECORD_BYTES,
    BadSlabError,
    Geometry,
    Record,
    Slab,
    aligned_buffer,
    create_slab,
    read_fully,
    remove_slab,
    write_fully,
)

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_SLAB_BYTES = 1 << 30
_MAX_SLABS = 256
_NUMBER = re.compile(r"[0-9]{5,}")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Place(NamedTuple):
    """A slot and whose it is."""

    directory: Directory
    slab: Slab
    slot: int


class Directory:
    """One of a tier's directories, claimed and open."""

    def __init__(self, path: Path, num_slots: int, geometry: Geometry, config: SsdConfig, tier: str) -> None:
        """Claim ``path`` and open the slabs that lie there; at most ``num_slots`` slots are used.

        Raises:
            TierError: it cannot be used; the message names the path and the mend.
        """
        self.path = path
        self.num_slots = num_slots
        self.num_used = 0
        self.num_skipped = 0
        self.free: deque[Place] = deque()
        self.slabs: list[Slab] = []
        self._geometry = geometry
        self._min_free = config.min_free
        self._is_persistent = config.persistent
        self._growing = threading.Lock()
        self._slab_slots = _slab_slots(config, num_slots, geometry.slot_bytes)
        self._folder = Folder(path, geometry, tier)
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                self._open(config, tier)
            except OSError as exc:
                raise open_error(Path(exc.filename or path), exc, tier) from exc
            undo.pop_all()

    def _open(self, config: SsdConfig, tier: str) -> None:
        self.is_direct = config.direct_io != "off" and _takes_direct_io(self._folder.path)
        if config.direct_io == "on" and not self.is_direct:
            raise TierAccessError(
                f"{self.path}: its file system refuses direct I/O: set direct_io: auto",
                tier=tier,
                operation="open",
            )
        if not self._is_persistent:
            self._remove_files()
        self._open_slabs()
        self._left_overs: list[LeftOver] = self._folder.left_overs()
        self._check_room(tier)

    def _open_slabs(self) -> None:
        for stray in self._files(".index"):
            if not stray.with_suffix(".slab").exists():
                self._drop(stray.with_suffix(".slab"), "a file of the pair is missing")
        room = self.num_slots
        for path in self._files(".slab"):
            try:
                slab = Slab(path, self._geometry, is_direct=self.is_direct)
            except BadSlabError as exc:
                self._drop(path, str(exc))
                continue
            self.num_skipped += slab.num_cut
            if slab.num_slots > room:
                logger.warning("[FlexKV] %s is cut to %d blocks: the capacity is smaller now", path, room)
                slab.shrink(room)
            if not slab.num_slots:
                slab.close()
                remove_slab(path)
                continue
            room -= slab.num_slots
            self.slabs.append(slab)

    def _remove_files(self) -> None:
        self._folder.check_owner()
        for path in [*self._files(".slab"), *self._files(".index")]:
            path.unlink(missing_ok=True)

    def _files(self, suffix: str) -> list[Path]:
        """Our files, in order: their names are numbers, and what else lies there is somebody's own."""
        return sorted(path for path in self._folder.path.glob(f"*{suffix}") if _NUMBER.fullmatch(path.stem))

    def _drop(self, path: Path, reason: str) -> None:
        self.num_skipped += 1
        logger.warning("[FlexKV] %s is removed: %s", path, reason)
        remove_slab(path)

    def _check_room(self, tier: str) -> None:
        """Say now what would go wrong later: no room for one block, or less than the capacity."""
        for left in self._left_overs:
            logger.info(
                "[FlexKV] %s holds %.2f GiB of another layout (about.json says which); "
                "it is removed when its room is needed",
                left.path,
                left.num_bytes / _GIB,
            )
        free = self._folder.free_bytes()
        missing = self.num_slots - self.num_allocated
        if free is None or missing <= 0:
            return
        room = free - self._min_free + sum(left.num_bytes for left in self._left_overs)
        facts = f"{free / _GIB:.2f} GiB are free, of which min_free keeps {self._min_free / _GIB:.2f} GiB"
        if self._slots_in(room) < 1 and not self.slabs:
            raise TierFullError(
                f"{self.path} has no room for one block of {self._geometry.slot_bytes:,} B: {facts}",
                tier=tier,
                operation="open",
            )
        if room < missing * self._geometry.slot_bytes:
            logger.warning(
                "[FlexKV] %s cannot grow to its %.2f GiB: %s",
                self.path,
                self.num_slots * self._geometry.slot_bytes / _GIB,
                facts,
            )

    @property
    def num_allocated(self) -> int:
        """Slots that have disk space."""
        return sum(slab.num_slots for slab in self.slabs)

    def records(self) -> Iterator[tuple[Place, Record | None]]:
        """Every slot, with its record if it has a sound one; damaged records are cleared and counted."""
        for slab in self.slabs:
            taken = dict(slab.records())
            for slot in range(slab.num_slots):
                record = taken.get(slot)
                if record is None and slot in taken:
                    self.num_skipped += 1
                    slab.clear(slot)
                yield Place(self, slab, slot), record

    def may_grow(self) -> bool:
        """Whether the capacity allows another slab."""
        return self.num_allocated < self.num_slots

    def grow(self, on_grown: Callable[[Iterator[Place]], None]) -> bool:
        """Add a slab, unless another thread just did; tells whether a free slot may be there now.

        Args:
            on_grown: Given the new places.

        Raises:
            OSError: anything but a lack of room.
        """
        with self._growing:
            if self.free:
                return True
            slab = self._add_slab()
            if slab is None:
                return False
            self.slabs.append(slab)
            on_grown(Place(self, slab, slot) for slot in range(slab.num_slots))
            return True

    def _add_slab(self) -> Slab | None:
        self._folder.check_owner()
        wanted = min(self._slab_slots, self.num_slots - self.num_allocated)
        # Small slabs only where there is no other way: a nearly full disk must not make thousands.
        least = min(wanted, max(1, self._slab_slots // 16)) if self.slabs else 1
        while wanted >= least:
            fits = self._slots_that_fit(wanted)
            if fits < least:
                break
            try:
                return create_slab(self._next_path(), fits, self._geometry, is_direct=self.is_direct)
            except OSError as exc:
                if exc.errno not in _NO_ROOM:
                    raise
                wanted = fits // 2  # a quota or a limit that statvfs does not tell
        return None

    def _slots_that_fit(self, wanted: int) -> int:
        """Slots, at most ``wanted``, for which there is room; left-overs make way first."""
        while True:
            fits = min(wanted, self._room())
            if fits >= wanted or not self._left_overs:
                return fits
            left = self._left_overs.pop(0)
            if remove_left_over(left.path):
                logger.warning("[FlexKV] %s, of another layout, is removed: its room is needed", left.path)

    def _room(self) -> int:
        """Further slots that the capacity, which left-overs count against, and the disk have room for."""
        slot_bytes = self._geometry.slot_bytes
        left_overs = sum(left.num_bytes for left in self._left_overs)
        room = self.num_slots - self.num_allocated - -(-left_overs // slot_bytes)
        free = self._folder.free_bytes()
        if free is not None:
            room = min(room, self._slots_in(free - self._min_free))
        return room

    def _slots_in(self, num_bytes: int) -> int:
        """Slots of one more slab: it has two header pages, and an index of whole pages with a record each."""
        return (num_bytes - 3 * PAGE) // (self._geometry.slot_bytes + RECORD_BYTES)

    def _next_path(self) -> Path:
        number = 1 + max((int(slab.path.stem) for slab in self.slabs), default=-1)
        path = self._folder.path / f"{number:05d}.slab"
        remove_slab(path)  # left by a process killed while it made it
        return path

    def check(self) -> None:
        """Touch the medium.  Raises OSError where a call would fail now."""
        self._folder.touch()
        for slab in self.slabs[:1]:
            slab.check()

    def let_go(self) -> None:
        """In a child after a fork: close its copies of the parent's files, and take no lock."""
        for slab in self.slabs:
            slab.close()
        self._folder.close()

    def close(self) -> None:
        """Close all files and let go of the directory.  May be called twice."""
        for slab in self.slabs:
            slab.close()
        if not self._is_persistent and self._folder.is_open:
            with contextlib.suppress(OSError):  # a disk that is gone: the next start removes them
                self._remove_files()
        self._folder.close()


def _slab_slots(config: SsdConfig, num_slots: int, slot_bytes: int) -> int:
    if config.slab is not None:
        return max(1, config.slab // slot_bytes)
    return max(1, _SLAB_BYTES // slot_bytes, -(-num_slots // _MAX_SLABS))


def _takes_direct_io(folder: Path) -> bool:
    """Try one page: opening alone does not tell on every file system."""
    path = folder / "direct-io-probe"
    page = aligned_buffer(PAGE)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_DIRECT, 0o600)
        try:
            write_fully(fd, page, 0)
            return read_fully(fd, page, 0) == PAGE
        finally:
            os.close(fd)
    except OSError as exc:
        if exc.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        if exc.errno in _NO_ROOM:
            return True  # it could be opened; a full disk is no reason not to serve what lies there
        raise
    finally:
        path.unlink(missing_ok=True)
