"""File systems of a test's own, where this machine lets us mount them; and nothing left behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexkv_core.testing.leaks import Snapshot

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """``mount("tmpfs", "size=8m")`` -> an empty directory that is such a file system."""
    mounted: list[Path] = []

    def at(kind: str, options: str = "") -> Path:
        if os.geteuid():
            pytest.skip("mounting needs root")
        path = tmp_path / f"{kind}{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", kind, *(["-o", options] if options else []), "flexkv-test", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield at
    for path in reversed(mounted):
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = Snapshot.take()
    yield
    assert before.wait_until_back() == []
