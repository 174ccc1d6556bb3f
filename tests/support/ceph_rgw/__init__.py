"""Ceph's RADOS Gateway on loopback, as a real S3 server for the tests; see the script beside this."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ceph-rgw")
_NEEDS = ("ceph", "ceph-mon", "ceph-osd", "ceph-mgr", "radosgw", "radosgw-admin", "curl")


@dataclass(frozen=True)
class Gateway:
    """A running gateway and a user's keys."""

    endpoint: str
    access: str
    secret: str


@contextmanager
def ceph_gateway() -> Iterator[Gateway]:
    """A gateway; skips, with the reason, where Debian's packages are not installed."""
    missing = [name for name in _NEEDS if shutil.which(name) is None]
    if missing:
        pytest.skip(
            f"no {', '.join(missing)}: apt-get install -y --no-install-recommends "
            "ceph-mon ceph-osd ceph-mgr radosgw ceph-common curl"
        )
    # A short path: the daemons' sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="rgw") as place:
        try:
            done = subprocess.run(
                ["bash", str(SCRIPT), "start", place, str(_free_ports())],
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
            if done.returncode != 0:
                pytest.fail(f"the gateway did not start: {done.stderr[-2000:]}")
            facts = dict(re.findall(r"(\w+)=(\S+)", done.stdout))
            yield Gateway(facts["S3_ENDPOINT"], facts["AWS_ACCESS_KEY_ID"], facts["AWS_SECRET_ACCESS_KEY"])
        finally:
            subprocess.run(["bash", str(SCRIPT), "stop", place], timeout=60, check=False)


def _free_ports() -> int:
    """The first of three neighbouring ports that are free now."""
    for _ in range(50):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 65000 and all(_is_free(port + step) for step in range(3)):
            return port
    raise AssertionError("no three free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
