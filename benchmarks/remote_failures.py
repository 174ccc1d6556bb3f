"""How long a prompt waits for its first token when the remote store fails under load.

    python -m benchmarks.remote_failures [--requests 16] [--clients 2] [--tokens 320] [--deadline 1.0]

The real SGLang on the CPU (SmolLM2-135M) over a small CPU tier and a Redis, beside the plain radix cache.
Clients ask one after the other: prompts that come again (they are in Redis, and no longer nearer), and new
ones.  In the middle of each mode's requests the Redis is left alone, killed (SIGKILL), stopped (SIGSTOP, so
that it answers nobody), or slowed by a proxy through which a block takes four times the deadline.  Every
mode's requests go to the plain server as well, right before; the server that is not asked stands still.

The rule: no request is slower than its recompute and the configured deadline.  Recompute is what the plain
server took, at its slowest, for the same requests under the same load.  Status 3 if the rule is broken, 2 if
it could not be tried.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flexkv_core.cli._demo_model import is_complete, token_bytes, write_smollm2
from flexkv_core.cli._demo_redis import HOW_TO_GET, RedisProcess, program
from flexkv_core.cli._process import CPU_ENVIRONMENT, CPU_FLAGS, ServerProcess
from flexkv_core.cli._serving import Answer

ROOT = Path(__file__).resolve().parents[1]
SHIM = ROOT / "tests" / "support" / "sglang_cpu_shim"
LOOKUP_WAIT_S = 0.05
CHAIN = """version: 1
tiers:
  - {{name: host, driver: cpu, options: {{capacity: {host}}}}}
  - name: far
    driver: remote_redis
    options: {{url: "{url}"}}
    load_deadline_s: {deadline}
    lookup_deadline_s: {deadline}
    breaker_failures: 2
    breaker_reset_s: 1
engine: {{lookup_wait_s: {lookup_wait}, log_transfers: false}}
"""
MODES = ("up", "killed", "stopped", "slowed")
POOL_PROMPTS = 6
"""Room on the device; a prompt that comes again does so after more than twice as many others."""
HOST_BLOCKS = 16
NUM_REPEATED = 8
NEW_TOKENS = 2
RECOVERY_DEADLINE_S = 60.0


class SlowProxy:
    """TCP before a server; each connection's replies come as fast as they can, or slowly.

    Attributes:
        is_slow: Which of the two; may be set at any time.
    """

    def __init__(self, port: int, target: int, slow_bytes_s: float) -> None:
        """Listen on ``port``, and pass everything to and from ``target``."""
        self.is_slow = False
        self._slow_bytes_s = slow_bytes_s
        self._target = target
        self._stop = threading.Event()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            with suppress(OSError):
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for source, sink, is_reply in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(target=self._pump, args=(source, sink, is_reply), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with suppress(OSError):
            while data := source.recv(16384 if is_reply and self.is_slow else 1 << 20):
                if is_reply and self.is_slow:
                    self._stop.wait(len(data) / self._slow_bytes_s)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break every connection, and stop listening."""
        self._stop.set()
        for end in [self._listener, *self._ends]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in [self._listener, *self._ends]:
            end.close()


@dataclass(frozen=True)
class Request:
    """One prompt, and whether it was asked before."""

    tokens: list[int]
    is_repeated: bool


@dataclass(frozen=True)
class Row:
    """What one mode gave.

    Attributes:
        mode: What happened to the Redis.
        answers: Those that began after it, in order of asking.
        plain: The plain server's, for the same requests.
        back_s: From the mend until a prompt came out of Redis again.
    """

    mode: str
    answers: Sequence[Answer]
    plain: Sequence[Answer]
    back_s: float

    @property
    def slowest_s(self) -> float:
        """Longest time to a first token."""
        return max(answer.first_token_s for answer in self.answers)

    @property
    def recompute_s(self) -> float:
        """The same of the plain server."""
        return max(answer.first_token_s for answer in self.plain)

    def line(self, deadline_s: float) -> str:
        """One row of the table."""
        firsts = [answer.first_token_s for answer in self.answers]
        plain = [answer.first_token_s for answer in self.plain]
        hits = sum(answer.by_tier.get("storage", 0) > 0 for answer in self.answers)
        columns = (
            f"  {self.mode:8} {len(firsts):3} {hits:5} ",
            f"{statistics.median(firsts):6.2f} {self.slowest_s:6.2f} ",
            f"{statistics.median(plain):6.2f} {self.recompute_s:6.2f} ",
            f"{max(one - other for one, other in zip(firsts, plain, strict=True)):+6.2f}",
            f"{self.recompute_s + deadline_s - self.slowest_s:+6.2f}",
            f"{self.back_s:5.1f}",
        )
        return "   ".join(columns)


HEADING = """\
                         with the chain    recompute
  mode       n  hits        p50    max       p50    max     worst   margin    back"""


class Bench:
    """Two servers, a Redis, and what is asked."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        """Start everything; ``stack`` ends it."""
        self._args = args
        self._model = args.model or ROOT / ".cache" / "demo" / "smollm2-135m"
        if not is_complete(self._model):
            write_smollm2(self._model)
        self._block_bytes = 64 * token_bytes(self._model) + 4096
        self._rng = random.Random(0)
        self._repeated = [self._prompt() for _ in range(NUM_REPEATED)]
        self._turn = itertools.cycle(self._repeated)
        command = program()
        assert command is not None
        self._command, self._folder = command, work / "redis"
        self.redis = RedisProcess(command, self._folder)
        stack.enter_context(self.redis)
        stack.callback(lambda: self._signal_redis(signal.SIGCONT))
        chain = work / "chain.yaml"
        chain.write_text(
            CHAIN.format(
                url=self.redis.url,
                host=HOST_BLOCKS * self._block_bytes,
                deadline=args.deadline,
                lookup_wait=LOOKUP_WAIT_S,
            )
        )
        ours = ["--radix-cache-backend", "flexkv", "--flexkv-config-file", str(chain)]
        self._plain = stack.enter_context(self._server(work, "plain", []))
        self._chained = stack.enter_context(self._server(work, "chained", ours))
        for server in (self._plain, self._chained):
            stack.callback(self._signal, server, signal.SIGCONT)  # one that stands still cannot be stopped
            self._signal(server, signal.SIGSTOP)

    def _server(self, work: Path, name: str, flags: list[str]) -> ServerProcess:
        fixed = ["--model-path", str(self._model), *CPU_FLAGS, "--max-running-requests", "4"]
        fixed += ["--max-total-tokens", str(POOL_PROMPTS * self._args.tokens)]
        environment = {
            **CPU_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")]),
        }
        return ServerProcess(
            [*fixed, *flags], log=work / f"{name}.log", environment=environment, timeout_s=600
        )

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(300, self._args.vocabulary) for _ in range(self._args.tokens)]

    def requests(self, count: int) -> list[Request]:
        """Prompts that come again and new ones, in turn."""
        return [
            Request(self._prompt(), False) if number % 2 else Request(next(self._turn), True)
            for number in range(count)
        ]

    def ask(
        self, server: ServerProcess, requests: Sequence[Request], halfway: Callable[[], None] = lambda: None
    ) -> list[Answer]:
        """Have the clients ask all of it; ``halfway`` is called when a quarter has been begun."""
        first = len(requests) // 4
        with self._running(server), ThreadPoolExecutor(self._args.clients) as pool:
            jobs = [pool.submit(self._one, server, request) for request in requests[:first]]
            for job in jobs[: first - 1]:  # so that one is under way when it happens
                job.result()
            halfway()
            jobs += [pool.submit(self._one, server, request) for request in requests[first:]]
            return [job.result() for job in jobs]

    def _one(self, server: ServerProcess, request: Request) -> Answer:
        return server.client.generate(request.tokens, NEW_TOKENS, ignore_eos=True)

    def fill(self) -> None:
        """Have the prompts that come again stored, on both servers."""
        for server in (self._plain, self._chained):
            with self._running(server):
                for tokens in self._repeated:
                    self._one(server, Request(tokens, True))

    def measure(self, mode: str, fail: Callable[[], None], mend: Callable[[], None]) -> Row:
        """One mode, whose failure comes in the middle of its requests."""
        requests = self.requests(self._args.requests)
        plain = self.ask(self._plain, requests)
        answers = self.ask(self._chained, requests, fail)
        for one, other in zip(answers, plain, strict=True):
            assert one.output_ids == other.output_ids, f"{mode}: the answers differ"
        since = len(requests) // 4 - 1  # from the one that was under way
        mend()
        return Row(mode, answers[since:], plain[since:], self._seconds_until_back())

    def _seconds_until_back(self) -> float:
        began = time.monotonic()
        with self._running(self._chained):
            while time.monotonic() - began < RECOVERY_DEADLINE_S:
                answer = self._one(self._chained, Request(next(self._turn), True))
                if answer.by_tier.get("storage"):
                    return time.monotonic() - began
        raise SystemExit("Redis was mended, and nothing came out of it in time")

    @contextmanager
    def _running(self, server: ServerProcess) -> Iterator[None]:
        self._signal(server, signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(server, signal.SIGSTOP)

    @staticmethod
    def _signal(server: ServerProcess, number: int) -> None:
        """Signal every process of a server that this script started."""
        assert server._process is not None
        with suppress(ProcessLookupError):
            os.killpg(server._process.pid, number)

    def _signal_redis(self, number: int) -> None:
        if self.redis._process is not None and self.redis._process.poll() is None:
            self.redis._process.send_signal(number)

    # ---- modes ---------------------------------------------------------------------------------

    def rows(self, modes: Sequence[str]) -> Iterator[Row]:
        """These modes, one after the other."""
        self.fill()
        stop, go_on = (lambda n=number: self._signal_redis(n) for number in (signal.SIGSTOP, signal.SIGCONT))
        direct = {
            "up": (lambda: None, lambda: None),
            "killed": (self.redis.kill, self.redis.start),
            "stopped": (stop, go_on),
        }
        for mode in modes:
            if mode in direct:
                yield self.measure(mode, *direct[mode])
            else:
                yield self._slowed()

    def _slowed(self) -> Row:
        with self._proxied() as proxy:
            self._seconds_until_back()
            return self.measure(
                "slowed",
                lambda: setattr(proxy, "is_slow", True),
                lambda: setattr(proxy, "is_slow", False),
            )

    @contextmanager
    def _proxied(self) -> Iterator[SlowProxy]:
        """The same Redis on another port, and a proxy on its own."""
        self.redis.kill()
        with RedisProcess(self._command, self._folder) as elsewhere:
            proxy = SlowProxy(self.redis.port, elsewhere.port, self._block_bytes / 4 / self._args.deadline)
            try:
                yield proxy
            finally:
                proxy.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=16, help="in each mode; at least 8")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=320, help="length of each prompt")
    parser.add_argument("--deadline", type=float, default=1.0, help="load_deadline_s of the tier")
    parser.add_argument("--model", type=Path, help="another model than SmolLM2-135M")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--vocabulary", type=int, default=40000, help="prompts are of ids below this")
    args = parser.parse_args(arguments)
    if program() is None:
        print(HOW_TO_GET)
        return 2
    deadline_s = args.deadline + LOOKUP_WAIT_S
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}")
    print(
        f"{args.clients} clients, prompts of {args.tokens} tokens, every other one asked before; "
        f"deadline {deadline_s:.2f} s (load {args.deadline:g}, lookup {LOOKUP_WAIT_S:g})\n"
        "seconds to the first token, of all requests from the failure on; worst: over the same request's\n"
        "recompute; margin: what is left to the rule; back: from the mend to a prompt out of Redis\n"
    )
    print(HEADING)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for row in Bench(args, Path(folder), stack).rows(args.modes):
            rows.append(row)
            print(row.line(deadline_s), flush=True)
        if args.logs is not None:
            shutil.copytree(folder, args.logs, ignore=shutil.ignore_patterns("redis"), dirs_exist_ok=True)
    broken = [row.mode for row in rows if row.slowest_s > row.recompute_s + deadline_s]
    verdict = f"BROKEN: {', '.join(broken)}" if broken else "holds"
    print(f"\nno request slower than its recompute and the deadline: {verdict}")
    return 3 if broken else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as from the keyboard: the servers go first
    sys.exit(main())
