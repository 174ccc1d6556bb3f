"""The remote_redis tier against redis-py, a raw socket loop and LMCache's C++ client, in one run.

    python benchmarks/redis_throughput.py [--sizes 1,4,8] [--connections 1,2,4] [--total-mib 256]
        [--lmcache FOLDER] [--io-threads 1] [--rounds 5]

All of them write and read the same blocks on the same redis-server (started here, on loopback TCP, kept
in memory only), with the same number of connections, in turn; each figure is the median of the rounds.
Our tier and redis-py have a thread a connection, as the core has; the raw loop too: one command, one
``sendmsg`` or one ``recv_into`` a block, on a blocking socket, with nothing else done.

LMCache's extension is used if ``FOLDER`` (or the variable ``LMCACHE_FOLDER``) has it:
``pip install --no-deps --target FOLDER lmcache==0.5.6``.  It has threads of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis

from flexkv_core import HostRegion, TierContext
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier

MIB = 1 << 20
DEADLINE_S = 60.0

GOALS = {
    "redis-py": {"get": 3.0, "set": 0.9},
    "raw socket": {"get": 0.8, "set": 0.8},
    "LMCache C++": {"get": 0.9, "set": 0.9},
}
"""Our throughput by theirs must not be below this.  redis-py hands a large buffer to the socket as it
is, so a SET cannot be three times faster than its; it must not be slower."""

LOOKUP_GOAL_MS = 1.0


@dataclass(frozen=True)
class Work:
    """What everyone does."""

    port: int
    block_bytes: int
    num_blocks: int
    connections: int
    batch: int

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def parts(self) -> list[range]:
        """Blocks of each connection."""
        return [range(start, self.num_blocks, self.connections) for start in range(self.connections)]


class Contender:
    """One way to move blocks; ``set`` and ``get`` move those of one connection."""

    name = ""

    def __init__(self, work: Work, views: Sequence[memoryview]) -> None:
        self.work = work
        self.views = views

    def set(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError

    def get(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


class OurTier(Contender):
    """The tier, called as the core calls it."""

    name = "remote_redis"

    def __init__(self, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        config = RedisConfig(url=f"redis://127.0.0.1:{work.port}", connections=work.connections, ttl_s=3600)
        self.tier = RedisTier(
            config, TierContext(name="bench", value_bytes=work.block_bytes, head_bytes=4096)
        )

    def set(self, blocks: Sequence[int]) -> None:
        self._each(self.tier.store, blocks)

    def get(self, blocks: Sequence[int]) -> None:
        self._each(self.tier.load, blocks)

    def _each(self, call: Callable[..., list[Any]], blocks: Sequence[int]) -> None:
        for at in range(0, len(blocks), self.work.batch):
            part = blocks[at : at + self.work.batch]
            outcomes = call([key(block) for block in part], [self.views[block] for block in part])
            assert all(outcome.is_ok for outcome in outcomes), outcomes

    def close(self) -> None:
        self.tier.close()


class RedisPy(Contender):
    """redis-py's own get and set; the value is copied into the buffer, where it is wanted."""

    name = "redis-py"

    def __init__(self, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        self.client = redis.Redis(port=work.port, socket_timeout=DEADLINE_S)

    def set(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.client.set(name(block), self.views[block])

    def get(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.views[block][:] = self.client.get(name(block))

    def close(self) -> None:
        self.client.close()


class RawSocket(Contender):
    """The least that Python must do."""

    name = "raw socket"

    def __init__(self, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        self.ends = {part.start: socket.create_connection(("127.0.0.1", work.port)) for part in work.parts()}
        for end in self.ends.values():
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, blocks: Sequence[int]) -> None:
        end = self.ends[blocks[0]]
        for block in blocks:
            head = b"*3\r\n$3\r\nSET\r\n$71\r\n%b\r\n$%d\r\n" % (name(block), self.work.block_bytes)
            sent = end.sendmsg([head, self.views[block], b"\r\n"])
            assert sent == len(head) + self.work.block_bytes + 2
            assert end.recv(5, socket.MSG_WAITALL) == b"+OK\r\n"

    def get(self, blocks: Sequence[int]) -> None:
        end = self.ends[blocks[0]]
        head = b"$%d\r\n" % self.work.block_bytes
        for block in blocks:
            end.sendall(b"*2\r\n$3\r\nGET\r\n$71\r\n%b\r\n" % name(block))
            assert end.recv(len(head), socket.MSG_WAITALL) == head
            got = end.recv_into(self.views[block], self.work.block_bytes, socket.MSG_WAITALL)
            assert got == self.work.block_bytes
            assert end.recv(2, socket.MSG_WAITALL) == b"\r\n"

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


class LmCache(Contender):
    """One batch for all workers, as its own adapter submits it; so it is called by one thread only."""

    name = "LMCache C++"

    def __init__(self, extension: Any, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        self.client = extension.LMCacheRedisClient("127.0.0.1", work.port, work.connections)

    def set(self, blocks: Sequence[int]) -> None:
        self._batch(self.client.submit_batch_set, blocks)

    def get(self, blocks: Sequence[int]) -> None:
        self._batch(self.client.submit_batch_get, blocks)

    def _batch(self, submit: Callable[..., int], blocks: Sequence[int]) -> None:
        if blocks[0]:
            return  # the first caller submits everybody's
        every = range(self.work.num_blocks)
        keys = [name(block).decode() for block in every]
        submit(keys, [self.views[block] for block in every])
        done: list[Any] = []
        while not done:
            ready, _, _ = select.select([self.client.event_fd()], [], [], DEADLINE_S)
            assert ready, "no completion"
            done = self.client.drain_completions()
        assert all(is_ok for _, is_ok, *_ in done), done

    def close(self) -> None:
        self.client.close()


def load_lmcache(folder: Path) -> Any:
    """LMCache's extension by itself; its package would import what this project does not need."""
    found = sorted(folder.glob("lmcache/lmcache_redis*.so"))
    if not found:
        raise FileNotFoundError(f"no lmcache/lmcache_redis*.so in {folder}")
    import torch  # noqa: F401 - brings the libraries that the extension is linked with

    spec = importlib.util.spec_from_file_location("lmcache.lmcache_redis", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def key(block: int) -> bytes:
    return block.to_bytes(32, "big")


def name(block: int) -> bytes:
    return b"flexkv:%064x" % block


@contextlib.contextmanager
def server(*options: str) -> Iterator[int]:
    """A redis-server of this run; yields its port."""
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", *options]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        try:
            _wait_for(port, process)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None, "redis-server ended"
            assert time.monotonic() < end, "redis-server does not listen"
            time.sleep(0.02)


def timed(work: Work, act: Callable[[Sequence[int]], None]) -> tuple[float, float]:
    """Of all connections at once: GB/s, and this process's CPU seconds for a GB."""
    parts = work.parts()
    gate = threading.Barrier(len(parts) + 1)

    def run(blocks: Sequence[int]) -> None:
        gate.wait()
        act(blocks)

    with ThreadPoolExecutor(len(parts)) as pool:
        jobs = [pool.submit(run, part) for part in parts]
        gate.wait()
        start, cpu = time.perf_counter(), time.process_time()
        for job in jobs:
            job.result()
        elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
        return work.num_bytes / elapsed / 1e9, cpu / work.num_bytes * 1e9


Figures = dict[str, dict[str, list[tuple[float, float]]]]
"""Of each contender, for ``set`` and ``get``: GB/s and CPU seconds a GB, one entry a round."""


def compare(work: Work, makers: Sequence[Callable[..., Contender]], rounds: int) -> Figures:
    """Measure all contenders; what they read is compared with what they wrote."""
    region = HostRegion(work.num_bytes)
    size = work.block_bytes
    views = [region.view[at : at + size] for at in range(0, work.num_bytes, size)]
    filled = [os.urandom(64) * (size // 64) for _ in range(min(8, work.num_blocks))]
    contenders = [make(work, views) for make in makers]
    figures: Figures = {one.name: {"set": [], "get": []} for one in contenders}
    for number in range(rounds + 1):
        # In turn, and each round in the other order; the first round warms everybody up.
        for one in contenders[:: 1 if number % 2 else -1]:
            for at, view in enumerate(views):
                view[:] = filled[at % len(filled)]
            wrote = timed(work, one.set)
            for view in views:
                view[:64] = bytes(64)
            read = timed(work, one.get)
            assert all(view == filled[at % len(filled)] for at, view in enumerate(views)), one.name
            if number:
                figures[one.name]["set"].append(wrote)
                figures[one.name]["get"].append(read)
    for one in contenders:
        one.close()
    del views, contenders
    region.close()
    return figures


def report(work: Work, figures: Figures) -> tuple[list[str], bool]:
    """Lines of the table, and whether every goal is met."""
    medians = {who: {kind: _medians(told[kind]) for kind in told} for who, told in figures.items()}
    ours = medians[OurTier.name]
    lines, is_good = [], True
    for who, told in medians.items():
        line = f"{work.block_bytes // MIB:3d} MiB x {work.connections}  {who:12}"
        for kind in ("get", "set"):
            speed, cpu = told[kind]
            ratio = f"ours {ours[kind][0] / speed:4.2f}x" if who in GOALS else ""
            line += f"   {kind} {speed:5.2f} GB/s {ratio:10} {cpu:4.2f} CPU s/GB"
            is_good &= who not in GOALS or ours[kind][0] >= GOALS[who][kind] * speed
        lines.append(line)
    return lines, is_good


def _medians(rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    speeds, cpus = zip(*rounds, strict=True)
    return statistics.median(speeds), statistics.median(cpus)


def lookups(port: int, rounds: int = 200, count: int = 1000) -> tuple[str, bool]:
    """Milliseconds for the lookup of a thousand keys, half of which are there."""
    client = redis.Redis(port=port)
    for block in range(0, count, 2):
        client.set(name(block), b"x" * 100)
    keys, names = [key(block) for block in range(count)], [name(block) for block in range(count)]
    with RedisTier(
        RedisConfig(url=f"redis://127.0.0.1:{port}", ttl_s=3600),
        TierContext(name="bench", value_bytes=4096, head_bytes=4096),
    ) as tier:
        ours = _median_ms(lambda: tier.lookup(keys), rounds)

    def pipelined() -> None:
        pipe = client.pipeline(transaction=False)
        for one in names:
            pipe.exists(one)
        pipe.execute()

    theirs, multi = _median_ms(pipelined, rounds // 10), _median_ms(lambda: client.exists(*names), rounds)
    client.close()
    line = (
        f"lookup of {count}: remote_redis {ours:.2f} ms, redis-py pipeline {theirs:.2f} ms, "
        f"one EXISTS that only counts {multi:.2f} ms"
    )
    return line, ours <= LOOKUP_GOAL_MS


def _median_ms(act: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def machine() -> str:
    version = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    return (
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, "
        f"redis-server {version.split('v=')[1].split()[0]}, redis-py {redis.__version__}"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=numbers, default=[1, 4, 8], help="block sizes, in MiB")
    parser.add_argument("--connections", type=numbers, default=[1, 2, 4])
    parser.add_argument("--total-mib", type=int, default=256, help="moved each way in each round")
    parser.add_argument("--batch", type=int, default=8, help="blocks a call of ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io-threads", type=int, default=1, help="of the server")
    parser.add_argument("--lmcache", type=Path, default=os.environ.get("LMCACHE_FOLDER"))
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    options = parser.parse_args(argv)
    if shutil.which("redis-server") is None:
        print("redis_throughput: redis-server is not installed", file=sys.stderr)
        return 2
    makers: list[Callable[..., Contender]] = [OurTier, RawSocket, RedisPy]
    if options.lmcache:
        makers.append(partial(LmCache, load_lmcache(Path(options.lmcache))))
    print(f"{machine()}, {options.io_threads} io-threads; {options.total_mib} MiB, {options.rounds} rounds")
    found, is_good = {}, True
    with server("--io-threads", str(options.io_threads)) as port:
        for size in options.sizes:
            for connections in options.connections:
                num_blocks = max(1, options.total_mib // size // connections) * connections
                work = Work(port, size * MIB, num_blocks, connections, options.batch)
                figures = compare(work, makers, options.rounds)
                lines, is_met = report(work, figures)
                print("\n".join(lines), flush=True)
                found[f"{size}x{connections}"] = figures
                is_good &= is_met
        line, is_met = lookups(port)
        print(line)
    if options.json:
        options.json.write_text(json.dumps({"lookup": line, "throughput": found}, indent=1))
    return 0 if is_good and is_met else 1


if __name__ == "__main__":
    sys.exit(main())
