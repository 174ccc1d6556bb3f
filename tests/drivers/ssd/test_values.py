"""Values come back whole, after overwriting, after a restart, and from every directory."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

from flexkv_core import Status
from flexkv_core.testing import aligned_buffer, make_values
from tests.support.ssd_disk import LAYOUT, SLOT, disk_bytes, listed, load, served, spots, store, tier_at


def test_unaligned_views_and_lengths(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        for size in (0, 1, 511, 4095, 4096, 4097, SLOT - 1, SLOT):
            key = size.to_bytes(32, "little")
            source = memoryview(bytearray(size + 3))[3:]
            source[:] = bytes(i % 251 for i in range(size))
            assert tier.store([key], [source.toreadonly()])[0].is_ok
            into = memoryview(bytearray(SLOT + 1))[1:]
            (outcome,) = tier.load([key], [into])
            assert (outcome.status, outcome.num_bytes) == (Status.OK, size)
            assert into[:size] == source


def test_overwriting_frees_the_old_slot(tmp_path: Path) -> None:
    old, new = make_values(LAYOUT, 3), make_values(LAYOUT, 3, seed=1)
    with tier_at(tmp_path, slots=4) as tier:
        for _ in range(5):
            assert all(o.is_ok for o in store(tier, *old, *new))
        assert all(served(tier, value) for value in new)
        assert tier.usage().used_bytes == 3 * SLOT


def test_warm_after_restart(tmp_path: Path) -> None:
    values = make_values(LAYOUT, 20, alignment_bytes=4096)
    with tier_at(tmp_path) as tier:
        store(tier, *values)
        tier.evict([value.key for value in values[:5]])
    with tier_at(tmp_path) as tier:
        rows = listed(tier)
        assert set(rows) == {value.key for value in values[5:]}
        for value in values[5:]:
            row = rows[value.key]
            assert row.num_bytes == len(value.view)
            assert row.head == value.view[: LAYOUT.header_bytes]
            assert row.last_used > 1e9
        assert [served(tier, value) for value in values] == [False] * 5 + [True] * 15
        assert tier.usage().used_bytes == 15 * SLOT
        assert all(o.is_ok for o in store(tier, *values[:5]))


def test_listing_is_in_order_of_use(tmp_path: Path) -> None:
    values = make_values(LAYOUT, 4)
    with tier_at(tmp_path) as tier:
        store(tier, *values)
        load(tier, values[0])
    with tier_at(tmp_path) as tier:
        assert list(listed(tier)) == [values[i].key for i in (1, 2, 3, 0)]


def test_striped_within_one_block(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("a", "b b", "c")]
    values = make_values(LAYOUT, 31)
    with tier_at("; ".join(map(str, roots)), slots=31) as tier:
        for count, value in enumerate(values, 1):
            assert store(tier, value)[0].is_ok
            held = [len(spots(root)) for root in roots]
            assert max(held) - min(held) <= 1
            assert sum(held) == count
        assert tier.store([bytes(32)], [values[0].view])[0].status is Status.NO_SPACE
        tier.evict(list(spots(roots[0])))
        store(tier, *values[:10])
    with tier_at(roots, slots=31) as tier:
        assert sum(served(tier, value) for value in values) == len(listed(tier))


def test_files_are_private_and_never_sparse(tmp_path: Path) -> None:
    root = tmp_path / "new" / "kv"
    with tier_at(root) as tier:
        store(tier, *make_values(LAYOUT, 9))
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        for path in root.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        slabs = list(root.rglob("*.slab"))
        assert len(slabs) == 2
        assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in slabs)


def test_disk_use_stays_within_the_capacity(tmp_path: Path) -> None:
    values = make_values(LAYOUT, 96)
    with tier_at(tmp_path, slots=24) as tier:
        threads = [threading.Thread(target=store, args=(tier, *values[n::4])) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tier.usage().num_blocks == 24
        # Besides: a header page and an index of two pages for each of three slabs, a lock, a text.
        assert disk_bytes(tmp_path) <= 24 * SLOT + 3 * 3 * 4096 + 2 * 4096


def test_smaller_capacity_cuts_what_is_there(tmp_path: Path) -> None:
    values = make_values(LAYOUT, 30)
    with tier_at(tmp_path, slots=32) as tier:
        store(tier, *values)
    with tier_at(tmp_path, slots=11) as tier:
        assert tier.usage().num_blocks == 11
        assert sum(served(tier, value) for value in values) == 11
        assert store(tier, values[20])[0].status is Status.NO_SPACE
        assert disk_bytes(tmp_path) < 13 * SLOT + 8 * 4096
    with tier_at(tmp_path, slots=32) as tier:
        assert all(o.is_ok for o in store(tier, *values[11:]))
        assert all(served(tier, value) for value in values)


def test_slot_is_not_reused_while_it_is_read(tmp_path: Path) -> None:
    first, second = make_values(LAYOUT, 2)
    with tier_at(tmp_path, slots=1) as tier:
        store(tier, first)
        entry = tier._catalog.borrow(first.key)
        assert entry is not None
        tier.evict([first.key])
        assert load(tier, first)[0].status is Status.MISS
        assert store(tier, second)[0].status is Status.NO_SPACE
        tier._catalog.give_back(entry)
        assert store(tier, second)[0].is_ok
        assert served(tier, second)


def test_value_longer_than_the_buffer(tmp_path: Path) -> None:
    (value,) = make_values(LAYOUT, 1, alignment_bytes=4096)
    with tier_at(tmp_path) as tier:
        store(tier, value)
        small = aligned_buffer(4096, 7)
        assert tier.load([value.key], [small])[0].status is Status.CORRUPT
        assert set(small) == {7}


def test_not_persistent(tmp_path: Path) -> None:
    values = make_values(LAYOUT, 9)
    with tier_at(tmp_path, persistent=False) as tier:
        assert not tier.capabilities.persistent
        store(tier, *values)
        assert all(served(tier, value) for value in values)
    assert not [*tmp_path.rglob("*.slab"), *tmp_path.rglob("*.index")]
    with tier_at(tmp_path) as tier:  # stands for a process that was killed: its files are still there
        store(tier, *values)
    with tier_at(tmp_path, persistent=False) as tier:
        assert listed(tier) == {}
        assert not spots(tmp_path)
