"""The ssd tier against fio, and SGLang's own file backend, on the same blocks in one run.

    python -m benchmarks.ssd_vs_fio [--path /nvme/bench] [--sizes 1,4,10] [--total-mib 512] [--threads 8]
        [--rounds 5]

fio (direct I/O, psync) and the tier write and read the same amount in blocks of the same size, at
the same depth, on the same file system, in turn; speeds are medians of ``--rounds``, and so are the
ratios, each of which is of one round.  Every write is to new space, as the first store of a block is.

``HiCacheFile`` goes through the page cache: its writes are timed until they are on the disk, its reads
after the cache was dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flexkv_core import HostRegion, Outcome, TierContext
from flexkv_driver_ssd.config import SsdConfig
from flexkv_driver_ssd.tier import SsdTier

MIB = 1 << 20
SHIM = Path(__file__).resolve().parents[1] / "tests" / "support" / "sglang_cpu_shim"
"""Stand-ins for the GPU packages that sglang imports."""

GOAL = 0.9
"""Of fio's throughput; below it the tier, and not the disk, is what limits."""

MISSED = 3
"""Exit status where everything was measured, and the goal was missed."""


@dataclass(frozen=True)
class Work:
    """What everyone does."""

    root: Path
    block_bytes: int
    num_blocks: int
    threads: int

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass
class Figures:
    """GB/s of one contender, one entry a round."""

    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    @property
    def median(self) -> tuple[float, float]:
        """Of writing and reading."""
        return statistics.median(self.write), statistics.median(self.read)

    def beside(self, other: Figures) -> tuple[float, float]:
        """Of writing and reading, the median of each round's ratio to the other's."""
        return _ratio(self.write, other.write), _ratio(self.read, other.read)


def _ratio(own: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(own, others, strict=True))


@contextlib.contextmanager
def scratch(root: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bench-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def run_fio(work: Work, figures: Figures) -> None:
    with scratch(work.root) as path:
        for kind, into in (("write", figures.write), ("read", figures.read)):
            command = [
                "fio", "--name=bench", f"--directory={path}", f"--rw={kind}", "--ioengine=psync",
                "--direct=1",
                f"--bs={work.block_bytes}", f"--numjobs={work.threads}", "--thread", "--group_reporting",
                f"--size={work.num_bytes // work.threads}", "--output-format=json", "--fallocate=native",
            ]  # fmt: skip
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            into.append(told["jobs"][0][kind]["bw_bytes"] / 1e9)


def timed(work: Work, act: Callable[[int], None], finish: Callable[[], None] = lambda: None) -> float:
    """GB/s of ``act(thread)`` in all threads at once, with ``finish`` after it."""
    gate = threading.Barrier(work.threads + 1)

    def run(thread: int) -> None:
        gate.wait()
        act(thread)

    with ThreadPoolExecutor(work.threads) as pool:
        jobs = [pool.submit(run, thread) for thread in range(work.threads)]
        gate.wait()
        start = time.perf_counter()
        for job in jobs:
            job.result()
        finish()
        return work.num_bytes / (time.perf_counter() - start) / 1e9


def keys_of(work: Work, thread: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in range(thread, work.num_blocks, work.threads)]


def run_tier(work: Work, figures: Figures, batch: int) -> None:
    """Store and load as the core does: several threads, each with a small batch a call."""
    context = TierContext(name="bench", value_bytes=work.block_bytes, head_bytes=4096)
    with scratch(work.root) as path:
        config = SsdConfig(path=(path,), capacity=work.num_bytes, min_free=0)
        # Slots as the core has them: one region, cut.
        region = HostRegion(work.threads * batch * work.block_bytes)
        region.view[:] = os.urandom(work.block_bytes) * (work.threads * batch)
        slots = [
            region.view[at : at + work.block_bytes] for at in range(0, len(region.view), work.block_bytes)
        ]
        buffers = [slots[at : at + batch] for at in range(0, len(slots), batch)]
        with SsdTier(config, context) as tier:

            def each(call: Callable[..., list[Outcome]], thread: int) -> None:
                keys = keys_of(work, thread)
                for at in range(0, len(keys), batch):
                    part = keys[at : at + batch]
                    outcomes = call(part, buffers[thread][: len(part)])
                    assert all(outcome.is_ok for outcome in outcomes), outcomes

            figures.write.append(timed(work, lambda thread: each(tier.store, thread)))
            figures.read.append(timed(work, lambda thread: each(tier.load, thread)))


def run_hicache(work: Work, figures: Figures) -> None:
    """SGLang's own file backend, one page a call, from as many threads."""
    if importlib.util.find_spec("triton") is None:  # sglang's imports want it, the file backend does not
        sys.path.insert(0, str(SHIM))
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    about = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="bench",
    )  # fmt: skip
    with scratch(work.root) as path:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(path)
        backend = HiCacheFile(about)
        pages = [
            torch.frombuffer(bytearray(os.urandom(work.block_bytes)), dtype=torch.uint8)
            for _ in range(work.threads)
        ]

        def write(thread: int) -> None:
            assert all(backend.set(key.hex(), pages[thread]) for key in keys_of(work, thread))

        def read(thread: int) -> None:
            for key in keys_of(work, thread):
                assert backend.get(key.hex(), pages[thread]) is not None

        figures.write.append(timed(work, write, lambda: each_file(path, os.fsync)))
        each_file(path, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
        figures.read.append(timed(work, read))


def each_file(root: Path, act: Callable[[int], None]) -> None:
    for file in root.rglob("*.bin"):
        fd = os.open(file, os.O_RDONLY)
        try:
            act(fd)
        finally:
            os.close(fd)


def machine(root: Path) -> str:
    about = subprocess.run(
        ["findmnt", "-no", "FSTYPE,SOURCE", "-T", str(root)], capture_output=True, text=True, check=False
    ).stdout.split()
    fio = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout
    return (
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, {' '.join(about)}, Python {platform.python_version()}, {fio.strip()}"
    )


def compare(work: Work, rounds: int, batch: int, with_hicache: bool) -> dict[str, Figures]:
    contenders: dict[str, Callable[[Figures], None]] = {
        "fio": lambda figures: run_fio(work, figures),
        "ssd tier": lambda figures: run_tier(work, figures, batch),
    }
    if with_hicache:
        contenders["HiCacheFile"] = lambda figures: run_hicache(work, figures)
    told = {name: Figures() for name in contenders}
    for number in range(rounds):
        # In turn, and each round in the other order: the disk's mood is nobody's merit.
        for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
            contenders[name](told[name])
    return told


def report(block_bytes: int, told: dict[str, Figures]) -> list[str]:
    lines = []
    for name, figures in told.items():
        own_write, own_read = figures.median
        write, read = figures.beside(told["fio"])
        lines.append(
            f"{block_bytes / MIB:5.0f} MiB  {name:12}  write {own_write:6.2f} GB/s {write:5.0%}"
            f"   read {own_read:6.2f} GB/s {read:5.0%}"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status ``MISSED`` if the tier is below the goal anywhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="a directory on the disk to measure")
    parser.add_argument("--sizes", default="1,4,10", help="block sizes, in MiB")
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="blocks a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-hicache", action="store_true", help="leave SGLang's backend out")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    options = parser.parse_args(argv)
    if shutil.which("fio") is None:
        print("ssd_vs_fio: fio is not installed", file=sys.stderr)
        return 2
    with_hicache = not options.no_hicache and importlib.util.find_spec("sglang") is not None
    print(f"{machine(options.path)}; {options.total_mib} MiB, {options.threads} threads, percent of fio")
    found, is_good = {}, True
    for size in map(int, options.sizes.split(",")):
        per_thread = max(1, options.total_mib // size // options.threads)
        work = Work(options.path, size * MIB, per_thread * options.threads, options.threads)
        told = compare(work, options.rounds, options.batch, with_hicache)
        print("\n".join(report(size * MIB, told)), flush=True)
        found[size] = {name: asdict(figures) for name, figures in told.items()}
        is_good &= all(ratio >= GOAL for ratio in told["ssd tier"].beside(told["fio"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(f"goal of {GOAL:.0%} {'met' if is_good else 'missed'}")
    return 0 if is_good else MISSED


if __name__ == "__main__":
    sys.exit(main())
