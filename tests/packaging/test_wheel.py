"""The built wheel, not the tree: what is in it, what is not, and that it works where nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 600_000
"""Sources only, as text: what is larger carries something that does not belong there."""

pytestmark = pytest.mark.slow


def pip(*arguments: str, env: dict[str, str] | None = None) -> None:
    """Run pip without network, build isolation or dependencies: hatchling must be installed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        command[:5] + options + command[5:],
        capture_output=True,
        text=True,
        timeout=300,
        env=env or dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if subprocess.run(
        [sys.executable, "-c", "import hatchling"], capture_output=True, check=False
    ).returncode:
        pytest.skip("hatchling is not installed, and these tests use no network")
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", str(ROOT), "--wheel-dir", str(folder))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def packages():
    """Every package of the tree, which the wheel must hold."""
    found = [ROOT / "flexkv_core", *ROOT.glob("drivers/*/flexkv_driver_*"), *ROOT.glob("engines/*/flexkv_*")]
    return sorted(path for path in found if (path / "__init__.py").exists())


def test_every_module_of_every_package_is_in(names):
    for folder in packages():
        for path in folder.rglob("*.py"):
            assert str(path.relative_to(folder.parent)) in names
        assert f"{folder.name}/py.typed" in names


def test_kit_is_in_and_tests_are_not(names):
    assert "flexkv_core/testing/tier_tests.py" in names
    for name in names:
        assert name.split("/")[0] in {p.name for p in packages()} or ".dist-info/" in name, name
        assert not name.endswith((".so", ".c", ".cu", ".pyc")), f"compiled or to be compiled: {name}"


def test_small(wheel):
    assert wheel.stat().st_size < MOST_BYTES


def test_entry_points(wheel, names):
    parser = ConfigParser()
    (name,) = [name for name in names if name.endswith("entry_points.txt")]
    with zipfile.ZipFile(wheel) as archive:
        parser.read_string(archive.read(name).decode())
    drivers = {
        path.name.removeprefix("flexkv_driver_"): path.name for path in packages() if "driver" in path.name
    }
    assert dict(parser["flexkv.drivers"]) == drivers
    assert parser["sglang.srt.plugins"]["flexkv"] == "flexkv_sglang.register:register"
    assert parser["console_scripts"]["flexkv"] == "flexkv_core.cli:main"


def test_licence_is_in(names):
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_wheel_works_away_from_the_tree(wheel, tmp_path):
    pip("install", str(wheel), "--target", str(tmp_path / "site"))
    code = (
        "import flexkv_core, flexkv_core.drivers as d\n"
        f"assert flexkv_core.__file__.startswith({str(tmp_path)!r}), flexkv_core.__file__\n"
        "from flexkv_core.testing import TierTests\n"
        "print(d.find_driver('cpu')[1].provider)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(tmp_path / "site")),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("flexkv-core ")
