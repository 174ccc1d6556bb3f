"""How long a prompt takes whose KV lies in host memory: this project and SGLang's HiCache, one server each.

    python benchmarks/gpu/warm_prompts.py [--kinds mp,ip,hicache,hicache_direct,plain] [--work FOLDER]

The real SGLang, Qwen3-8B's shape, dummy weights, page 64.  Device memory holds 70,016 tokens.  Four prompts
of 32,000 tokens push one another off it; asked again, each comes back from the host; ten of 8,000 likewise.
One new token, so that the time is that of the first token.  The floor is the KV's bytes over the rate of a
plain pinned copy of the same run.  First requests show what writing through costs, against ``plain``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from servers import KINDS, KV_TOKEN_BYTES, dummy_model, each_kind, prompt

from flexkv_core.cli._process import ServerProcess

SIZES = {32_000: 4, 8_000: 10}
"""Length -> how many prompts; together more than the device holds."""
ROUNDS = 4
FLAGS = ("--page-size", "64", "--max-total-tokens", "70016", "--cuda-graph-max-bs-decode", "4")


def copy_rate() -> float:
    """Bytes a second of one large copy from pinned memory to the device."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    best = float("inf")
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return host.numel() / best


def measure(kind: str, server: ServerProcess, length: int, count: int, floor_ms: float) -> None:
    client = server.client
    prompts = [prompt(length + number, length) for number in range(count)]
    first = [client.generate(ids, 1, ignore_eos=True) for ids in prompts]
    print(f"  {kind:15} {length:6} tokens, first time  {_times(first)}", flush=True)
    if kind == "plain":
        return
    time.sleep(1)  # a server that writes back lazily ends it
    rounds = []
    for number in range(ROUNDS):
        answers = [client.generate(ids, 1, ignore_eos=True) for ids in prompts]
        rounds += answers if number else []  # the first round warms up
        wrong = [a for a, b in zip(answers, first, strict=True) if a.output_ids != b.output_ids]
        if wrong:
            print(f"  {kind}: {len(wrong)} of {count} answers differ from the first ones", flush=True)
    hits = statistics.mean(answer.tier_tokens / length for answer in rounds)
    best = statistics.median(answer.first_token_s for answer in rounds) * 1e3
    print(
        f"  {kind:15} {length:6} tokens, from host   {_times(rounds)}  {hits:.0%} from the tiers, "
        f"{best / floor_ms:.2f} x the floor of {floor_ms:.0f} ms",
        flush=True,
    )


def _times(answers: list) -> str:
    times = sorted(answer.first_token_s * 1e3 for answer in answers)
    return f"min {times[0]:6.1f}  median {statistics.median(times):6.1f}  max {times[-1]:6.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="mp,ip,hicache,hicache_direct,plain", help=", ".join(KINDS))
    parser.add_argument("--work", type=Path, default=None, help="where logs and the model go")
    parser.add_argument("--host-gb", type=int, default=20)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="flexkv-bench-"))
    rate = copy_rate()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, plain copy {rate / 1e9:.1f} GB/s")
    for kind, server in each_kind(
        args.kinds.split(","), work, dummy_model(work / "model"), args.host_gb, *FLAGS
    ):
        server.client.generate(prompt(1, 32_000), 1, ignore_eos=True)
        server.client.generate(prompt(2, 8_000), 1, ignore_eos=True)
        for length, count in SIZES.items():
            measure(kind, server, length, count, length * KV_TOKEN_BYTES / rate * 1e3)


if __name__ == "__main__":
    main()
