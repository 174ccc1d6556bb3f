"""What a pool may take: it is refused, with the numbers, before it is allocated."""

from __future__ import annotations

import mmap
import os

import pytest

from flexkv_core import HostMemoryError, HostRegion, memory
from flexkv_core.memory import check_host_memory, free_huge_page_bytes, memory_limits


def test_this_machine_says_what_it_has():
    limits = memory_limits()
    assert limits["memory"] > 0
    assert all(value >= 0 for value in limits.values())


@pytest.mark.parametrize(
    ("line", "top", "limit", "usage", "prefix"),
    [
        ("0::/engines/one", "", "memory.max", "memory.current", ""),
        (
            "4:cpu,memory:/engines/one",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_",
        ),
    ],
)
def test_cgroups_above_the_own_one_count_and_cached_files_do_not(
    monkeypatch, tmp_path, line, top, limit, usage, prefix
):
    own = tmp_path / "own"
    own.write_text(f"9:name=systemd:/elsewhere\n{line}\n")
    monkeypatch.setattr(memory, "_OWN_CGROUPS", own)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    one = tmp_path / top / "engines" / "one"
    one.mkdir(parents=True)
    assert "cgroup" not in memory_limits(), "nothing limits it yet"

    def write(folder, allowed, used, cached=0):
        (folder / limit).write_text(f"{allowed}\n")
        (folder / usage).write_text(f"{used}\n")
        stat = f"{prefix}anon 7\n{prefix}inactive_file {cached}\n{prefix}active_file {cached}\n"
        (folder / "memory.stat").write_text(stat)

    write(one, 8 << 30, 7 << 30, cached=2 << 30)
    assert memory_limits()["cgroup"] == 5 << 30
    write(one.parent, 2 << 30, 1 << 30)
    assert memory_limits()["cgroup"] == 1 << 30, "the tightest of them"
    write(one.parent, 2 << 30, 3 << 30)
    assert memory_limits()["cgroup"] == 0
    write(one.parent, "max" if not prefix else 0x7FFFFFFFFFFFF000, 1 << 30)
    assert memory_limits()["cgroup"] == 5 << 30, "no limit there"


def test_a_container_that_sees_only_its_own_cgroup(monkeypatch, tmp_path):
    (tmp_path / "own").write_text("0::/../../pods/one\n")
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert memory_limits()["cgroup"] == 600_000


def test_names_that_are_no_utf8_and_lines_of_another_form(monkeypatch, tmp_path):
    (tmp_path / "own").write_bytes(b"\nno colons\n1:one\n0::/engine\xff\xe2\x80\xa8s\n")
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    own = tmp_path / os.fsdecode(b"engine\xff\xe2\x80\xa8s")
    own.mkdir()
    (own / "memory.max").write_text("1000000\n")
    (own / "memory.current").write_text("400000\n")
    assert memory_limits()["cgroup"] == 600_000


@pytest.mark.parametrize("limit", ["memory", "cgroup"])
def test_pool_that_cannot_fit_is_refused_with_the_numbers(monkeypatch, limit):
    limits = {"memory": 1 << 40, limit: 1 << 30}
    monkeypatch.setattr(memory, "memory_limits", lambda: limits)
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: pytest.fail("allocated all the same"))
    with pytest.raises(HostMemoryError, match=f"2,147,483,648 B.*{limit} limit leaves 1,073,741,824 B") as e:
        HostRegion(2 << 30)
    assert (e.value.needed_bytes, e.value.available_bytes, e.value.limit) == (2 << 30, 1 << 30, limit)


def test_some_memory_stays_free(monkeypatch):
    monkeypatch.setattr(memory, "memory_limits", lambda: {"memory": 1 << 30})
    check_host_memory((1 << 30) - (256 << 20))
    with pytest.raises(HostMemoryError):
        check_host_memory((1 << 30) - (256 << 20) + 1)


def test_huge_pages_that_are_not_reserved_are_refused():
    needed = free_huge_page_bytes() + (4 << 20)
    with pytest.raises(HostMemoryError, match="vm.nr_hugepages=") as e:
        HostRegion(needed, huge_pages=True)
    assert e.value.limit == "huge pages"
    assert e.value.needed_bytes == needed
