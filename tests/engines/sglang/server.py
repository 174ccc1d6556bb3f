"""What several tests of the real server do: prompts, questions, and waiting for the disk."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._serving import Answer
from tests.support.models import VOCABULARY
from tests.support.server import ask

READY = "[FlexKV] Connector ready"
SIGNS = (
    "memory leak detected",
    "double free",
    "Scheduler hit an exception",
    "Failed to load plugin",
    "Failed to execute general plugin",
    "Failed to apply hooks",
)
FLAGS = ("--radix-cache-backend", "flexkv")


def flags(chain: Path, *more: str) -> list[str]:
    """The flag and the file that switch the chain on."""
    return [*FLAGS, "--flexkv-config-file", str(chain), *more]


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens; another seed gives another first token with all but certainty."""
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def ask_after_flush(server: ServerProcess, tokens: Sequence[int], new: int = 8, **fields: object) -> Answer:
    """Complete a prompt that the device cannot know."""
    server.client.flush()
    return ask(server, tokens, new, **fields)


def post(server: ServerProcess, path: str, **body: object) -> dict[str, Any]:
    """What SGLang answers on one of its management paths, whatever the status."""
    request = urllib.request.Request(server.client.base_url + path, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as exc:
        with exc:
            return dict(json.loads(exc.read()))


def wait_for(is_so: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    """Try again until it is so."""
    until = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < until, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.1)


def wait_until_steady(folder: Path, deadline_s: float = 20.0) -> None:
    """Wait until nothing has been written below a folder for half a second."""
    until, quiet, before = time.monotonic() + deadline_s, 0, None
    while quiet < 10:
        assert time.monotonic() < until, f"{folder} is still being written"
        now = sorted((str(file), file.stat().st_blocks, file.stat().st_mtime_ns) for file in _files(folder))
        quiet = quiet + 1 if now == before and now else 0
        before = now
        time.sleep(0.05)


def _files(folder: Path) -> list[Path]:
    """Files that still exist once they are looked at."""
    return [file for file in folder.rglob("*") if file.is_file()]


def complaints(server: ServerProcess) -> list[str]:
    """Where the log speaks of broken accounting, a crash of the scheduler or a failed plug-in."""
    lines = server.log_text().splitlines()
    return [
        "\n".join(lines[n : n + 25]) for n, line in enumerate(lines) if any(sign in line for sign in SIGNS)
    ]
