"""The real SGLang server as a child process: started with a deadline, stopped for certain."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from flexkv_core.errors import EngineError

from ._serving import HTTP_TIMEOUT_S, POLL_S, EngineClient

CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--mem-fraction-static", "0.9", "--skip-server-warmup"),
)
"""What a server on a CPU needs, beside ``--max-total-tokens``. Source: sglang 0.5.23, without AMX.

The fraction is of the memory that is free at the start, and a bound only: the tokens say how large the pool
is.  Where others take more than it while the weights load, SGLang ends, so it is not small.
"""

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # SGLang's torch_native attention computes rows of uninitialized queries and drops them. Where those
    # bytes happen to be denormal numbers, one layer takes 7 s instead of 0.1 s (3,094 tokens), and a prompt
    # of 320 tokens 12 s instead of 2. Blocks straight from the kernel are zero.
    # Source: sglang 0.5.23, attention/torch_native_backend.py.
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
}
"""Variables that a server on a CPU needs."""

TAIL_LINES = 25
_FIRST_PORT = 10_000
"""Below are those of well-known services."""

START_DEADLINE_S = 400.0
"""A start takes 12 to 15 s on two idle cores, and was seen to take 190 s on busy ones."""


class ServerProcess:
    """One server in a process group of its own, on 127.0.0.1, with its output in a file.

    Threads: the one that made it.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        on_wait: Callable[[], None] | None = None,
        timeout_s: float = HTTP_TIMEOUT_S,
    ) -> None:
        """Say what to start; ``start`` does it.

        Args:
            flags: Arguments of ``python -m sglang.launch_server``, without host and port.
            log: File for all that it prints; overwritten.
            environment: What to add to this process's environment.
            on_wait: Called now and then while somebody waits (progress).
            timeout_s: Longest silence in an answer of ``client``.
        """
        self.flags = tuple(flags)
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        self.port = free_port()
        self.client = EngineClient(f"127.0.0.1:{self.port}", timeout_s)
        self.startup_s = 0.0
        self._on_wait = on_wait or (lambda: None)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, deadline_s: float = START_DEADLINE_S) -> ServerProcess:
        """Start it and wait until it answers.

        Raises:
            EngineError: it ended, or did not answer in time; the message ends in the log's last lines.
        """
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *self.flags]
        began = time.monotonic()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(began + deadline_s)
        except BaseException:  # also an interrupt from the keyboard must leave no server behind
            self.kill()
            raise
        self.startup_s = time.monotonic() - began
        return self

    def _wait_until_ready(self, until: float) -> None:
        while not self.client.is_ready():
            if not self.is_alive():
                raise EngineError(f"the server ended with status {self._status()} at start{self._quoted()}")
            if time.monotonic() > until:
                raise EngineError(f"the server did not answer in time{self._quoted()}")
            self._on_wait()
            time.sleep(POLL_S)

    def is_alive(self) -> bool:
        """Whether its first process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self, deadline_s: float = 60.0) -> float:
        """Let it finish its work and end (SIGTERM), and end what is left after the deadline.

        Returns:
            The seconds that it took.
        """
        began = time.monotonic()
        if self.is_alive():
            assert self._process is not None
            self._process.terminate()
            while self.is_alive() and time.monotonic() - began < deadline_s:
                self._on_wait()
                time.sleep(POLL_S)
        self.kill()
        return time.monotonic() - began

    def kill(self) -> None:
        """End every process of the group at once (SIGKILL), as a crash would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log_text(self) -> str:
        """All that it has printed so far."""
        try:
            return self.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _status(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def _quoted(self) -> str:
        lines = self.log_text().splitlines()[-TAIL_LINES:]
        return f"; the end of {self.log}:\n" + "\n".join(f"  | {line}" for line in lines)

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def free_port(*beside: int) -> int:
    """A port of 127.0.0.1 that nobody uses now, nor those so far above it.

    It is below those that the kernel takes for outgoing connections: a server may listen a minute later, and
    nobody gets it by accident meanwhile.

    Raises:
        EngineError: there is none.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    above = (lowest if lowest > 2 * _FIRST_PORT else 65_536) - max(beside, default=0)
    chance = random.SystemRandom()
    for port in (chance.randrange(_FIRST_PORT, above) for _ in range(1000)):
        if all(_is_free(port + step) for step in (0, *beside)):
            return port
    raise EngineError("no free port on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
