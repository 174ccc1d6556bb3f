"""Ceph's RADOS Gateway on loopback, as a real S3 server for the tests; see the script beside this."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexkv_core.cli._process import free_port
from tests.support.waiting import CHILD_S

SCRIPT = Path(__file__).with_name("ceph-rgw")
_NEEDS = ("ceph", "ceph-mon", "ceph-osd", "ceph-mgr", "radosgw", "radosgw-admin", "curl")


@dataclass(frozen=True)
class Gateway:
    """A running gateway and a user's keys."""

    endpoint: str
    access: str
    secret: str


def missing_programs() -> list[str]:
    """What would have to be installed for a gateway."""
    return [name for name in _NEEDS if shutil.which(name) is None]


@contextmanager
def ceph_gateway() -> Iterator[Gateway]:
    """A gateway; skips, with the reason, where Debian's packages are not installed."""
    if missing := missing_programs():
        pytest.skip(
            f"no {', '.join(missing)}: apt-get install -y --no-install-recommends "
            "ceph-mon ceph-osd ceph-mgr radosgw ceph-common curl"
        )
    # A short path: the daemons' sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="rgw") as place:
        try:
            done = subprocess.run(
                ["bash", str(SCRIPT), "start", place, str(free_port(1, 2))],
                capture_output=True,
                text=True,
                timeout=CHILD_S,
                check=False,
            )
            if done.returncode != 0:
                pytest.fail(f"the gateway did not start: {done.stderr[-2000:]}")
            facts = dict(re.findall(r"(\w+)=(\S+)", done.stdout))
            yield Gateway(facts["S3_ENDPOINT"], facts["AWS_ACCESS_KEY_ID"], facts["AWS_SECRET_ACCESS_KEY"])
        finally:
            subprocess.run(["bash", str(SCRIPT), "stop", place], timeout=CHILD_S, check=False)
