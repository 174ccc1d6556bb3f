"""What several tests of the real server do: prompts, questions, and waiting for the disk."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._serving import Answer
from tests.support.models import VOCABULARY
from tests.support.server import ask
from tests.support.ssd_disk import spots
from tests.support.waiting import CHILD_S, wait_until

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
LAYERWISE = {"FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1"}


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
        with opener.open(request, timeout=CHILD_S) as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as exc:
        with exc:
            return dict(json.loads(exc.read()))


def update_weights(server: ServerProcess, folder: Path, **fields: object) -> bool:
    """Have it load other weights from a folder; whether it says that it did."""
    return bool(post(server, "/update_weights_from_disk", model_path=str(folder), **fields)["success"])


def verify(server: ServerProcess, phase: str, file: Path) -> subprocess.CompletedProcess[str]:
    """``flexkv verify`` of a server: ``baseline`` writes the file, ``test`` compares with it."""
    host = server.client.base_url.removeprefix("http://")
    command = ["verify", "--host", host, "--phase", phase, "--baseline-file", str(file)]
    return subprocess.run(
        [str(Path(sys.prefix) / "bin" / "flexkv"), *command],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )


def wait_for_blocks(disk: Path, count: int) -> None:
    """Wait until so many blocks can be read from a disk tier's folder, whoever has it open."""

    def are_there() -> bool:
        try:
            return len(spots(disk)) >= count
        except (OSError, struct.error):  # a file that is just being made
            return False

    wait_until(are_there, f"{count} blocks on the disk", CHILD_S)


def complaints(server: ServerProcess) -> list[str]:
    """Where the log speaks of broken accounting, a crash of the scheduler or a failed plug-in."""
    lines = server.log_text().splitlines()
    return [
        "\n".join(lines[n : n + 25]) for n, line in enumerate(lines) if any(sign in line for sign in SIGNS)
    ]


@dataclass(frozen=True)
class WithoutChain:
    """What a server without the chain says; it has ended.

    Attributes:
        baseline: The file of ``flexkv verify --phase baseline``.
        verified: How ``flexkv verify --phase test`` ended on that same server.
        prompts: Prompts, and
        answers: what it answers them with the other weights.
    """

    baseline: Path
    verified: subprocess.CompletedProcess[str]
    prompts: list[list[int]]
    answers: list[Answer]
