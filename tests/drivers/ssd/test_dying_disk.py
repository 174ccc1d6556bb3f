"""A real file system that is shut down, or made read-only, while a tier serves from it."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv_core import Status, TierAccessError, TierUnavailableError
from flexkv_core.testing import Value, make_values
from tests.support.ssd_disk import LAYOUT, load, served, store, tier_at

SHUTDOWN = 0x8004587D
"""``EXT4_IOC_SHUTDOWN``: every access fails from here on as if the disk were gone.  Source: linux, ext4.h."""
NO_LOG_FLUSH = 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty ext4 of 32 MiB."""
    if os.geteuid() or shutil.which("mkfs.ext4") is None:
        pytest.skip("a file system of one's own needs root and mkfs.ext4")
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    command = ["mount", "-o", "loop,errors=remount-ro", str(image), str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount an image here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def values() -> list[Value]:
    return make_values(LAYOUT, 20)


def test_a_disk_that_is_gone(disk: Path, values: list[Value]) -> None:
    with tier_at(disk / "kv") as tier:
        store(tier, *values[:10])
        fd = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(fd)
        assert {o.status for o in store(tier, *values[8:])} == {Status.UNAVAILABLE}
        assert {load(tier, value)[0].status for value in values[:8]} == {Status.UNAVAILABLE}
        with pytest.raises(TierUnavailableError, match="Input/output error"):
            tier.check_health()
    with pytest.raises(TierUnavailableError, match=str(disk)):
        tier_at(disk / "kv")


def test_a_disk_that_has_become_read_only(disk: Path, values: list[Value]) -> None:
    with tier_at(disk / "kv") as tier:
        store(tier, *values[:10])
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)
        outcomes = store(tier, *values[10:])
        assert {o.status for o in outcomes} == {Status.DENIED}
        assert "Read-only file system" in outcomes[0].reason
        assert all(served(tier, value) for value in values[:10]), "what was there is served on"
        assert tier.evict([values[0].key])[0].status is Status.OK
        assert load(tier, values[0])[0].status is Status.MISS
        with pytest.raises(TierUnavailableError, match="Read-only"):
            tier.check_health()
    with pytest.raises(TierAccessError, match="Read-only file system"):
        tier_at(disk / "kv")
