"""A driver folder is self-contained: with a pyproject of its own it builds, installs and works."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.support.packages import ROOT, install, python

PROJECT = """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "flexkv-driver-{name}"
version = "9.9.9"
dependencies = ["flexkv-core"]
entry-points."flexkv.drivers".{name} = "flexkv_driver_{name}"

[tool.hatch.build.targets.wheel]
packages = ["flexkv_driver_{name}"]
"""

TEST = """\
import flexkv_driver_{name} as package
from flexkv_core.drivers import find_driver, open_tier
from flexkv_core.testing import TierTests

class Test{name}(TierTests):
    kills = 1

    def open_tier(self, context, medium):
        assert package.__file__.startswith({site!r}), package.__file__
        spec, offer = find_driver("{name}")
        options = spec.config(capacity=self.capacity_values * context.value_bytes, {options})
        return open_tier(spec, offer.provider, options, context)
"""

OPTIONS = {"cpu": "", "ssd": "path=str(medium), min_free=0, slab='64KiB'"}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", list(OPTIONS))
def test_driver_as_a_distribution_of_its_own(name, tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "drivers" / name, source, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "pyproject.toml").write_text(PROJECT.format(name=name))
    assert len(PROJECT.splitlines()) <= 13
    install(source, site)
    (tmp_path / "test_alone.py").write_text(TEST.format(name=name, site=str(site), options=OPTIONS[name]))
    told = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(tmp_path)),
        str(tmp_path / "test_alone.py"),
        cwd=tmp_path,
        path=f"{site}{os.pathsep}{ROOT}",
    )
    assert "passed" in told
