"""The seed's benchmark, side by side on one GPU: a populating pass, then two measured ones.

    python benchmarks/gpu/seed_bench.py [--kinds plain,hicache,hicache_direct,mp,ip] [--prompts 60]

The seed: Qwen3-8B, prompts of 7,088 tokens (median) to 27,961 (most), QPS 2, 24 at once, 32 new tokens.
Here: dummy weights, random tokens, the device pool of the seed (98,304 tokens), as many prompts as the host
tier holds, and a third pass at QPS 8, since this GPU computes too fast for QPS 2 to queue.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from servers import KINDS, dummy_model, each_kind, prompt

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._serving import Answer

AT_ONCE, NEW = 24, 32
FLAGS = (
    *("--page-size", "64", "--max-total-tokens", "98304", "--cuda-graph-max-bs-decode", "24"),
    *("--max-running-requests", "32", "--chunked-prefill-size", "16384", "--context-length", "32000"),
)
PASSES = (("populate", 4), ("measured", 2), ("measured", 8))


def lengths(count: int) -> list[int]:
    """Lengths with the seed's median and maximum: quantiles of a log-normal distribution, clipped."""
    normal = statistics.NormalDist()
    sigma = math.log(27_961 / 7_088) / normal.inv_cdf(1 - 0.5 / 120)
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    return [min(27_961, round(7_088 * math.exp(sigma * z))) for z in quantiles]


def one_pass(server: ServerProcess, prompts: list[list[int]], qps: float) -> tuple[list[Answer], float]:
    """All answers, sent at a steady rate, and the seconds that they took together."""

    def ask(number: int) -> Answer:
        time.sleep(max(0.0, began + number / qps - time.monotonic()))
        return server.client.generate(prompts[number], NEW, ignore_eos=True)

    began = time.monotonic() + 0.1
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    return answers, time.monotonic() - began


def report(kind: str, name: str, qps: float, answers: list[Answer], seconds: float) -> None:
    def at(values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3

    first = [answer.first_token_s for answer in answers]
    whole = [answer.seconds for answer in answers]
    tiers: dict[str, int] = {}
    for answer in answers:
        for tier, count in answer.by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + count
    total = sum(answer.prompt_tokens for answer in answers)
    shares = ", ".join(f"{tier} {count / total:.0%}" for tier, count in tiers.items())
    print(
        f"  {kind:15} {name:9} QPS {qps}: TTFT avg/p50/p90/p99 {statistics.mean(first) * 1e3:.0f}/"
        f"{at(first, 0.5):.0f}/{at(first, 0.9):.0f}/{at(first, 0.99):.0f} ms, "
        f"E2E p50 {at(whole, 0.5):.0f} ms, {len(answers) / seconds:.2f} requests/s; "
        f"{shares or 'nothing cached'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="plain,hicache,hicache_direct,mp,ip", help=", ".join(KINDS))
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--host-gb", type=int, default=84)
    parser.add_argument("--work", type=Path, default=None, help="where logs and the model go")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="flexkv-bench-"))
    sizes = lengths(args.prompts)
    order = sorted(range(args.prompts), key=lambda i: (i * 7919) % args.prompts)
    prompts = [prompt(5000 + i, sizes[i]) for i in order]
    print(f"{args.prompts} prompts, {sum(sizes):,} tokens, median {sorted(sizes)[len(sizes) // 2]:,}")
    for kind, server in each_kind(
        args.kinds.split(","), work, dummy_model(work / "model"), args.host_gb, *FLAGS
    ):
        for seed, length in ((1, 8_000), (2, 28_000)):
            server.client.generate(prompt(seed, length), 1, ignore_eos=True)
        for name, qps in PASSES:
            report(kind, name, qps, *one_pass(server, prompts, qps))
            time.sleep(3)


if __name__ == "__main__":
    main()
