"""Full disks, floors, limits and quotas: NO_SPACE and nothing worse; writing goes on once there is room."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flexkv_core import Status, TierFullError
from flexkv_core.testing import Value, context_for, make_values, small_layout
from flexkv_driver_ssd.tier import SsdTier
from tests.support.ssd_disk import LAYOUT, SLOT, disk_bytes, served, spots, store, tier_at
from tests.support.waiting import CHILD_S

from .conftest import Mount


def _fill(tier: SsdTier, values: list[Value]) -> list[Value]:
    kept = []
    for value in values:
        (outcome,) = store(tier, value)
        if outcome.status is Status.NO_SPACE:
            return kept
        assert outcome.is_ok
        kept.append(value)
    raise AssertionError("never full")


def test_full_file_system(mount: Mount) -> None:
    root = mount("tmpfs", "size=1m")
    values = make_values(LAYOUT, 200)
    with tier_at(root, slots=1000) as tier:
        kept = _fill(tier, values)
        assert 60 < len(kept) < 128
        assert all(served(tier, value) for value in kept)
        tier.evict([kept[0].key])
        assert store(tier, values[-1])[0].is_ok, "room made by eviction is used"
    with tier_at(root, slots=1000) as tier:
        assert all(served(tier, value) for value in kept[1:]), "a full disk is no reason not to serve"


def test_small_blocks_in_a_large_slab_on_a_small_disk(mount: Mount) -> None:
    """Room is kept for the index of the slots that fit, not of those that a whole slab would have."""
    with tier_at(mount("tmpfs", "size=1m"), slots=1000, slab=None) as tier:
        assert 60 < len(_fill(tier, make_values(LAYOUT, 200))) < 128


@pytest.mark.parametrize("beyond", [0, 100, 3 * 4096])
def test_a_disk_that_no_slab_fits_on_is_refused_at_open(mount: Mount, beyond: int) -> None:
    """A slab takes more than its blocks: what a store would find out is said at once."""
    root = mount("tmpfs", "size=1m")
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    floor = free - SLOT - beyond
    with pytest.raises(TierFullError, match="no room for one block"), tier_at(root, slots=8, min_free=floor):
        pass


def test_writing_goes_on_when_there_is_space_again(mount: Mount) -> None:
    root = mount("tmpfs", "size=1m")
    (root / "ballast").write_bytes(bytes(700_000))
    values = make_values(LAYOUT, 200)
    with tier_at(root, slots=1000) as tier:
        few = _fill(tier, values)
        assert store(tier, values[-1])[0].status is Status.NO_SPACE
        (root / "ballast").unlink()
        assert store(tier, values[-1])[0].is_ok
        assert len(_fill(tier, values[len(few) : -1])) > 2 * len(few)


def test_floor_is_kept(mount: Mount) -> None:
    root = mount("tmpfs", "size=1m")
    with tier_at(root, slots=1000, min_free="400KiB") as tier:
        _fill(tier, make_values(LAYOUT, 200))
        about = os.statvfs(root)
        assert about.f_bavail * about.f_frsize >= 400 << 10
        assert disk_bytes(root) > 400 << 10


def test_each_directory_has_its_own_room(mount: Mount) -> None:
    small, large = mount("tmpfs", "size=400k"), mount("tmpfs", "size=1m")
    values = make_values(LAYOUT, 200)
    with tier_at([small, large], slots=2000) as tier:
        kept = _fill(tier, values)
        held = [len(spots(root)) for root in (small, large)]
        assert held[0] * 2 < held[1]
        assert sum(held) == len(kept)
        assert all(served(tier, value) for value in kept)


def test_no_room_for_one_block_is_told_at_start(mount: Mount) -> None:
    root = mount("tmpfs", "size=1m")
    with pytest.raises(TierFullError, match=r"no room for one block.*min_free") as caught:
        tier_at(root, min_free="1MiB")
    assert str(root) in str(caught.value)


def test_only_the_second_directory_is_full(tmp_path: Path, mount: Mount) -> None:
    root = mount("tmpfs", "size=64k")
    (root / "ballast").write_bytes(bytes(50_000))
    with pytest.raises(TierFullError, match=str(root)):
        tier_at([tmp_path / "a", root])


def test_capacity_beyond_the_disk_is_warned_of(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    root = mount("tmpfs", "size=1m")
    with caplog.at_level(logging.WARNING), tier_at(root, slots=1000):
        pass
    assert [r.message for r in caplog.records if "cannot grow to its" in r.message]


def test_capacity_below_one_block(tmp_path: Path) -> None:
    for capacity in (0, SLOT - 1):
        with pytest.raises(TierFullError, match="holds no block"):
            tier_at(tmp_path, capacity=capacity)


def test_slab_smaller_than_a_block_and_more_directories_than_blocks(tmp_path: Path) -> None:
    values = make_values(LAYOUT, 3)
    roots = [tmp_path / name for name in "abcde"]
    with tier_at(roots, slots=3, slab=1) as tier:
        assert all(o.is_ok for o in store(tier, *values))
        assert tier.store([bytes(32)], [values[0].view])[0].status is Status.NO_SPACE
        assert [len(spots(root)) for root in roots] == [1, 1, 1, 0, 0]


LIMITED = """
from tests.drivers.ssd.test_room import fill_under_a_limit
fill_under_a_limit({root!r})
"""


def fill_under_a_limit(root: str) -> None:
    """In a child: files may not grow beyond three slots."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 3 * SLOT, 4096 + 3 * SLOT))
    values = make_values(LAYOUT, 20)
    with tier_at(root) as tier:
        outcomes = store(tier, *values)
        assert {o.status for o in outcomes} <= {Status.OK, Status.NO_SPACE}, outcomes
        assert sum(o.is_ok for o in outcomes) >= 2
        assert [served(tier, v) for v in values] == [o.is_ok for o in outcomes]
        limit = 4096 + 3 * SLOT
        assert all(path.stat().st_size <= limit for path in tier._directories[0].path.rglob("*"))


def test_limit_that_statvfs_does_not_tell(tmp_path: Path) -> None:
    code = LIMITED.format(root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=CHILD_S)
    assert done.returncode == 0, done.stderr


def test_left_overs_count_and_make_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Folders of other layouts stay while there is room, and leave the longest unused first."""
    layouts = [small_layout(num_layers=n) for n in (1, 3)]
    for layout in layouts:
        with tier_at(tmp_path, context=context_for(layout, "disk"), slots=64) as tier:
            store(tier, *make_values(layout, 8))
    folders = list(tmp_path.iterdir())
    assert len(folders) == 2
    for used_at, folder in enumerate(folders, 1_000_000_000):
        os.utime(folder / "lock", (used_at, used_at))  # the clock of a file system is coarse
    values = make_values(LAYOUT, 40)
    with tier_at(tmp_path, slots=40, slab=4 * SLOT) as tier:
        sizes = []
        for value in values:
            assert store(tier, value)[0].is_ok
            sizes.append(sum(folder.exists() for folder in folders))
            assert folders[1].exists() or not folders[0].exists(), "the longest unused goes first"
            assert disk_bytes(tmp_path) <= 40 * SLOT + 50 * 4096
    assert (sizes[0], sizes[-1]) == (2, 0)
    assert len(list(tmp_path.iterdir())) == 1


def test_folder_in_use_is_no_left_over(tmp_path: Path) -> None:
    other = small_layout(num_layers=1)
    (kept,) = make_values(other, 1)
    with tier_at(tmp_path, context=context_for(other, "other")) as neighbour:
        store(neighbour, kept)
        with tier_at(tmp_path, slots=10) as tier:
            assert all(o.is_ok for o in store(tier, *make_values(LAYOUT, 10)))
        assert served(neighbour, kept)
    with tier_at(tmp_path, context=context_for(other, "other")) as neighbour:
        assert served(neighbour, kept)
