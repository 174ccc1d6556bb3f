"""For every test: hypothesis profiles, and a look at what is left behind.

The quick profile (default) is the same every time.  ``FLEXKV_TEST_HYPOTHESIS=thorough`` tries ten times
as many examples from a new seed, which is printed and can be given again with ``--hypothesis-seed``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from flexkv_core.testing.leaks import Snapshot
from tests.support.ceph_rgw import Gateway, ceph_gateway
from tests.support.packages import ROOT, pip
from tests.support.s3_moto import MotoServer
from tests.support.waiting import DEADLINE_S

_COMMON = {
    "deadline": None,  # a loaded machine is no failure; hangs end through faulthandler_timeout
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    "database": None,
}
settings.register_profile("quick", derandomize=True, max_examples=50, **_COMMON)
settings.register_profile("thorough", max_examples=500, **_COMMON)
PROFILE = os.environ.get("FLEXKV_TEST_HYPOTHESIS", "quick")
settings.load_profile(PROFILE)


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's mark; draw the thorough profile's seed here, so that it can be told."""
    config.addinivalue_line("markers", "leaves_running: what it starts is ended by a later test or fixture")
    if PROFILE == "thorough" and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))


def pytest_report_header(config: pytest.Config) -> str:
    """Tell profile and seed before the first test."""
    seed = config.getoption("hypothesis_seed", None)
    how = f"--hypothesis-seed={seed}" if seed is not None else "derandomized"
    return f"hypothesis profile {PROFILE} ({how}; FLEXKV_TEST_HYPOTHESIS=quick|thorough)"


def _is_exempt(request: pytest.FixtureRequest) -> bool:
    # A server shared by a module outlives its first test; the last one's fixture looks after it.
    return any(request.node.get_closest_marker(name) for name in ("server", "gpu", "leaves_running"))


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, descriptors or child processes."""
    if _is_exempt(request):
        yield
        return
    before = Snapshot.take()
    yield
    left = before.wait_until_back(DEADLINE_S)
    if left:
        pytest.fail(f"left behind by {request.node.nodeid}: {left}", pytrace=False)


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    """moto's S3 server; whoever uses it makes a bucket of its own."""
    with closing(MotoServer()) as server:
        yield server


@pytest.fixture(scope="session")
def ceph() -> Iterator[Gateway]:
    """Ceph's S3 gateway, which takes many seconds to start; whoever uses it makes a bucket of its own."""
    with ceph_gateway() as gateway:
        yield gateway


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project's wheel, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", str(folder), str(ROOT))
    (path,) = folder.glob("*.whl")
    return path
