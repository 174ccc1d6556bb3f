"""A medium that fails in mid-work: an outcome for the key, the old value kept, no slot lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexkv_core import BufferState, Status
from flexkv_core.testing import make_values
from flexkv_driver_ssd.tier import SsdTier
from tests.support.ssd_disk import LAYOUT, SLOT, load, served, spots, store, tier_at


@contextmanager
def broken(tier: SsdTier, field: str, path: str, flags: int) -> Iterator[None]:
    """A descriptor of the first slab leads elsewhere meanwhile, where the kernel refuses."""
    (slab,) = tier._directories[0].slabs
    kept = getattr(slab, field)
    fd = os.open(path, flags)
    setattr(slab, field, fd)
    try:
        yield
    finally:
        setattr(slab, field, kept)
        os.close(fd)


@pytest.mark.parametrize("field", ["_fd", "_index_fd"])
@pytest.mark.parametrize(
    ("path", "status"), [("/dev/full", Status.NO_SPACE), ("/proc/self/status", Status.UNAVAILABLE)]
)
def test_store_that_fails(tmp_path: Path, field: str, path: str, status: Status) -> None:
    flags = os.O_WRONLY if path == "/dev/full" else os.O_RDONLY
    old, new = make_values(LAYOUT, 2), make_values(LAYOUT, 2, seed=1)
    with tier_at(tmp_path, slots=8) as tier:
        store(tier, old[0])
        with broken(tier, field, path, flags):
            for outcome in store(tier, *new):
                assert outcome.status is status
                assert "of slot" in outcome.reason
        assert served(tier, old[0])
        assert load(tier, old[1])[0].status is Status.MISS
        assert tier.usage().used_bytes == SLOT
        assert all(o.is_ok for o in store(tier, *make_values(LAYOUT, 8, seed=2))), "a slot was lost"


def test_load_that_fails(tmp_path: Path) -> None:
    first, second = make_values(LAYOUT, 2)
    with tier_at(tmp_path) as tier:
        store(tier, first, second)
        with broken(tier, "_fd", "/dev/null", os.O_WRONLY):
            outcome, _ = load(tier, first)
            assert (outcome.status, outcome.buffer) == (Status.UNAVAILABLE, BufferState.UNCERTAIN)
        with broken(tier, "_fd", "/dev/null", os.O_RDONLY):
            outcome, _ = load(tier, first)
            assert outcome.status is Status.CORRUPT
            assert "short read" in outcome.reason
        assert served(tier, first)


def test_evict_that_cannot_be_written_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The value is gone now; after a restart it may be back, which is harmless; it is said once."""
    first, second = make_values(LAYOUT, 2)
    with tier_at(tmp_path) as tier:
        store(tier, first, second)
        with (
            caplog.at_level(logging.WARNING),
            broken(tier, "_index_fd", "/proc/self/status", os.O_RDONLY),
        ):
            assert [o.status for o in tier.evict([first.key, second.key])] == [Status.OK] * 2
        assert len(caplog.records) == 1
        assert not served(tier, first)
        assert all(o.is_ok for o in store(tier, second))
    assert len(spots(tmp_path)) == 2
    with tier_at(tmp_path) as tier:
        assert served(tier, second)
        served(tier, first)
        assert tier.usage().num_blocks <= 2
