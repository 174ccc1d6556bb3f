"""Packages that tests build and install, without a network: pythons of their own do it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import CHILD_S

ROOT = Path(__file__).parents[2]


def require_hatchling() -> None:
    """Skip, with the reason, where nothing can be built."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed, and these tests use no network")


def python(*arguments: str, cwd: Path | None = None, path: str | None = None) -> str:
    """What ``python ARGUMENTS`` prints; it must succeed.  ``path``: its PYTHONPATH, if not this one's."""
    environment = dict(os.environ) if path is None else {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


def pip(verb: str, *arguments: str) -> None:
    """Run pip without network, build isolation or dependencies."""
    require_hatchling()
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    python("-m", "pip", "--disable-pip-version-check", verb, *options, *arguments)


def install(what: Path, into: Path) -> Path:
    """Install a wheel or a source tree into a folder; returns the folder."""
    pip("install", "--target", str(into), str(what))
    return into
