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

from benchmarks._seeded_model import Shape, write_model
from flexkv_core.cli._process import ServerProcess

SHAPE = Shape(layers=6, hidden=1024, heads=8, kv_heads=4, head_dim=128, vocabulary=4096, normalizes_qk=True)
SIZES = (5, 63, 64, 65, 300, 1000, 4000)
NEW = 24


def seeded_model(folder: Path) -> list[str]:
    """Write the model; returns the flags that load it."""
    write_model(folder, SHAPE, QWEN3_8B | {"max_window_layers": SHAPE.layers}, dtype="bfloat16")
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
        ids = torch.randint(3, SHAPE.vocabulary, (size,), generator=rng).tolist()
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
    model = seeded_model(work / "seeded")
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
