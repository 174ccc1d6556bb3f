"""Opening: one owner, clear refusals, fall-backs, and options as people write them."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from flexkv_core import Status, TierAccessError, TierError, TierUnavailableError
from flexkv_core.drivers import find_driver
from flexkv_core.testing import make_values
from flexkv_driver_ssd.config import SsdConfig
from tests.support.ssd_disk import LAYOUT, SLOT, load, served, store, tier_at
from tests.support.waiting import CHILD_S

from .conftest import Mount


def test_second_owner_is_refused_and_named(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        with pytest.raises(TierAccessError, match=f"in use by process {os.getpid()}") as caught:
            tier_at(tmp_path)
        assert str(tmp_path) in str(caught.value)
        assert not caught.value.retryable
        link = tmp_path / "link"
        link.symlink_to(tmp_path)
        with pytest.raises(TierAccessError, match="in use"):
            tier_at([tmp_path / "other", link])
        store(tier, *make_values(LAYOUT, 1))
    tier_at(tmp_path).close()


def race(root: str, count: int) -> None:
    """In a child: fork ``count`` processes that open ``root`` at once and hold it; print what each met."""
    go, told, end = os.pipe(), os.pipe(), os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            os.close(go[1])
            os.close(end[1])
            os.read(go[0], 1)
            os.write(told[1], _try_to_open(root).encode() + b"\n")
            os.read(end[0], 1)
            os._exit(0)
    os.close(go[1])
    with os.fdopen(told[0]) as lines:
        print("".join(sorted(next(lines) for _ in range(count))), end="")
    os.close(end[1])
    for _ in range(count):
        assert os.wait()[1] == 0


def _try_to_open(root: str) -> str:
    try:
        tier = tier_at(root)
    except TierAccessError as exc:
        return "in use" if "in use by process" in str(exc) else str(exc)
    return tier.store([bytes(32)], [memoryview(bytes(SLOT))])[0].status.value


def test_sixteen_processes_make_one_new_path(tmp_path: Path) -> None:
    root = tmp_path / "a new" / "path"
    code = f"from tests.drivers.ssd.test_open import race; race({str(root)!r}, 16)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=CHILD_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["in use"] * 15 + ["ok"]
    tier_at(root).close()


@pytest.mark.parametrize("where", ["the path", "a parent"])
def test_file_in_the_way(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" if where == "the path" else tmp_path / "file" / "kv"
    with pytest.raises(TierAccessError, match="in the way") as caught:
        tier_at(path)
    assert str(tmp_path / "file") in str(caught.value)


def test_second_directory_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierAccessError, match="in the way"):
        tier_at([tmp_path / "good", tmp_path / "file"])
    tier_at(tmp_path / "good").close()


def test_read_only_file_system(mount: Mount) -> None:
    root = mount("tmpfs", "size=1m,ro")
    with pytest.raises(TierAccessError, match=r"cannot be written.*Read-only"):
        tier_at(root)


def test_direct_io_refused(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    roots = [mount("ramfs"), mount("ramfs")]
    values = make_values(LAYOUT, 9)
    with caplog.at_level(logging.WARNING), tier_at(roots) as tier:
        assert [r.levelname for r in caplog.records] == ["WARNING"], "one line, not one a directory"
        assert "no direct I/O" in caplog.text
        assert all(o.is_ok for o in store(tier, *values))
        assert all(served(tier, value) for value in values)
        assert tier.capabilities.alignment_bytes == 4096
    with pytest.raises(TierAccessError, match="direct_io: auto"):
        tier_at(roots, direct_io="on")
    with tier_at(roots) as tier:
        assert all(served(tier, value) for value in values)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_written_direct_read_buffered_and_back(tmp_path: Path, mode: str) -> None:
    values = make_values(LAYOUT, 5)
    with tier_at(tmp_path, direct_io=mode) as tier:
        assert all(o.is_ok for o in store(tier, *values))
    with tier_at(tmp_path, direct_io="off" if mode == "auto" else "auto") as tier:
        assert all(served(tier, value) for value in values)


def test_too_few_descriptors(tmp_path: Path) -> None:
    value, *more = make_values(LAYOUT, 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tier_at(tmp_path, slab=1) as tier:
        store(tier, value)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        try:
            outcomes = store(tier, *more)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert {o.status for o in outcomes} == {Status.UNAVAILABLE}
        assert served(tier, value)
        assert all(o.is_ok for o in store(tier, *more))


def test_removed_directory_under_an_open_tier(tmp_path: Path) -> None:
    value, more = make_values(LAYOUT, 2)
    with tier_at(tmp_path / "kv", slab=1) as tier:
        store(tier, value)
        shutil.rmtree(tmp_path / "kv")
        assert served(tier, value)
        (outcome,) = store(tier, more)
        assert outcome.status is Status.UNAVAILABLE
        assert "the folder is gone" in outcome.reason
        assert load(tier, more)[0].status is Status.MISS
        with pytest.raises(TierUnavailableError):
            tier.check_health()


def test_healthy_tier_says_so(tmp_path: Path) -> None:
    with tier_at([tmp_path / "a", tmp_path / "b"]) as tier:
        tier.check_health()
        store(tier, *make_values(LAYOUT, 3))
        tier.check_health()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("/a", ["/a"]),
        (" /a ; /b b;", ["/a", "/b b"]),
        (["/a", "/b"], ["/a", "/b"]),
        (Path("/a"), ["/a"]),
        ("~/kv", [str(Path.home() / "kv")]),
    ],
)
def test_paths_as_people_write_them(written: object, read: list[str]) -> None:
    config = SsdConfig.model_validate({"path": written, "capacity": "2GiB"})
    assert [str(path) for path in config.path] == read
    assert config.capacity == 2 << 30


@pytest.mark.parametrize("path", ["", " ; ", [], "/a;/a", 7, [3], None])
def test_paths_that_are_none(path: object) -> None:
    with pytest.raises(ValidationError, match="path"):
        SsdConfig.model_validate({"path": path, "capacity": 1})


@pytest.mark.parametrize("option", [{"capcity": 1}, {"slab": 0}, {"direct_io": "yes"}, {"min_free": -1}])
def test_options_that_are_wrong(option: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(option))):
        SsdConfig.model_validate({"path": "/a", "capacity": 1, **option})


def test_what_must_stay_free_is_told_apart_from_what_it_takes() -> None:
    needs = SsdConfig.model_validate({"path": "/a;/b", "capacity": "4GiB", "min_free": "1GiB"}).needs()
    assert (needs.directories, needs.disk_bytes, needs.min_free_bytes) == (("/a", "/b"), 4 << 30, 1 << 30)


def test_the_driver_is_found_by_name() -> None:
    spec, _ = find_driver("ssd")
    assert (spec.name, spec.config) == ("ssd", SsdConfig)
    assert issubclass(TierUnavailableError, TierError)
