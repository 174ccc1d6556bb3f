"""Whatever happens to the files behind the tier's back: a miss, or bytes that the core rejects."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path

import pytest

from flexkv_core import Status
from flexkv_core.testing import Value, make_values
from flexkv_driver_ssd.slab import PAGE, Record, aligned_buffer, index_path
from tests.support.ssd_disk import (
    LAYOUT,
    SLOT,
    listed,
    load,
    peek,
    poke,
    served,
    slab_at,
    spots,
    store,
    tier_at,
)

SEED = 7


@pytest.fixture
def values() -> list[Value]:
    return make_values(LAYOUT, 20, alignment_bytes=PAGE)


def _filled(root: Path, values: list[Value]) -> dict[bytes, object]:
    with tier_at(root) as tier:
        store(tier, *values)
    return dict(spots(root))


def _slabs(root: Path) -> list[Path]:
    return sorted(root.rglob("*.slab"))


def test_flipped_bytes(tmp_path: Path, values: list[Value]) -> None:
    chance = random.Random(SEED)
    _filled(tmp_path, values)
    where = spots(tmp_path)
    for value in values:
        at = chance.choice([0, 8, 40, 100, 130, chance.randrange(LAYOUT.header_bytes, value.num_bytes)])
        spot = where[value.key]
        poke(spot, bytes([peek(spot)[at] ^ 0x10]), at)
    with tier_at(tmp_path) as tier:
        assert not any(served(tier, value) for value in values)
        store(tier, *values)
        assert all(served(tier, value) for value in values)


@pytest.mark.parametrize("is_open", [True, False])
def test_values_that_changed_places(tmp_path: Path, values: list[Value], is_open: bool) -> None:
    tier = tier_at(tmp_path)
    store(tier, *values)
    if not is_open:
        tier.close()
    where = spots(tmp_path)
    first, second = where[values[0].key], where[values[1].key]
    one, other = peek(first), peek(second)
    poke(first, other)
    poke(second, one)
    tier = tier if is_open else tier_at(tmp_path)
    with tier:
        assert [served(tier, value) for value in values] == [False] * 2 + [True] * 18


def test_swapped_slabs(tmp_path: Path, values: list[Value]) -> None:
    _filled(tmp_path, values)
    first, second, third = _slabs(tmp_path)
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    with tier_at(tmp_path) as tier:
        assert [served(tier, value) for value in values] == [False] * 16 + [True] * 4
        assert sum(one.num_skipped for one in tier._directories) == 2
        assert _slabs(tmp_path) == [third]
        assert all(o.is_ok for o in store(tier, *values))


def test_truncated_slab(tmp_path: Path, values: list[Value]) -> None:
    _filled(tmp_path, values)
    os.truncate(_slabs(tmp_path)[0], PAGE + 3 * SLOT + SLOT // 2)
    os.truncate(_slabs(tmp_path)[1], PAGE // 2)
    with tier_at(tmp_path) as tier:
        assert [served(tier, value) for value in values] == [True] * 3 + [False] * 13 + [True] * 4
        assert sum(one.num_skipped for one in tier._directories) == 6
        assert all(o.is_ok for o in store(tier, *values))


def test_slab_truncated_under_an_open_tier(tmp_path: Path, values: list[Value]) -> None:
    with tier_at(tmp_path) as tier:
        store(tier, *values)
        os.truncate(_slabs(tmp_path)[0], PAGE + 2 * SLOT + 100)
        assert load(tier, values[2])[0].status is Status.CORRUPT
        assert load(tier, values[7])[0].status is Status.CORRUPT
        assert [served(tier, value) for value in values] == [True] * 2 + [False] * 6 + [True] * 12


@pytest.mark.parametrize("suffix", [".slab", ".index"])
def test_lost_file(tmp_path: Path, values: list[Value], suffix: str) -> None:
    with tier_at(tmp_path) as tier:
        store(tier, *values)
        _slabs(tmp_path)[0].with_suffix(suffix).unlink()
        assert all(served(tier, value) for value in values), "an open file outlives its name"
    with tier_at(tmp_path) as tier:
        assert [served(tier, value) for value in values] == [False] * 8 + [True] * 12
        assert not (
            _slabs(tmp_path)[0].parent / f"00000{'.slab' if suffix == '.index' else '.index'}"
        ).exists()


@pytest.mark.parametrize("seed", range(4))
def test_garbage_in_the_index(tmp_path: Path, values: list[Value], seed: int) -> None:
    chance = random.Random(seed)
    _filled(tmp_path, values)
    index = index_path(_slabs(tmp_path)[0])
    garbage = [chance.randbytes(64 * 8), b"\xff" * 64 * 8, pickle.dumps("x" * 600), b"\x00" * 64 * 8][seed]
    with index.open("r+b") as file:
        file.seek(PAGE)
        file.write(garbage[: 64 * 8])
    with tier_at(tmp_path) as tier:
        assert [served(tier, value) for value in values] == [False] * 8 + [True] * 12
        assert len(listed(tier)) == 12
        assert all(o.is_ok for o in store(tier, *values))
    with tier_at(tmp_path) as tier:
        assert all(served(tier, value) for value in values)


@pytest.mark.parametrize("suffix", [".slab", ".index"])
def test_garbage_in_a_header(tmp_path: Path, values: list[Value], suffix: str) -> None:
    _filled(tmp_path, values)
    with _slabs(tmp_path)[0].with_suffix(suffix).open("r+b") as file:
        file.write(random.Random(SEED).randbytes(PAGE))
    with tier_at(tmp_path) as tier:
        assert [served(tier, value) for value in values] == [False] * 8 + [True] * 12


def test_pickle_in_a_slot_is_not_executed(tmp_path: Path, values: list[Value]) -> None:
    _filled(tmp_path, values)
    canary = tmp_path / "executed"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(canary),)

    poke(spots(tmp_path)[values[0].key], pickle.dumps(Payload()))
    with tier_at(tmp_path) as tier:
        assert not served(tier, values[0])
        assert len(listed(tier)) == 20
        assert not canary.exists()


def test_slab_of_another_layout_under_our_name(tmp_path: Path, values: list[Value]) -> None:
    _filled(tmp_path / "ours", values)
    from flexkv_core.testing import context_for, small_layout

    other = small_layout(row_bytes=(32, 48))
    assert other.slot_bytes == SLOT
    theirs = make_values(other, 8, alignment_bytes=PAGE)
    with tier_at(tmp_path / "theirs", context=context_for(other)) as tier:
        store(tier, *theirs)
    ours = _slabs(tmp_path / "ours")[0]
    foreign = _slabs(tmp_path / "theirs")[0]
    for suffix in (".slab", ".index"):
        shutil.copy(foreign.with_suffix(suffix), ours.with_suffix(suffix))
    with tier_at(tmp_path / "ours") as tier:
        assert [served(tier, value) for value in values] == [False] * 8 + [True] * 12
        assert not any(load(tier, value)[0].is_ok for value in theirs)


def test_strange_files_are_left_alone(tmp_path: Path, values: list[Value]) -> None:
    _filled(tmp_path, values)
    folder = _slabs(tmp_path)[0].parent
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "flexkv1-not-ours").mkdir()
    with tier_at(tmp_path) as tier:
        assert all(served(tier, value) for value in values)
    assert (folder / "notes.txt").read_text() == (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "flexkv1-not-ours").is_dir()


def test_killed_before_the_record(tmp_path: Path, values: list[Value]) -> None:
    """The value is written, its record is not: as if it had never been stored."""
    _filled(tmp_path, values[:3])
    with slab_at(_slabs(tmp_path)[0]) as slab:
        slab.write(5, values[4].view)
    with tier_at(tmp_path) as tier:
        assert load(tier, values[4])[0].status is Status.MISS
        assert tier.usage().num_blocks == 3


@pytest.mark.parametrize("newer", [1, 6])
def test_killed_between_the_new_record_and_the_old(tmp_path: Path, values: list[Value], newer: int) -> None:
    """Both records are there: the one with the higher number counts, the other slot is freed."""
    again = make_values(LAYOUT, 3, seed=1, alignment_bytes=PAGE)
    _filled(tmp_path, values[:3])
    old = spots(tmp_path)[values[1].key].record
    other = 6 if newer == 6 else 7
    with slab_at(_slabs(tmp_path)[0]) as slab:
        slab.write(other, again[1].view)
        sequence = old.sequence + (10 if newer == 6 else -1)
        slab.publish(other, Record(old.key, old.num_bytes, sequence, old.used_at))
    with tier_at(tmp_path) as tier:
        assert served(tier, again[1] if newer == 6 else values[1])
        assert tier.usage().num_blocks == 3
        assert tier.usage().used_bytes == 3 * SLOT
    assert len(spots(tmp_path)) == 3


def test_power_failure_in_mid_write(tmp_path: Path, values: list[Value]) -> None:
    """The record reached the disk and the value's second half did not."""
    _filled(tmp_path, values)
    spot = spots(tmp_path)[values[0].key]
    poke(spot, bytes(aligned_buffer(PAGE)), at=PAGE)
    with tier_at(tmp_path) as tier:
        assert not served(tier, values[0])
