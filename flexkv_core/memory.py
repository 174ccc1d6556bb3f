"""Host memory that this machine, container and process leave for a pool.

Threads: any; nothing is kept.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import HostMemoryError

HUGE_PAGE_BYTES = 2 << 20
_RESERVE_BYTES = 256 << 20
"""Left free of what a limit allows: the process needs more than the pool."""
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60


def _read_int(path: str | Path) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def memory_limits() -> dict[str, int]:
    """Bytes that this process may still take, by the limit that says so (``memory``, ``cgroup``)."""
    limits: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits["memory"] = int(line.split()[1]) * 1024
    except OSError:
        limits["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    groups = [left for folder in _cgroup_folders() if (left := _left_in_cgroup(folder)) is not None]
    if groups:
        limits["cgroup"] = min(groups)
    return limits


def _cgroup_folders() -> Iterator[Path]:
    """The memory cgroups that may limit this process: its own, and all above it.

    A container may see only its own part of the tree, and that at the top: folders that are not there
    limit nothing, and the top is always looked at.
    """
    try:
        lines = os.fsdecode(_OWN_CGROUPS.read_bytes()).split("\n")  # names need be no text
    except OSError:
        lines = []
    own = {_CGROUPS: "", _CGROUPS / "memory": ""}
    for line in lines:
        _, *rest = line.split(":", 2)
        if len(rest) < 2:
            continue
        controllers, path = rest
        if not controllers:  # version 2
            own[_CGROUPS] = path
        elif "memory" in controllers.split(","):
            own[_CGROUPS / "memory"] = path
    for top, path in own.items():
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:length])


def _left_in_cgroup(folder: Path) -> int | None:
    """Bytes that a cgroup may still take, file pages that the kernel would drop included; None: no limit."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        allowed, used = _read_int(folder / limit), _read_int(folder / usage)
        if allowed is not None and used is not None and allowed < _UNLIMITED:
            # As MemAvailable counts: what was read of files, such as a model's weights, makes way.
            kept = (f"{prefix}inactive_file", f"{prefix}active_file")
            return max(0, allowed - used + _sum_of_stat(folder / "memory.stat", kept))
    return None


def _sum_of_stat(path: Path, names: Sequence[str]) -> int:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names)


def free_huge_page_bytes() -> int:
    """Bytes in reserved and free huge pages of 2 MiB."""
    free = _read_int("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return (free or 0) * HUGE_PAGE_BYTES


def memlock_limit_bytes() -> int | None:
    """How much this process may lock; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def check_host_memory(needed_bytes: int, *, huge_pages: bool = False) -> None:
    """Refuse a pool that cannot fit, before it is allocated.

    Raises:
        HostMemoryError: with the numbers, the limit's name, and what to change.
    """
    if huge_pages:
        free = free_huge_page_bytes()
        if needed_bytes > free:
            raise HostMemoryError(
                f"the host pool asks for {needed_bytes:,} B of huge pages, {free:,} B are reserved "
                f"and free: reserve them (sysctl vm.nr_hugepages={-(-needed_bytes // HUGE_PAGE_BYTES)})"
                " or set huge_pages: false",
                needed_bytes=needed_bytes,
                available_bytes=free,
                limit="huge pages",
            )
        return
    for name, available in memory_limits().items():
        room = max(0, available - _RESERVE_BYTES)
        if needed_bytes > room:
            raise HostMemoryError(
                f"the host pool asks for {needed_bytes:,} B, but the {name} limit leaves "
                f"{available:,} B (of which {_RESERVE_BYTES:,} B stay free): lower the tier's capacity",
                needed_bytes=needed_bytes,
                available_bytes=available,
                limit=name,
            )
