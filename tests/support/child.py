"""Servers in processes of their own: a module of the tests, and any of them made to stand still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


class ChildServer:
    """A running module, which prints its endpoint as its first line, and ends with its standard input."""

    def __init__(self, module: str) -> None:
        """Start it, and wait for that line."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().decode().strip()
        assert self.endpoint, f"{module} did not start"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that listens, but answers nobody: a black hole.  It may be killed meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        # A thread on another processor may answer once more.
        wait_until(lambda: _all_stand(pid), f"process {pid} stands, which was stopped")
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _all_stand(pid: int) -> bool:
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # one of its threads has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
