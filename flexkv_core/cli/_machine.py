"""``flexkv doctor``'s look at the machine: Python, packages, memory, limits, GPUs."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from ..memory import free_huge_page_bytes, memory_limits
from ..models import Needs
from ..units import format_bytes
from ._findings import Line, bad, doubtful, good

DISTRIBUTION = "flexkv-core"
OLDEST_PYTHON = (3, 10)
_SMALL_SHM = 1 << 30
_RESERVE_BYTES = 256 << 20
_GPU_DEADLINE_S = 120
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)\s*$")
_ASK_TORCH = """
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))
"""


def python_lines() -> Iterator[Line]:
    """Python's version, and that of each package that this distribution asks for."""
    version = platform.python_version()
    if sys.version_info[:2] >= OLDEST_PYTHON:
        yield good("python", f"{version} at {sys.executable}")
    else:
        yield bad("python", version, "install Python 3.10 or later")
    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield doubtful(
            DISTRIBUTION, "runs from source, not installed: no driver is found", "pip install -e ."
        )
        return
    yield good(DISTRIBUTION, metadata.version(DISTRIBUTION))
    for requirement in wanted:
        found = _REQUIREMENT.match(requirement)  # those of extras have a marker behind them
        if found:
            yield package_line(found[1], found[2])


def package_line(name: str, least: str) -> Line:
    """Whether package ``name`` is installed in version ``least`` or later; it is not imported."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return bad(name, "is not installed", f"pip install '{name}>={least}'")
    if _numbers(version) < _numbers(least):
        return bad(name, f"{version} is older than {least}", f"pip install '{name}>={least}'")
    return good(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def memory_lines(needs: Iterable[Needs], staging: int, ranks: int) -> Iterator[Line]:
    """Whether all pools of all ranks fit into this machine and its cgroup, together.

    Args:
        needs: What each tier takes in one engine process.
        staging: Further host memory of one engine process.
        ranks: Engine processes on this host.
    """
    tiers = list(needs)
    huge = ranks * sum(need.host_bytes for need in tiers if need.huge_pages)
    plain = ranks * (staging + sum(need.host_bytes for need in tiers if not need.huge_pages))
    share = f"{ranks} x {format_bytes(plain // ranks)}" if ranks > 1 else format_bytes(plain)
    for limit, available in memory_limits().items():
        found = f"the pools take {share}, the limit leaves {format_bytes(available)}"
        if plain + _RESERVE_BYTES > available:
            yield bad(f"memory ({limit})", found, _memory_mend(limit, available, ranks))
        else:
            yield good(f"memory ({limit})", found)
    yield huge_page_line(huge, free_huge_page_bytes())


def _memory_mend(limit: str, available: int, ranks: int) -> str:
    room = format_bytes(max(0, available - _RESERVE_BYTES) // ranks)
    raise_it = " or raise the container's memory limit" if limit == "cgroup" else ""
    return f"lower the host tiers' capacity to less than {room} a process{raise_it}"


def huge_page_line(wanted: int, free: int) -> Line:
    """Whether the reserved huge pages suffice."""
    found = f"{format_bytes(free)} reserved and free, {format_bytes(wanted)} wanted"
    if wanted <= free:
        return good("huge pages", found)
    return bad("huge pages", found, f"sysctl vm.nr_hugepages={-(-wanted >> 21)}, or huge_pages: false")


def shared_memory_line(path: str = "/dev/shm") -> Line:  # noqa: S108 - where Linux has it
    """The size of shared memory: our pools need none, an engine of several ranks does."""
    try:
        stat = os.statvfs(path)
    except OSError as exc:
        return doubtful("shared memory", f"{path}: {exc.strerror}", f"mount a tmpfs at {path}")
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{format_bytes(free)} of {format_bytes(size)} free at {path}"
    if size < _SMALL_SHM:
        mend = "run the container with --ipc=host or --shm-size=16g: engines of several ranks need it"
        return doubtful("shared memory", found, mend)
    return good("shared memory", found)


def memlock_line(pinned: int, limit: int | None, num_gpus: int) -> Line:
    """Whether the host pools may be pinned.

    Args:
        pinned: Bytes that one engine process pins.
        limit: The soft limit; None for unlimited.
        num_gpus: Without a GPU nothing is pinned.
    """
    if limit is None:
        return good("memlock", "unlimited")
    found = f"limit {format_bytes(limit)}, the pools of a process take {format_bytes(pinned)}"
    if limit >= pinned or not num_gpus:
        return good("memlock", found + ("" if num_gpus else "; nothing is pinned without a GPU"))
    mend = "ulimit -l unlimited, or --ulimit memlock=-1 --cap-add IPC_LOCK for a container"
    return doubtful("memlock", found, mend)


def gpus() -> list[str] | str:
    """The GPUs' names as torch sees them, or why it cannot be asked.

    Asked in a child process: CUDA stays out of this one, and a driver that hangs is given up.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=_GPU_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"torch did not answer within {_GPU_DEADLINE_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"torch ended with status {done.returncode}"])[-1]
    return [str(name) for name in json.loads(done.stdout.splitlines()[-1])]


def gpu_line(found: list[str] | str) -> Line:
    """Whether torch sees a GPU."""
    if isinstance(found, str):
        return bad("gpu", found, "python -c 'import torch' must work")
    if found:
        return good("gpu", f"{len(found)}: {', '.join(sorted(set(found)))}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f"CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else "no driver, or torch without CUDA"
    return doubtful("gpu", f"none is visible ({why})", "nothing, for an engine on the CPU")
