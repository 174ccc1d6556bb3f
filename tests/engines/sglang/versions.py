"""SGLang's versions on this machine, and scripts that run under one of them.

The installed one, those in folders of their own beside it, and those named in
``FLEXKV_SGLANG_TREES`` (folders that contain a package ``sglang``, separated like PATH).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from flexkv_sglang import seam
from tests.support.server import SHIM
from tests.support.waiting import CHILD_S

HERE = Path(__file__).parent


def trees() -> dict[str, Path]:
    """Version -> folder that contains ``sglang``; the installed one first."""
    folders = sorted(Path(sys.prefix).glob("sglang-*"))
    folders += [Path(p) for p in os.environ.get("FLEXKV_SGLANG_TREES", "").split(os.pathsep) if p]
    installed = seam.installed_root()
    roots = ([installed] if installed else []) + [folder / "sglang" for folder in folders]
    found: dict[str, Path] = {}
    for root in roots:
        if (root / "srt").is_dir():
            found.setdefault(seam.Surface(root).version, root.parent)
    return found


TREES = trees()


class Imported:
    """A process that has imported a version, and runs scripts in forks of itself (``imported.py``)."""

    def __init__(self, version: str) -> None:
        """Start it, without waiting."""
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "imported.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(version),
            start_new_session=True,
        )

    def run(self, version: str, args: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """``python ARGS`` in a child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"args": args, "env": _environment(version), "cwd": os.getcwd()}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout_s), f"not within {timeout_s:.0f} s: {args}"
        answer = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(args, answer["rc"], answer["out"], answer["err"])

    def close(self) -> None:
        """End it, and what it may be running."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


RUNNING: dict[str, Imported] = {}
"""By version; the fixture ``imported`` fills it."""


def run(version: str, script: str, *args: str, timeout_s: float = CHILD_S) -> Any:
    """Run a script of this folder under a version; what its last line of JSON says."""
    done = run_script(version, [str(HERE / script), *args], timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_script(version: str, args: list[str], timeout_s: float = CHILD_S) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGS`` under a version, SGLang already imported where the fixture ``imported`` is used."""
    if version in RUNNING:
        return RUNNING[version].run(version, args, timeout_s)
    return run_raw(version, args, timeout_s)


def run_raw(version: str, args: list[str], timeout_s: float = CHILD_S) -> subprocess.CompletedProcess[str]:
    """Run a fresh python under a version."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=_environment(version),
        check=False,
    )


def _environment(version: str) -> dict[str, str]:
    paths = [str(SHIM), str(TREES[version]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
