"""Installed distributions that are not: a folder with metadata and modules, put on the path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

GOOD_DRIVER = """
from pydantic import BaseModel, SecretStr
from flexkv_core import DriverSpec, hookimpl

class Inner(BaseModel):
    depth: int = 1

class Options(BaseModel):
    '''A stranger's model: pydantic's own settings, so unknown names would be dropped.'''
    url: str = "far://host"
    password: SecretStr | None = None
    size: int = 1
    inner: Inner = Inner()
    names: list[str] = []

@hookimpl
def flexkv_driver():
    return DriverSpec(name="{name}", api=(1, 0), config=Options, open="nowhere:open_tier")
"""


def add_distribution(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    name: str,
    *,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str],
    version: str = "1.0",
) -> None:
    """Make ``name`` look installed, until the test is over.

    Args:
        monkeypatch: Undoes it.
        folder: An empty folder for it.
        name: The distribution's name.
        entry_points: Group -> entry point -> target.
        modules: Module -> source.
        version: The distribution's version.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {target}" for key, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(folder))


def add_driver(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, source: str = GOOD_DRIVER) -> None:
    """Make a driver ``name`` look installed, from a distribution ``dist-<name>``."""
    module = f"module_of_{name}"
    add_distribution(
        monkeypatch,
        folder / name,
        f"dist-{name}",
        entry_points={"flexkv.drivers": {name: module}},
        modules={module: source.replace("{name}", name)},
    )
