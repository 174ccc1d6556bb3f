"""moto's S3 server as a process of its own on loopback; run as a module, it is that process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class MotoServer:
    """A running server; knows no keys, so it takes any."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.s3_moto"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the moto server did not start"
        self.endpoint = f"http://127.0.0.1:{int(line)}"

    def close(self) -> None:
        """Its standard input ends, and so does it."""
        self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that listens, but answers nobody: a black hole."""
    os.kill(pid, signal.SIGSTOP)
    try:
        give_up = time.monotonic() + 10
        while not _all_stand(pid):  # a thread on another processor may answer once more
            assert time.monotonic() < give_up, f"process {pid} was stopped and runs"
            time.sleep(0.001)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _all_stand(pid: int) -> bool:
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # one of its threads has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def main() -> None:
    """Serve until standard input ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each answer waits for a delayed acknowledgement

        def log(self, *_args: object) -> None:
            pass

    app = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = (
        threading.Lock()
    )  # moto's store is not safe under threads: two writers of one key, and 500

    def serve(environ: Any, start_response: Any) -> Any:
        with one_at_a_time:
            return app(environ, start_response)

    server = make_server("127.0.0.1", 0, serve, threaded=True, request_handler=Handler)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
