"""What happens to a directory in the years between two starts, and while a tier serves from it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flexkv_core import Status
from flexkv_core.testing import make_values
from flexkv_driver_ssd.slab import PAGE, index_path
from tests.support.ssd_disk import LAYOUT, SLOT, listed, served, slab_at, spots, store, tier_at

from .conftest import Mount

FUTURE_S = 4e9
"""The year 2096."""


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(PAGE))


def _slab(root: Path) -> Path:
    return min(root.rglob("*.slab"))


def test_a_copy_beside_a_slab_is_no_slab(tmp_path: Path) -> None:
    values = make_values(LAYOUT, 24)
    with tier_at(tmp_path) as tier:
        store(tier, *values[:8])
    slab = _slab(tmp_path)
    copy = slab.with_name("00000 copy.slab")
    shutil.copy(slab, copy)
    shutil.copy(index_path(slab), index_path(copy))
    notes = slab.with_name("notes.index")
    notes.write_text("mine")
    with tier_at(tmp_path) as tier:
        assert tier.usage().num_blocks == 8
        assert all(o.is_ok for o in store(tier, *values[8:]))
        assert all(served(tier, value) for value in values)
        assert len(listed(tier)) == 24
    with tier_at(tmp_path, persistent=False):
        pass
    assert notes.read_text() == "mine"
    assert copy.exists()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_directory_that_was_removed_and_made_anew_is_another_tiers(
    tmp_path: Path, persistent: bool
) -> None:
    root = tmp_path / "kv"
    values = make_values(LAYOUT, 16)
    first, more = values[:8], values[8:]
    with tier_at(root, persistent=persistent) as old:
        store(old, *first)
        shutil.rmtree(root)
        with tier_at(root) as new:
            assert all(o.is_ok for o in store(new, *first, *more))
            files = {path: path.stat().st_ino for path in root.rglob("*.slab")}
            (outcome,) = store(old, more[0])
            assert outcome.status is Status.UNAVAILABLE
            with pytest.raises(Exception, match="is not the one"):
                old.check_health()
            assert {path: path.stat().st_ino for path in root.rglob("*.slab")} == files
            assert all(served(old, value) for value in first), "an open file outlives its name"
    with tier_at(root) as new:
        assert all(served(new, value) for value in [*first, *more])


def test_a_clock_that_was_ahead_is_forgotten(tmp_path: Path) -> None:
    """Else what was used in that time would be evicted last, for years."""
    early, late = make_values(LAYOUT, 2)
    with tier_at(tmp_path) as tier:
        store(tier, early, late)
    spot = spots(tmp_path)[early.key]
    with slab_at(spot.path) as slab:
        slab.publish(spot.slot, replace(spot.record, used_at=FUTURE_S))
    with tier_at(tmp_path) as tier:
        assert listed(tier)[early.key].last_used <= time.time()
    assert spots(tmp_path)[early.key].record.used_at <= time.time()


def test_a_smaller_capacity_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = make_values(LAYOUT, 8)
    with tier_at(tmp_path) as tier:
        store(tier, *values)
    tier_at(tmp_path, slots=3).close()
    with caplog.at_level(logging.INFO), tier_at(tmp_path, slots=3) as tier:
        assert [served(tier, value) for value in values] == [True] * 3 + [False] * 5
    assert "0 damaged" in caplog.text
    with tier_at(tmp_path, slots=8) as tier:
        assert all(o.is_ok for o in store(tier, *values))
        assert all(served(tier, value) for value in values)


@pytest.mark.parametrize("num_bytes", [PAGE, PAGE + 2 * 64, PAGE + 2 * 64 + 10, PAGE + 8 * 64 + 5000])
def test_an_index_of_another_length(tmp_path: Path, num_bytes: int) -> None:
    values = make_values(LAYOUT, 8)
    with tier_at(tmp_path) as tier:
        store(tier, *values)
    os.truncate(index_path(_slab(tmp_path)), num_bytes)
    kept = min(8, (num_bytes - PAGE) // 64)
    for _ in range(2):
        with tier_at(tmp_path) as tier:
            assert [served(tier, value) for value in values] == [True] * kept + [False] * (8 - kept)
            assert all(o.is_ok for o in store(tier, *values))
            assert tier.usage().used_bytes == 8 * SLOT
        kept = 8


def test_no_space_for_a_record(mount: Mount) -> None:
    """The slots are there, and the file system has not a page left for the index (holes, copy on write)."""
    root = mount("tmpfs", "size=1m")
    old, new = make_values(LAYOUT, 8), make_values(LAYOUT, 3, seed=1)
    with tier_at(root, slots=8) as tier:
        store(tier, *old[:4])
        os.truncate(index_path(_slab(root)), PAGE)
        _fill(root / "ballast")
        assert {o.status for o in store(tier, *new)} == {Status.NO_SPACE}
        assert tier.usage().used_bytes == 4 * SLOT
        assert all(served(tier, value) for value in old[:4])
        (root / "ballast").unlink()
        assert all(o.is_ok for o in store(tier, *old[4:]))
        assert tier.usage().num_blocks == 8
