"""The real SGLang server on the CPU, for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from flexkv_core.cli._process import CPU_ENVIRONMENT, CPU_FLAGS, ServerProcess
from flexkv_core.cli._serving import Answer
from tests.support.waiting import CHILD_S

SHIM = Path(__file__).parent / "sglang_cpu_shim"
NEWEST, OLDER = "0.5.23", "0.5.20"
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's own accounting of device slots: a leak or a double free ends the server."""


@dataclass(frozen=True)
class Setup:
    """What server to start.

    Attributes:
        model: Folder of the model.
        flags: Arguments added to those that a CPU needs.
        environment: Variables added to those that a CPU needs.
        version: SGLang's version; another than the installed one stands in the environment's folder.
        pool_tokens: Device slots for KV.
    """

    model: Path
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = NEWEST
    pool_tokens: int = 4096

    def process(self, log: Path) -> ServerProcess:
        """A server that is not started yet."""
        fixed = ["--model-path", str(self.model), *CPU_FLAGS, "--max-running-requests", "4"]
        fixed += ["--max-total-tokens", str(self.pool_tokens)]
        paths = [str(SHIM), *([str(older_sglang())] if self.version != NEWEST else [])]
        paths += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        environment = {
            **CPU_ENVIRONMENT,
            **STRICT,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",  # the models are tiny; threads that spin for work slow everything else
            **self.environment,
        }
        return ServerProcess([*fixed, *self.flags], log=log, environment=environment, timeout_s=CHILD_S)


StartServer = Callable[[Setup], AbstractContextManager[ServerProcess]]


def starter(logs: Path) -> StartServer:
    """A function that runs servers whose logs lie in a folder, numbered in order of starting.

    They are killed at the end: SGLang takes seconds for an orderly one, so a test asks for it (``stop``)
    where it is about that.
    """

    numbers = count()

    @contextmanager
    def start(setup: Setup) -> Iterator[ServerProcess]:
        server = setup.process(logs / f"server-{next(numbers)}.log").start(CHILD_S)
        try:
            yield server
        finally:
            server.kill()

    return start


def older_sglang() -> Path:
    """Where the older SGLang stands: a folder of its own in this environment."""
    return Path(sys.prefix) / f"sglang-{OLDER}"


def ask(server: ServerProcess, tokens: Sequence[int], new: int = 8, **fields: object) -> Answer:
    """Complete token ids with exactly ``new`` tokens."""
    return server.client.generate(tokens, new, ignore_eos=True, **fields)
