"""The demonstration's own Redis: a ``redis-server`` on 127.0.0.1, to be killed and started again.

It keeps what it has in a file, so that blocks outlive a kill.  Spoken to by hand: a demonstration
needs two commands, not a client library.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from flexkv_core.errors import EngineError

from ._process import TAIL_LINES, free_port
from ._serving import POLL_S

PROGRAM = "redis-server"
HOW_TO_GET = f"no {PROGRAM} on this machine (Debian and Ubuntu: apt-get install {PROGRAM})"
START_DEADLINE_S = 60.0
REPLY_DEADLINE_S = 5.0
FLAGS = (
    *("--bind", "127.0.0.1", "--save", "", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"),
    # The kernel has every write at once, so what was stored survives a kill of the process.
    *("--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0"),
)


def program() -> str | None:
    """Where ``redis-server`` is; None where it is not installed."""
    return shutil.which(PROGRAM)


class RedisProcess:
    """One server, in a folder of its own.

    Threads: the one that made it.
    """

    def __init__(self, command: str, folder: Path, on_wait: Callable[[], None] = lambda: None) -> None:
        """Say where it lives; ``start`` starts it.  ``on_wait`` is called now and then (progress)."""
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._command = command
        self._folder = folder
        self._on_wait = on_wait
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again, and wait until it has its blocks.

        Raises:
            EngineError: it ended, or did not answer in time; the message ends in the log's last lines.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / "redis.log"
        command = [self._command, "--port", str(self.port), "--dir", str(self._folder), *FLAGS]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_ready(log)
        except BaseException:  # also an interrupt from the keyboard must leave no server behind
            self.kill()
            raise

    def _wait_until_ready(self, log: Path) -> None:
        assert self._process is not None
        until = time.monotonic() + START_DEADLINE_S
        while self._ask("PING") != "+PONG":  # while it reads its file it says -LOADING
            if self._process.poll() is not None or time.monotonic() > until:
                tail = "\n".join(f"  | {line}" for line in log.read_text().splitlines()[-TAIL_LINES:])
                raise EngineError(f"{PROGRAM} did not start; the end of {log}:\n{tail}")
            self._on_wait()
            time.sleep(POLL_S)

    def num_blocks(self) -> int:
        """How many values it has; 0 while it does not answer."""
        reply = self._ask("DBSIZE")
        return int(reply[1:]) if reply.startswith(":") else 0

    def kill(self) -> None:
        """End it at once (SIGKILL), as when its machine goes; may be called twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: str) -> str:
        """The first line of the reply to a command; empty if there is none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), REPLY_DEADLINE_S) as connection:
                connection.sendall(f"{command}\r\n".encode())
                return connection.makefile("rb").readline().decode(errors="replace").strip()
        except OSError:
            return ""

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
