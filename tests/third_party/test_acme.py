"""A stranger's driver: built from its own folder, installed beside the core, found, put through the kit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.packages import ROOT, install, python

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package's source away from the tree, and the folder that it is installed in."""
    source = tmp_path_factory.mktemp("acme") / "source"
    shutil.copytree(HERE / "flexkv_driver_acme", source, ignore=shutil.ignore_patterns("__pycache__"))
    return source, install(source, source.parent / "site")


def run(*arguments: str, site: Path, cwd: Path | None = None) -> str:
    return python(*arguments, cwd=cwd, path=os.pathsep.join([str(site), str(ROOT)]))


def test_it_is_found_with_its_distribution_and_version(installed):
    code = "from flexkv_core.drivers import find_driver as f; s, o = f('acme'); print(s.name, o.provider)"
    assert run("-c", code, site=installed[1]).strip() == "acme flexkv-driver-acme 0.3.0"


def test_it_passes_the_kit(installed):
    source, site = installed
    told = run("-m", "pytest", "-q", str(source / "tests"), site=site, cwd=source)
    assert "passed" in told
    assert "TestAcme: the tier's capabilities lack direct_slots: skipped" in told, (
        "the kit tells what it skipped"
    )


def test_it_needs_no_more_than_a_stranger_should():
    package = HERE / "flexkv_driver_acme"
    assert len((package / "flexkv_driver_acme" / "tier.py").read_text().splitlines()) <= 110
    assert len((package / "tests" / "test_acme.py").read_text().splitlines()) <= 25
