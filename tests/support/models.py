"""Tiny random language models and LoRA adapters that SGLang loads, written when a test needs them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks._seeded_model import Shape, write_model

ADAPTER_RANK = 4
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, MAX_TOKENS = 64, 2, 4, 2, 16, 1000, 4096
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
"""KV bytes of one token at float32."""


def write_tiny_model(folder: Path, arch: str = "llama", seed: int = 0) -> Path:
    """Write a random ``llama``, ``qwen3`` or ``mellum`` checkpoint and a tokenizer of one token a byte.

    Its weights are of normal scale and it attends to all of its context, so that wrong KV shows
    in its output.  ``mellum`` is a hybrid: every other layer sees a window of 32 tokens.
    """
    shape = Shape(LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, normalizes_qk=arch != "llama")
    write_model(folder, shape, _config(arch), seed=seed)
    return folder


def write_tiny_adapter(folder: Path, seed: int) -> Path:
    """Write a random LoRA adapter of ``write_tiny_model``'s attention, strong enough to change answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1000 + seed)
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    weights = {}
    for layer in range(LAYERS):
        for name, size in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(ADAPTER_RANK, HIDDEN, generator=generator) * 0.2
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, ADAPTER_RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(rows),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    return folder


def _config(arch: str) -> dict[str, object]:
    common = {
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    own = {
        "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False},
        "qwen3": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": LAYERS,
        },
        "mellum": {
            "architectures": ["MellumForCausalLM"],
            "model_type": "mellum",
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "mlp_layer_types": ["dense"] * LAYERS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    }
    if arch == "mellum":
        del common["rope_theta"]  # it has one for each kind of layer
    return common | own[arch]
