"""An ``ssd`` tier over a test's directory, and what its files hold behind its back."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flexkv_core import Outcome, TierContext
from flexkv_core.testing import Value, aligned_buffer, context_for, small_layout
from flexkv_driver_ssd.config import SsdConfig
from flexkv_driver_ssd.slab import PAGE, Geometry, Record, Slab
from flexkv_driver_ssd.tier import SsdTier, open_tier

LAYOUT = small_layout()
SLOT = LAYOUT.slot_bytes


def tier_at(path: Any, *, slots: int = 32, context: TierContext | None = None, **options: Any) -> SsdTier:
    """Open a tier with room for ``slots`` values of ``LAYOUT``."""
    options = {"capacity": slots * SLOT, "min_free": 0, "slab": 8 * SLOT, **options}
    return open_tier(SsdConfig(path=path, **options), context or context_for(LAYOUT, "disk"))


def store(tier: SsdTier, *values: Value) -> list[Outcome]:
    """Store one after the other."""
    return [tier.store([value.key], [value.view])[0] for value in values]


def load(tier: SsdTier, value: Value) -> tuple[Outcome, memoryview]:
    """Load a value's key: the outcome, and the whole buffer."""
    view = aligned_buffer(value.layout.slot_bytes, 0xA5)
    return tier.load([value.key], [view])[0], view


def served(tier: SsdTier, value: Value) -> bool:
    """Whether the core would serve this key; fails if it would serve anything but ``value``."""
    outcome, view = load(tier, value)
    if not outcome.is_ok or value.accepts(view[: outcome.num_bytes]) is None:
        return False
    assert value.equals(view), "other bytes under this key"
    return True


def listed(tier: SsdTier) -> dict[bytes, Any]:
    """What ``list_blocks`` tells, by key."""
    rows = [row for batch in tier.list_blocks() for row in batch]
    assert len({row.key for row in rows}) == len(rows), "a key listed twice"
    return {row.key: row for row in rows}


class Spot(NamedTuple):
    """Where a value lies: the slab's file, the slot, and the slot's first byte."""

    path: Path
    slot: int
    offset: int
    record: Record


@contextmanager
def slab_at(path: Path, slot_bytes: int = SLOT, fingerprint: bytes = LAYOUT.fingerprint) -> Iterator[Slab]:
    """A slab of a tier that may be open, through the page cache."""
    slab = Slab(path, Geometry(slot_bytes, fingerprint, "{}"), is_direct=False)
    try:
        yield slab
    finally:
        slab.close()


def spots(root: Path) -> dict[bytes, Spot]:
    """Where every value under ``root`` lies, read from the indexes."""
    found: dict[bytes, Spot] = {}
    for path in sorted(root.rglob("*.slab")):
        fingerprint, slot_bytes = _geometry(path)
        with slab_at(path, slot_bytes, fingerprint) as slab:
            for slot, record in slab.records():
                assert record is not None
                found[record.key] = Spot(path, slot, PAGE + slot * slot_bytes, record)
    return found


def _geometry(path: Path) -> tuple[bytes, int]:
    with path.open("rb") as file:
        _, slot_bytes, fingerprint = struct.unpack("<16sQ16s", file.read(40))
    return fingerprint, slot_bytes


def peek(spot: Spot) -> bytes:
    """The value's raw bytes."""
    with spot.path.open("rb") as file:
        file.seek(spot.offset)
        return file.read(spot.record.num_bytes)


def poke(spot: Spot, data: bytes, at: int = 0) -> None:
    """Overwrite bytes of the value, ``at`` bytes from its front."""
    with spot.path.open("r+b") as file:
        file.seek(spot.offset + at)
        file.write(data)


def disk_bytes(root: Path) -> int:
    """Disk space of all files under ``root``."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def replace(spot: Spot, data: bytes) -> None:
    """Put other bytes in the value's place, cut to the slot; a shorter value is entered as such."""
    slot_bytes = _geometry(spot.path)[1]
    poke(spot, data[:slot_bytes].ljust(spot.record.num_bytes, b"\0"))
    if len(data) < spot.record.num_bytes:
        _enter(spot, Record(spot.record.key, len(data), spot.record.sequence, spot.record.used_at))


def remove(spot: Spot) -> None:
    """Wipe the value and its record."""
    poke(spot, bytes(spot.record.num_bytes))
    _enter(spot, None)


def _enter(spot: Spot, record: Record | None) -> None:
    fingerprint, slot_bytes = _geometry(spot.path)
    with slab_at(spot.path, slot_bytes, fingerprint) as slab:
        if record is None:
            slab.clear(spot.slot)
        else:
            slab.publish(spot.slot, record)
