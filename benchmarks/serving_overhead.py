"""What the chain costs a server with nothing to reuse: the real SGLang on the CPU, with it and without.

    python benchmarks/serving_overhead.py [--prompts 6] [--tokens 256] [--new 8] [--rounds 10] [--control]

SmolLM2-135M, prompts that share nothing, four at a time.  Two servers, the plain radix cache and a CPU + SSD
chain, are asked in turn, so both see the same machine; the one that is not asked stands still (SIGSTOP), for
an idle server spins.  Both are compared round by round; the median counts, and the quartiles beside it tell
how far the machine can be trusted.  Every prompt is stored in both tiers while it is served.

Two processes of one and the same server can differ by more than a tenth, in whatever way their memory lies
(``--control`` compares two plain ones), so what the chain itself takes is told apart: the processor time of
all threads but those that compute, of which there is one for each processor.  What it takes of the
scheduler's thread is measured by ``scheduler_cost.py``.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flexkv_core.cli._demo_model import is_complete, write_smollm2
from flexkv_core.cli._process import CPU_ENVIRONMENT, CPU_FLAGS, ServerProcess

SHIM = ROOT / "tests" / "support" / "sglang_cpu_shim"
CHAIN = """version: 1
tiers:
  - {{name: host, driver: cpu, options: {{capacity: 1GiB}}}}
  - {{name: disk, driver: ssd, options: {{path: {path}, capacity: 2GiB}}}}
engine: {{log_transfers: false}}
"""


def server(model: Path, work: Path, name: str, flags: list[str]) -> ServerProcess:
    fixed = [
        "--model-path",
        str(model),
        *CPU_FLAGS,
        "--max-running-requests",
        "4",
        "--max-total-tokens",
        "16384",
    ]
    environment = {**CPU_ENVIRONMENT, "PYTHONPATH": str(SHIM)}
    return ServerProcess([*fixed, *flags], log=work / f"{name}.log", environment=environment, timeout_s=600)


Thread = tuple[int, int]
"""Process and thread id."""


def thread_times(running: ServerProcess) -> dict[Thread, float]:
    """Processor time so far of all threads of a server, in seconds."""
    assert running._process is not None
    first = psutil.Process(running._process.pid)
    return {
        (process.pid, thread.id): thread.user_time + thread.system_time
        for process in [first, *first.children(recursive=True)]
        for thread in process.threads()
    }


def signal_all(running: ServerProcess, number: int) -> None:
    """Signal every process of a server that this script started."""
    assert running._process is not None
    os.killpg(running._process.pid, number)


@dataclass(frozen=True)
class Round:
    """What answering all prompts took: seconds, and processor seconds by thread."""

    wall: float
    threads: dict[Thread, float]

    @property
    def processor_s(self) -> float:
        """Of all threads."""
        return sum(self.threads.values())

    @property
    def beside_s(self) -> float:
        """Of all threads but those that compute."""
        return sum(sorted(self.threads.values())[: -(psutil.cpu_count() or 1)])


def one_round(running: ServerProcess, prompts: list[list[int]], new: int) -> Round:
    """Answer all prompts, four at a time."""
    signal_all(running, signal.SIGCONT)
    before, began = thread_times(running), time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda ids: running.client.generate(ids, new), prompts))
    wall = time.perf_counter() - began
    assert all(answer.cached_tokens < 4 for answer in answers), "the prompts were to share nothing"
    after = thread_times(running)
    signal_all(running, signal.SIGSTOP)
    return Round(wall, {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()})


def spread(ratios: list[float]) -> str:
    """The median, and the quartiles round it."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:+.1%}  (quartiles {low:+.1%}, {high:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--control", action="store_true", help="a second plain server instead of the chain")
    args = parser.parse_args()
    model = ROOT / ".cache" / "demo" / "smollm2-135m"
    if not is_complete(model):
        write_smollm2(model)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        chain = work / "chain.yaml"
        chain.write_text(CHAIN.format(path=work / "ssd"))
        ours = [] if args.control else ["--radix-cache-backend", "flexkv", "--flexkv-config-file", str(chain)]
        with server(model, work, "plain", []) as plain, server(model, work, "flexkv", ours) as chained:
            rows: dict[str, list[Round]] = {"plain": [], "flexkv": []}
            for running in (plain, chained):
                signal_all(running, signal.SIGSTOP)
            for number in range(args.rounds + 1):
                turns = [("plain", plain), ("flexkv", chained)]
                for name, running in turns if number % 2 else reversed(turns):
                    prompts = [
                        [rng.randrange(1000, 40000) for _ in range(args.tokens)] for _ in range(args.prompts)
                    ]
                    result = one_round(running, prompts, args.new)
                    if number:  # the first warms up
                        rows[name].append(result)
            for running in (plain, chained):
                signal_all(running, signal.SIGCONT)
    print(f"{platform.machine()}, {psutil.cpu_count()} processors, Python {platform.python_version()}")
    print(
        f"{args.prompts} prompts of {args.tokens} tokens, {args.new} new ones each; median of {args.rounds}"
    )
    for name, found in rows.items():
        wall, work_s, beside_s = (
            statistics.median(getattr(row, field) for row in found)
            for field in ("wall", "processor_s", "beside_s")
        )
        rate = args.prompts * (args.tokens + args.new) / wall
        print(
            f"  {name:8} {wall:8.2f} s  {rate:8.1f} tokens/s  {work_s:8.2f} processor s, "
            f"{beside_s:.2f} of them not computing"
        )
    pairs = list(zip(rows["plain"], rows["flexkv"], strict=True))
    added = [(other.beside_s - one.beside_s) / other.processor_s for one, other in pairs]
    print(f"  throughput lost:      {spread([1 - one.wall / other.wall for one, other in pairs])}")
    print(
        f"  processor time added: {spread([other.processor_s / one.processor_s - 1 for one, other in pairs])}"
    )
    print(f"  of it not computing:  {spread(added)}")


if __name__ == "__main__":
    main()
