"""A stranger's driver: built from its own folder, installed beside the core, found, put through the kit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package's source away from the tree, and the folder that it is installed in."""
    if subprocess.run(
        [sys.executable, "-c", "import hatchling"], capture_output=True, check=False
    ).returncode:
        pytest.skip("hatchling is not installed, and these tests use no network")
    source = tmp_path_factory.mktemp("acme") / "source"
    shutil.copytree(HERE / "flexkv_driver_acme", source, ignore=shutil.ignore_patterns("__pycache__"))
    target = source.parent / "site"
    run(
        *("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--target", str(target), str(source)),
        site=None,
    )
    return source, target


def run(*arguments: str, site: Path | None, cwd: Path | None = None) -> str:
    path = os.pathsep.join([str(site), str(ROOT)]) if site else os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=cwd,
        env=dict(os.environ, PYTHONPATH=path),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


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
