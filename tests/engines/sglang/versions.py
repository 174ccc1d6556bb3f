"""SGLang's versions on this machine, and scripts that run under one of them.

The installed one, those in folders of their own beside it, and those named in
``FLEXKV_SGLANG_TREES`` (folders that contain a package ``sglang``, separated like PATH).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flexkv_sglang import seam
from tests.support.server import SHIM

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


def run(version: str, script: str, *args: str, timeout_s: float = 240) -> Any:
    """Run a script of this folder under a version; what its last line of JSON says.

    An import of SGLang takes five seconds on an idle machine.
    """
    done = run_raw(version, [str(HERE / script), *args], timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_raw(version: str, args: list[str], timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run python under a version."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(SHIM), str(TREES[version]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
