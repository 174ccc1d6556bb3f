"""What ``import flexkv_core`` brings into a fresh process, and what it must not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.waiting import CHILD_S

HEAVY = (
    *("torch", "numpy", "redis", "boto3", "botocore", "sglang", "yaml", "pytest", "hypothesis"),
    *("flexkv_driver_cpu", "flexkv_driver_ssd", "flexkv_driver_remote_redis", "flexkv_driver_s3"),
    *("flexkv_sglang", "flexkv_core.testing", "flexkv_core.cli", "multiprocessing", "asyncio"),
)


def loaded_after(statements: str) -> set[str]:
    """Which of HEAVY are loaded when a fresh process has run ``statements``."""
    code = f"import sys, json\n{statements}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_core_is_light():
    assert loaded_after("import flexkv_core") == set()


def test_chain_and_manager_are_light():
    assert loaded_after("import flexkv_core.chain, flexkv_core.manager") == set()


def test_looking_at_the_installed_drivers_imports_none():
    assert loaded_after("from flexkv_core.drivers import installed_drivers; installed_drivers()") == set()


@pytest.mark.parametrize("name", ["cpu", "ssd", "remote_redis", "s3"])
def test_asking_for_a_driver_imports_its_hook_and_no_library(name):
    loaded = loaded_after(f"from flexkv_core.drivers import find_driver; find_driver({name!r})")
    assert loaded == {f"flexkv_driver_{name}"}


def test_simulation_parts_need_no_pytest():
    statements = "from flexkv_core.testing import MemoryTier, FaultTier, FakeDevice, FakeTransfer, make_value"
    assert loaded_after(statements) == {"flexkv_core.testing"}


def test_kit_is_there_when_it_is_asked_for():
    assert loaded_after("from flexkv_core.testing import TierTests, TransferTests, SyncTests") >= {"pytest"}


def test_command_line_is_light():
    assert loaded_after("import flexkv_core.cli as c; c.build_parser()") <= {"flexkv_core.cli"}
