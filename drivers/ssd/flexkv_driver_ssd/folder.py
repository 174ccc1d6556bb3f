"""The folder that one engine process owns below a directory that the user named.

Values of different layouts never share a folder: its name is ``flexkv<schema>-<layout>-<slot
bytes>``.  It is private (0700), holds slabs (see ``slab``), a file ``lock`` with the owner's
process id, and ``about.json`` with the namespace for people.

Folders of other layouts that no process owns are *left-overs*: they stay warm for the engine that
wrote them, count against this directory's capacity, and are removed, the longest unused first,
when this tier needs their room.  ``rm -r`` removes one by hand.

Threads: one at a time; ``directory`` holds its lock meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from flexkv_core import TierAccessError, TierError, TierFullError, TierUnavailableError

from .slab import SCHEMA, Geometry

_OURS = re.compile(r"flexkv\d+-[0-9a-f]{16}-\d+")
_REMOVED = "flexkv-removed-"
_CLAIM_S = 0.5
"""Longer than another process holds a lock while it looks whether a folder is a left-over."""


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A folder of another layout that no process owns.

    Attributes:
        path: Where it lies.
        num_bytes: Disk space that it takes.
        used_at: When it was last opened, in seconds since the epoch.
    """

    path: Path
    num_bytes: int
    used_at: float


def open_error(path: Path, error: OSError, tier: str) -> TierError:
    """What to raise when ``path`` cannot be used, with the mend."""
    kind: type[TierError]
    kind, mend = TierUnavailableError, f"cannot be used: {error}"
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ELOOP):
        kind, mend = TierAccessError, "is in the way: name a directory, or a path that is free"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        who = f"give user {os.geteuid()} the right to, or name another directory"
        kind, mend = TierAccessError, f"cannot be written ({error.strerror}): {who}"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind, mend = TierFullError, f"has no room ({error.strerror}): free some, or name another directory"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        kind, mend = (
            TierAccessError,
            f"cannot be opened ({error.strerror}): raise `ulimit -n` or slab",
        )
    return kind(f"{path} {mend}", tier=tier, operation="open")


class Folder:
    """A claimed folder: no other process uses it until ``close``."""

    def __init__(self, directory: Path, geometry: Geometry, tier: str) -> None:
        """Make what is not there yet, and claim it.  Any number of processes may try at once.

        Raises:
            TierAccessError: it belongs to another process (named), or cannot be written or made.
            TierFullError, TierUnavailableError: as the file system says.
        """
        self.directory = directory
        self.path = directory / f"flexkv{SCHEMA}-{geometry.fingerprint.hex()[:16]}-{geometry.slot_bytes}"
        self._lock_fd = -1
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for rest in directory.glob(_REMOVED + "*"):  # of a process killed while it removed
                shutil.rmtree(rest, ignore_errors=True)
            self._lock_fd = self._claim(tier)
            self._write_about(geometry)
        except OSError as exc:
            self.close()
            raise open_error(Path(exc.filename or directory), exc, tier) from exc

    def _claim(self, tier: str) -> int:
        give_up = time.monotonic() + _CLAIM_S
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # removed as a left-over meanwhile: once more
                fd = _lock(self.path)
                if fd is not None:
                    os.chmod(self.path, 0o700)
                    _sign(fd)
                    return fd
            if time.monotonic() > give_up:
                owner = _owner(self.path)
                mend = (
                    "this one: give each tier a directory of its own"
                    if owner == str(os.getpid())
                    else "give each engine a directory of its own, or end that process"
                )
                raise TierAccessError(
                    f"{self.path} is in use by process {owner}: {mend}", tier=tier, operation="open"
                )
            time.sleep(0.02)

    def _write_about(self, geometry: Geometry) -> None:
        path, text = self.path / "about.json", geometry.identity + "\n"
        if path.is_file() and path.read_text() == text:
            return  # not written again: the disk may be full, and what lies here still be served
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)

    @property
    def is_open(self) -> bool:
        """Whether the folder is still this process's."""
        return self._lock_fd >= 0

    def free_bytes(self) -> int | None:
        """Bytes that this user may still take from the file system; None where it does not say."""
        about = os.statvfs(self.path)
        return about.f_bavail * about.f_frsize if about.f_blocks else None

    def left_overs(self) -> list[LeftOver]:
        """Left-overs beside this folder, the longest unused first."""
        found = []
        for path in self.directory.iterdir():
            if path != self.path and _OURS.fullmatch(path.name) and not path.is_symlink():
                with contextlib.suppress(OSError):  # another process may be removing it
                    if not _is_owned(path):
                        found.append(LeftOver(path, _disk_bytes(path), (path / "lock").stat().st_mtime))
        return sorted(found, key=lambda one: one.used_at)

    def check_owner(self) -> None:
        """Raises OSError where the folder is gone, or was made anew since, which makes it another's."""
        try:
            there, ours = os.stat(self.path / "lock"), os.fstat(self._lock_fd)
        except FileNotFoundError:
            line = "the folder is gone, or no longer mounted: bring it back, and start again"
            raise FileNotFoundError(errno.ENOENT, line, str(self.path)) from None
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            line = "the folder is not the one that was opened: start again"
            raise OSError(errno.ESTALE, line, str(self.path))

    def touch(self) -> None:
        """Find the folder and write what costs nothing; raises OSError where that fails."""
        self.check_owner()
        _sign(self._lock_fd)

    def close(self) -> None:
        """Let go of the folder.  May be called twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def remove_left_over(path: Path) -> bool:
    """Delete a left-over, unless a process has claimed it meanwhile; tells whether it is gone."""
    try:
        fd = _lock(path)
    except FileNotFoundError:
        return True
    if fd is None:
        return False
    try:
        # Renamed first: whoever claims the name meanwhile begins with an empty folder.
        gone = path.with_name(f"{_REMOVED}{os.getpid()}-{path.name}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    finally:
        os.close(fd)
    return True


def _lock(path: Path) -> int | None:
    """The lock of the folder at ``path``, held, or None if another holds it.

    Raises:
        FileNotFoundError: the folder was removed.
    """
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if os.stat(path / "lock").st_ino != os.fstat(fd).st_ino:
            raise FileNotFoundError(errno.ENOENT, "the lock was replaced", str(path))
        undo.pop_all()
    return fd


def _sign(fd: int) -> None:
    # Always of the same length: overwriting works on a full disk too.
    os.pwrite(fd, f"{os.getpid():<20}\n".encode(), 0)


def _is_owned(path: Path) -> bool:
    fd = os.open(path / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _owner(path: Path) -> str:
    try:
        return (path / "lock").read_text().strip() or "(starting)"
    except OSError:
        return "(unknown)"


def _disk_bytes(path: Path) -> int:
    return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(path))
