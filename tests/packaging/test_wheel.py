"""The built wheel, not the tree: what is in it, what is not, and that it works where nothing else is."""

from __future__ import annotations

import zipfile
from configparser import ConfigParser

import pytest

from tests.support.packages import ROOT, install, python

MOST_BYTES = 600_000
"""Sources only, as text: what is larger carries something that does not belong there."""

pytestmark = pytest.mark.slow


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
    site = install(wheel, tmp_path / "site")
    code = (
        "import flexkv_core, flexkv_core.drivers as d\n"
        f"assert flexkv_core.__file__.startswith({str(tmp_path)!r}), flexkv_core.__file__\n"
        "from flexkv_core.testing import TierTests\n"
        "print(d.find_driver('cpu')[1].provider)"
    )
    assert python("-c", code, cwd=tmp_path, path=str(site)).startswith("flexkv-core ")
