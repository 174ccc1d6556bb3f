"""The remote_redis tier against redis-py, a raw socket loop, LMCache's C++ client and Mooncake, in one run.

    python -m benchmarks.redis_throughput [--sizes 1,4,8] [--connections 1,4] [--total-mib 128]
        [--lmcache FOLDER] [--mooncake FOLDER] [--io-threads 1] [--rounds 9]

All of them write and read the same blocks on the same redis-server (started here, on loopback TCP, kept
in memory only), with the same number of connections, in turn.  Our tier and redis-py have a thread a
connection, as the core has; the raw loop too: one command, one ``sendmsg`` or one ``recv_into`` a block,
on a blocking socket, with nothing else done.  Speeds are medians of the rounds, and so are the ratios,
each of which is of one round.

LMCache's extension is used if ``FOLDER`` (or ``LMCACHE_FOLDER``) has it: ``pip install --no-deps --target
FOLDER lmcache==0.5.6``.  It has threads of its own.  Mooncake's store, which is no Redis, stands beside
them if ``FOLDER`` (or ``MOONCAKE_FOLDER``) has it: ``pip install --no-deps --target FOLDER
mooncake-transfer-engine-non-cuda``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
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
from functools import partial
from pathlib import Path

import redis

from benchmarks._other_stores import LmCache, Mooncake, load_lmcache, mooncake_store
from benchmarks._redis_contenders import (
    DEADLINE_S,
    Contender,
    OurTier,
    RawSocket,
    RedisPy,
    Work,
    key,
    name,
)
from flexkv_core import HostRegion, TierContext
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier

MIB = 1 << 20
GOALS = {
    "redis-py": {"get": 3.0, "set": 3.0},
    "raw socket": {"get": 0.8, "set": 0.8},
    "LMCache C++": {"get": 0.9, "set": 0.9},
}
"""Our throughput by theirs is not to be below this."""

MISSED = 3
"""Exit status where everything was measured, and a goal was missed."""

LOOKUP_GOAL_MS = 1.0


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
            one.prepare()
            wrote = timed(work, one.set)
            for view in views:
                view[:64] = bytes(64)
            read = timed(work, one.get)
            assert all(bytes(view) == filled[at % len(filled)] for at, view in enumerate(views)), one.name
            if number:
                figures[one.name]["set"].append(wrote)
                figures[one.name]["get"].append(read)
    for one in contenders:
        one.close()
    del views, contenders
    region.close()
    return figures


def report(work: Work, figures: Figures) -> tuple[list[str], list[str]]:
    """Lines of the table, and the goals that are missed."""
    about = f"{work.block_bytes // MIB} MiB x {work.connections}"
    lines, missed = [], []
    for who, told in figures.items():
        line = f"{about}  {who:12}"
        for kind, rounds in told.items():
            ratio = statistics.median(
                ours[0] / theirs[0] for ours, theirs in zip(figures[OurTier.name][kind], rounds, strict=True)
            )
            speed, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
            beside = "" if who == OurTier.name else f"ours {ratio:4.2f}x"
            line += f"   {kind} {speed:5.2f} GB/s {beside:10} {cpu:4.2f} CPU s/GB"
            goal = GOALS.get(who, {}).get(kind, 0)
            if ratio < goal:
                missed.append(f"{about} {kind}: {ratio:.2f} of {who}'s, goal {goal}")
        lines.append(line)
    return lines, missed


def lookups(port: int, rounds: int = 200, count: int = 1000) -> tuple[str, list[str]]:
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
    return line, [f"lookup: {ours:.2f} ms, goal {LOOKUP_GOAL_MS}"] if ours > LOOKUP_GOAL_MS else []


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
    parser.add_argument("--connections", type=numbers, default=[1, 4])
    parser.add_argument("--total-mib", type=int, default=128, help="moved each way in each round")
    parser.add_argument("--batch", type=int, default=8, help="blocks a call of ours")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--io-threads", type=int, default=1, help="of the server")
    parser.add_argument("--lmcache", type=Path, default=os.environ.get("LMCACHE_FOLDER"))
    parser.add_argument("--mooncake", type=Path, default=os.environ.get("MOONCAKE_FOLDER"))
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    options = parser.parse_args(argv)
    if shutil.which("redis-server") is None:
        print("redis_throughput: redis-server is not installed", file=sys.stderr)
        return 2
    print(f"{machine()}, {options.io_threads} io-threads; {options.total_mib} MiB, {options.rounds} rounds")
    found, missed = {}, []
    with server("--io-threads", str(options.io_threads)) as port, contenders(options) as makers:
        for size in options.sizes:
            for connections in options.connections:
                num_blocks = max(1, options.total_mib // size // connections) * connections
                work = Work(port, size * MIB, num_blocks, connections, options.batch)
                figures = compare(work, makers, options.rounds)
                lines, below = report(work, figures)
                print("\n".join(lines), flush=True)
                found[f"{size}x{connections}"] = figures
                missed += below
        line, below = lookups(port)
        missed += below
        print(line)
    print("\n  ".join(["goals missed:", *missed]) if missed else "all goals met")
    if options.json:
        options.json.write_text(json.dumps({"lookup": line, "throughput": found}, indent=1))
    return MISSED if missed else 0


@contextlib.contextmanager
def contenders(options: argparse.Namespace) -> Iterator[list[Callable[..., Contender]]]:
    """Ours, the references, and whichever others can be had."""
    makers: list[Callable[..., Contender]] = [OurTier, RawSocket, RedisPy]
    with contextlib.ExitStack() as ends:
        if options.lmcache:
            makers.append(partial(LmCache, load_lmcache(Path(options.lmcache))))
        if options.mooncake:
            room = (options.total_mib + max(options.sizes) * max(options.connections)) * 2 * MIB
            store = ends.enter_context(mooncake_store(Path(options.mooncake), room))
            makers.append(partial(Mooncake, store))
        yield makers


if __name__ == "__main__":
    sys.exit(main())
