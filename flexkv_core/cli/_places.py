"""``flexkv doctor``'s look at directories, services, drivers and engines."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ..config import ResolvedTier
from ..config.report import mask_urls
from ..drivers import open_tier
from ..errors import FlexKVError
from ..layout import PAGE_BYTES
from ..tier import TierCapabilities, TierContext
from ..units import format_bytes
from ._findings import Line, bad, doubtful, good

_PROBE_BYTES = 1 << 20
_FAULTS_OF_CODE = (TypeError, AttributeError, NameError, ImportError)
DOCTOR_GROUP = "flexkv.doctor"
"""Entry points ``engine = "module:function"``: called without arguments, the function returns what is
wrong with the installed engine, one object with a text for each difference; nothing means well."""


def directory_lines(path: str, wanted_bytes: int, min_free_bytes: int = 0) -> Iterator[Line]:
    """Whether a directory can be written to, has room, and takes direct I/O.

    Args:
        path: The directory; one that is not there is made by the tier, so its parent is looked at.
        wanted_bytes: The tier's share of it.
        min_free_bytes: What must stay free besides.
    """
    name, place = f"directory {path}", Path(path).absolute()
    try:
        there = _nearest(place)
    except OSError as exc:
        yield bad(
            name, f"cannot be looked at: {exc.strerror}", "name another path, or change who may enter it"
        )
        return
    if not there.is_dir():
        found = "is not a directory" if there == place else f"{there} is not a directory"
        yield bad(name, found, "name another path")
        return
    note = "" if there == place else f" (will be made in {there})"
    if not os.access(there, os.W_OK | os.X_OK):
        yield bad(name, f"{there} cannot be written to", f"mkdir -p {path} && chown it to this user")
        return
    try:
        has_direct_io = takes_direct_io(there)
    except OSError as exc:
        yield bad(name, f"a file in {there} cannot be written: {exc.strerror}", "free or remount the disk")
        return
    yield _space_line(name, place, there, wanted_bytes + min_free_bytes, note)
    if has_direct_io:
        yield good(name, "takes direct I/O")
    else:
        mend = "use a local disk with ext4 or xfs, or accept that blocks are kept twice in memory"
        yield doubtful(name, "takes no direct I/O: reads and writes go through the page cache", mend)


def _nearest(place: Path) -> Path:
    """What is there of ``place``: itself, or the nearest part of its path.

    Raises:
        OSError: it cannot be found out.
    """
    for part in (place, *place.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            part.stat()
            return part
    raise FileNotFoundError(errno.ENOENT, "no part of it is there", str(place))


def _space_line(name: str, place: Path, there: Path, wanted: int, note: str) -> Line:
    free, used = shutil.disk_usage(there).free, _used_bytes(place)
    found = f"{format_bytes(free)} free, {format_bytes(used)} used by it, {format_bytes(wanted)} wanted{note}"
    if free + used < wanted:
        return bad(name, found, "free the disk, or lower the tier's capacity")
    return good(name, found)


def _used_bytes(place: Path) -> int:
    """What an earlier run left there is its room too: a warm tier must not fail its own check."""
    total = 0
    for folder, _, names in os.walk(place):  # which passes over what may not be entered
        for name in names:
            with suppress(OSError):  # an engine that runs may have removed it
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def shared_lines(shares: Sequence[tuple[str, int, int]]) -> Iterator[Line]:
    """What only shows when directories are seen together: named twice, or too much for one file system.

    Args:
        shares: Each directory of each tier, how much of it is wanted there, and what must stay free besides.
    """
    by_path: dict[str, int] = Counter(os.path.realpath(path) for path, _, _ in shares)
    for path, count in by_path.items():
        if count > 1:
            yield bad(f"directory {path}", f"is named {count} times", "give each tier directories of its own")
    systems: dict[int, list[tuple[str, int, int]]] = {}
    for share in shares:
        with suppress(OSError):  # its own line tells it
            systems.setdefault(_nearest(Path(share[0]).absolute()).stat().st_dev, []).append(share)
    for members in systems.values():
        if len(members) > 1:
            yield from _system_lines(members)


def _system_lines(members: Sequence[tuple[str, int, int]]) -> Iterator[Line]:
    places = [Path(path).absolute() for path, _, _ in members]
    free = shutil.disk_usage(_nearest(places[0])).free
    wanted = sum(wanted for _, wanted, _ in members) + max(min_free for _, _, min_free in members)
    if free + sum(map(_used_bytes, places)) < wanted:
        yield bad(
            f"directories {', '.join(path for path, _, _ in members)}",
            f"lie on one file system: {format_bytes(free)} free, {format_bytes(wanted)} wanted together",
            "put them on disks of their own, or lower the capacity",
        )


def takes_direct_io(folder: Path) -> bool:
    """Whether a file in ``folder`` can be opened past the page cache; tried with a file that has no name.

    Raises:
        OSError: no file can be written there at all.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".flexkv-doctor-") as file:
        file.write(b"x")
        file.flush()
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            return False
        try:
            os.close(os.open(file.name, os.O_RDWR | flag))
        except OSError:
            return False
        return True


def service_lines(tier: ResolvedTier) -> Iterator[Line]:
    """Open a tier that takes nothing of this machine, ask it how it is, and close it.

    Opening goes through the driver, with its own time limits; nothing is stored through it.  What the
    driver warns of meanwhile, such as settings of the service that will not do, is a line each.
    """
    name = f"tier {tier.config.name}"
    context = TierContext(name=tier.config.name, value_bytes=_PROBE_BYTES, head_bytes=PAGE_BYTES)
    try:
        with _Warnings() as heard, open_tier(tier.spec, tier.provider, tier.options, context) as opened:
            opened.check_health()
            yield good(name, f"answers; {_words(opened.capabilities)}")
    except FlexKVError as exc:
        found = mask_urls(str(exc)).removeprefix(f"{name}: ")
        yield bad(name, found, "start the service, or mend the options")
    except Exception as exc:  # noqa: BLE001 - a driver may be foreign code; the rest is still checked
        # What a library says may hold a secret; what Python says of faulty code names things.
        said = f": {mask_urls(str(exc))}" if isinstance(exc, _FAULTS_OF_CODE) else ""
        found = f"{type(exc).__name__} in driver {tier.spec.name}{said}"
        yield bad(name, found, f"report it to {tier.provider}")
    else:
        for line in heard.lines:
            said = mask_urls(line).removeprefix("[FlexKV] ").removeprefix(f"{name}: ")
            yield doubtful(name, said, "change the service's settings, or the options")


class _Warnings(logging.Handler):
    """What is logged as a warning or worse while this is entered; it is not printed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> _Warnings:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)


def _words(capabilities: TierCapabilities) -> str:
    """Capabilities in one line; those that are false or zero are left out."""
    facts = {field.name: getattr(capabilities, field.name) for field in fields(capabilities)}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in facts.items() if value)


def driver_lines(wanted: Iterable[str] | None) -> Iterator[Line]:
    """The installed drivers; a broken one is bad if the chain names it.

    Args:
        wanted: Names of the chain's drivers; None where the chain is not known.
    """
    from .drivers import rows

    names = set(wanted or ())
    unused = "" if wanted is None else "; no tier uses it"
    found = rows()
    for row in found:
        name = f"driver {row.name}"
        if not row.problem:
            yield good(name, f"{row.provider}, interface {row.api}")
        elif row.name in names:
            yield bad(name, row.problem, f"repair or replace {row.provider}")
        else:
            yield doubtful(name, row.problem, f"repair or uninstall {row.provider}{unused}")
    for missing in sorted(names - {row.name for row in found}):
        yield bad(f"driver {missing}", "is not installed", "install the distribution that offers it")


def engine_lines(group: str = DOCTOR_GROUP) -> Iterator[Line]:
    """What each engine's adapter says of the installed engine."""
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        yield from _engine(entry)


def _engine(entry: EntryPoint) -> Iterator[Line]:
    name = f"engine {entry.name}"
    if importlib.util.find_spec(entry.name) is None:
        yield doubtful(name, "is not installed", f"pip install {entry.name}, to serve with it")
        return
    try:
        faults = list(entry.load()())
    except Exception as exc:  # noqa: BLE001 - an adapter may be foreign code; the others are still checked
        yield bad(name, f"cannot be checked: {type(exc).__name__}: {exc}", f"repair {entry.value}")
        return
    for fault in faults:
        yield bad(name, str(fault), "install a version of it that the adapter supports")
    if not faults:
        yield good(name, "has the interface that the adapter needs")
