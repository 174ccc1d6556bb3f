"""Are a server's answers the same from host memory as from the device, with weights that show wrong KV?

    python benchmarks/gpu/outputs.py [--modes mp,ip] [--pages 1,64] [--work FOLDER]

A seeded Qwen3-shaped model with weights of normal scale is written here.  Each prompt is asked three times:
computed, from the device's own tree, and, after a flush, from the host tier.  The last two run the same
kernels over the same KV, so their tokens and the log probabilities of these must be equal to the last bit;
anything else is wrong KV.  ``flexkv verify`` follows, against a server without the chain.  Exit status 1 if
anything differs, or if nothing came from the tiers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from servers import QWEN3_8B, ROOT, serving

from flexkv_core.cli._process import ServerProcess

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 6, 1024, 8, 4, 128, 4096
SIZES = (5, 63, 64, 65, 300, 1000, 4000)
NEW = 24


def write_model(folder: Path) -> list[str]:
    """Write the checkpoint and a tokenizer of one token a byte; returns the flags that load it."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        weights = torch.randn(rows, columns, generator=generator) * (scale or columns**-0.5)
        return weights.to(torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": normal(VOCABULARY, HIDDEN, 1.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
            "mlp.up_proj": (2 * HIDDEN, HIDDEN),
            "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
        }
        norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        weights |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        weights |= {
            f"{prefix}{n}.weight": torch.ones(size, dtype=torch.bfloat16) for n, size in norms.items()
        }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    own = {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": 2 * HIDDEN,
        "vocab_size": VOCABULARY, "max_window_layers": LAYERS, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | own))
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{i}>" for i in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ["--model-path", str(folder)]


def answer(server: ServerProcess, ids: list[int]) -> tuple[list[int], list[float], dict[str, int]]:
    """Tokens, their log probabilities, and cached tokens by where they came from."""
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    with server.client._open("/generate", body) as response:
        said = json.loads(response.read())
    meta = said["meta_info"]
    rows = meta["output_token_logprobs"]
    return [row[1] for row in rows], [row[0] for row in rows], meta.get("cached_tokens_details") or {}


def check(mode: str, page: int, server: ServerProcess) -> int:
    """Ask every prompt three times; how many were wrong."""
    wrong = 0
    for size in SIZES:
        rng = torch.Generator().manual_seed(size)
        ids = torch.randint(3, VOCABULARY, (size,), generator=rng).tolist()
        answer(server, ids)
        here_tokens, here_logprobs, _ = answer(server, ids)
        server.client.flush()
        tokens, logprobs, tiers = answer(server, ids)
        came = tiers.get("host", 0)
        expected = (size - 1) // page * page
        is_equal = tokens == here_tokens and logprobs == here_logprobs
        wrong += not is_equal or came < expected
        print(
            f"  {mode} page {page:2}, {size:5} tokens: {came:5} from the host (of {expected}), "
            f"{'equal to the last bit' if is_equal else 'DIFFERENT'}",
            flush=True,
        )
        server.client.flush()
    return wrong


def verify(phase: str, server: ServerProcess, work: Path) -> int:
    command = [sys.executable, "-m", "flexkv_core", "verify", "--host", f"127.0.0.1:{server.port}"]
    command += ["--phase", phase, "--baseline-file", str(work / "baseline.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print("\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()), flush=True)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default="mp,ip")
    parser.add_argument("--pages", default="1,64")
    parser.add_argument("--work", type=Path, default=None, help="where logs and the model go")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="flexkv-bench-"))
    model = write_model(work / "seeded")
    wrong = 0
    for page in args.pages.split(","):
        flags = ("--page-size", page, "--max-total-tokens", "16384", "--cuda-graph-max-bs-decode", "4")
        with serving("plain", work, model, 2, *flags) as plain:
            wrong += verify("baseline", plain, work)
        for mode in args.modes.split(","):
            with serving(mode, work, model, 2, *flags) as server:
                wrong += check(mode, int(page), server)
                wrong += verify("test", server, work)
    print("all equal" if not wrong else f"{wrong} WRONG")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
