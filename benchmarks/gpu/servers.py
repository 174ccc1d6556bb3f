"""Real SGLang servers on one GPU, one of each kind that is compared.  Shared by the scripts beside it.

``plain``: the radix cache.  ``hicache`` and ``hicache_direct``: SGLang's own host tier, with its kernels and
with the copy engine.  ``mp`` and ``ip``: this project, with loads waited for whole and layer by layer.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if (ROOT / "flexkv_core").is_dir():
    sys.path.insert(0, str(ROOT))

from flexkv_core.cli._process import ServerProcess
from flexkv_core.errors import EngineError

KINDS = ("plain", "hicache", "hicache_direct", "mp", "ip")
KV_TOKEN_BYTES = 147_456
"""KV of one token of Qwen3-8B's shape at bf16."""
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_COMMON = [
    *("--attention-backend", "fa3", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.7", "--mm-feature-transport", "cpu", "--random-seed", "1"),
    "--disable-prefill-cuda-graph",
]
_START_S = 300.0
"""The first server of a machine compiles SGLang's own kernels."""


def dummy_model(folder: Path) -> list[str]:
    """Flags of a model of Qwen3-8B's shape with dummy weights and no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return ["--model-path", str(folder), "--load-format", "dummy", "--skip-tokenizer-init"]


def flags_of(kind: str, work: Path, host_gb: int) -> list[str]:
    """What selects a kind of cache, with a host tier of ``host_gb`` GB."""
    if kind == "plain":
        return []
    if kind.startswith("hicache"):
        flags = ["--enable-hierarchical-cache", "--hicache-size", str(host_gb)]
        flags += ["--hicache-write-policy", "write_through"]
        if kind == "hicache_direct":
            flags += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"]
        return flags
    chain = work / f"{kind}.yaml"
    layerwise = {"mp": "false", "ip": "true"}[kind]
    chain.write_text(
        f"version: 1\nblock_tokens: 64\nengine: {{layerwise: {layerwise}}}\n"
        f"tiers:\n  - {{name: host, driver: cpu, options: {{capacity: {host_gb}GB}}}}\n"
    )
    return ["--radix-cache-backend", "flexkv", "--flexkv-config-file", str(chain)]


@contextmanager
def serving(kind: str, work: Path, model: Sequence[str], host_gb: int, *more: str) -> Iterator[ServerProcess]:
    """A server of one kind, stopped at the end; its log is ``work/KIND.log``."""
    flags = [*model, *_COMMON, *flags_of(kind, work, host_gb), *more]
    server = ServerProcess(flags, log=work / f"{kind}.log", timeout_s=300)
    try:
        server.start(_START_S)
        print(f"{kind}: ready after {server.startup_s:.0f} s", flush=True)
        yield server
    finally:
        server.stop(15)


def each_kind(
    kinds: Sequence[str], work: Path, model: Sequence[str], host_gb: int, *more: str
) -> Iterator[tuple[str, ServerProcess]]:
    """One server after another; a kind that does not start is named, and the next one follows."""
    work.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        try:
            with serving(kind, work, model, host_gb, *more) as server:
                yield kind, server
        except EngineError as exc:
            print(f"{kind}: {exc}", flush=True)


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Random token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 150_000) for _ in range(num_tokens)]
