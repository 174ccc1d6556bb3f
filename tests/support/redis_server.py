"""Real redis-servers on loopback, and a proxy that misbehaves between them and a client."""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from flexkv_core.cli import _process
from tests.support.child import stopped
from tests.support.waiting import DEADLINE_S, wait_until


def key(number: int) -> bytes:
    """A block key."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def name(number: int) -> bytes:
    """What the driver calls it at the server, with the default prefix."""
    return b"flexkv:" + key(number).hex().encode()


def value(number: int, num_bytes: int = 1 << 20) -> memoryview:
    """Bytes to keep under it."""
    return memoryview(random.Random(number).randbytes(num_bytes))


def buffer(num_bytes: int = 1 << 20) -> memoryview:
    """Room to load into, filled so that an untouched byte shows."""
    return memoryview(bytearray(b"\xa5" * num_bytes))


def require_redis() -> None:
    """Skip, with the reason, where no server is installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")


def free_port() -> int:
    """A port that nobody uses; a cluster takes it + 10000 too."""
    return _process.free_port(10_000)


@contextmanager
def closed_port() -> Iterator[int]:
    """A port where nobody listens, and nobody can begin to: it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


class RedisServer:
    """One server: on a Unix socket, and on TCP where a port is given."""

    def __init__(self, folder: Path, *options: str, port: int = 0, probe: dict[str, object] | None = None):
        """Start it.  ``probe``: what a client needs beside the socket's path to say PING."""
        require_redis()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port
        self.path = folder / "sock"
        self._options = options
        self._probe = probe or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def unix_url(self) -> str:
        return f"unix://{self.path}"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self, *more: str) -> None:
        """Start it, or start it again, with further options."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.path), "--dir", str(self.folder), "--save", ""]
        command += ["--logfile", "log", *self._options, *more]
        self._process = subprocess.Popen(command, cwd=self.folder)
        wait_until(self._answers, f"redis-server in {self.folder} answers")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            log = self.folder / "log"
            raise AssertionError(f"redis-server ended: {log.read_text()[-2000:] if log.exists() else ''}")
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.BusyLoadingError:
            return True
        except redis.ConnectionError:
            return False

    def client(self, path: Path | None = None) -> redis.Redis:
        """A client behind the driver's back."""
        options = {"protocol": 2, "socket_timeout": DEADLINE_S, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis(unix_socket_path=str(path or self.path), **options, **self._probe)

    def ask(self, *command: object) -> object:
        with self.client() as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        """SIGKILL, as when the machine goes."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._process = None

    def paused(self) -> AbstractContextManager[None]:
        """A black hole: connections are taken by the kernel, nothing is answered."""
        assert self._process is not None
        return stopped(self._process.pid)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """Connections are closed and new ones refused; what is stored stays."""
        hidden = self.path.rename(self.path.with_suffix(".away"))
        try:
            with self.client(hidden) as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            yield
        finally:
            hidden.rename(self.path)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Proxy:
    """TCP in front of a server's Unix socket.

    Attributes:
        reply_limit: Bytes of replies after which both ends are closed; None for no limit.
        pace_s: Pause before each further KiB of replies; 0 for none.
        resets: Whether the client's end is reset (RST) instead of closed in good order.
        num_connections: How many were taken.
        num_replied: Bytes of replies that were passed on.
        num_asked: How many pieces of requests were passed on, of up to 64 KiB each.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="proxy-accept")]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.reply_limit: int | None = None
        self.pace_s = 0.0
        self.resets = False
        self.num_connections = 0
        self.num_replied = 0
        self.num_asked = 0
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut_idle(self) -> None:
        """Close every connection from the server's side."""
        for near, far in self._pairs:
            for end in (near, far):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Replies come at 20 kB/s."""
        self.pace_s = 0.05
        yield
        self.pace_s = 0.0

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Connections end in the middle of the first value."""
        self.reply_limit = 512
        self.cut_idle()
        yield
        self.reply_limit = None

    def _accept(self) -> None:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                self._connect(self._listener.accept()[0])

    def _connect(self, near: socket.socket) -> None:
        self.num_connections += 1
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(str(self._target))
        except OSError:
            near.close()
            far.close()
            return
        self._pairs.append((near, far))
        for work in (self._requests, self._replies):
            thread = threading.Thread(target=work, args=(near, far), name="proxy-pump")
            self._threads.append(thread)
            thread.start()

    def _requests(self, near: socket.socket, far: socket.socket) -> None:
        near.settimeout(0.05)
        while not self._stop.is_set():
            try:
                data = near.recv(65536)
                if not data:
                    break
                self.num_asked += 1
                far.sendall(data)
            except TimeoutError:
                continue
            except OSError:
                break
        with suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)

    def _replies(self, near: socket.socket, far: socket.socket) -> None:
        """Owns both sockets: closes them at the end."""
        sent = 0
        try:
            while not self._stop.is_set():
                data = far.recv(1024 if self.pace_s else 65536)
                if not data:
                    break
                if self.pace_s:
                    self._stop.wait(self.pace_s)
                if self.reply_limit is not None:
                    data = data[: self.reply_limit - sent]
                near.settimeout(DEADLINE_S)
                near.sendall(data)
                near.settimeout(0.05)
                sent += len(data)
                self.num_replied += len(data)
                if self.reply_limit is not None and sent >= self.reply_limit:
                    break
        except OSError:
            pass
        finally:
            if self.resets:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # A reader is woken in either case; reading off an end says nothing to the other side.
            for end, how in (
                (near, socket.SHUT_RD if self.resets else socket.SHUT_RDWR),
                (far, socket.SHUT_RDWR),
            ):
                with suppress(OSError):
                    end.shutdown(how)
                end.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:  # the first one, which may add to them, first
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        self._listener.close()
