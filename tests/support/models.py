"""Tiny random language models and LoRA adapters that SGLang loads, written when a test needs them."""

from __future__ import annotations

import json
from pathlib import Path

ADAPTER_RANK = 4
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, MAX_TOKENS = 64, 2, 4, 2, 16, 1000, 4096
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
"""KV bytes of one token at float32."""


def write_tiny_model(folder: Path, arch: str = "llama", seed: int = 0) -> Path:
    """Write a random ``llama``, ``qwen3`` or ``mellum`` checkpoint and a tokenizer of one token a byte.

    Its weights are of normal scale and it attends to all of its context, so that wrong KV shows
    in its output.  ``mellum`` is a hybrid: every other layer sees a window of 32 tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, arch, seed)
    (folder / "config.json").write_text(json.dumps(_config(arch), indent=1))
    _write_tokenizer(folder)
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


def _write_weights(folder: Path, arch: str, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale or columns**-0.5)

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN, 1.0),
    }
    for layer in range(LAYERS):
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
        if arch != "llama":
            norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        weights |= {f"{prefix}{name}.weight": torch.ones(size) for name, size in norms.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _config(arch: str) -> dict[str, object]:
    common = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 2 * HIDDEN,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
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


def _write_tokenizer(folder: Path) -> None:
    """One token a byte of text, so that different texts are different tokens; the rest is filler."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet]
    words += [f"<{i}>" for i in range(len(words), VOCABULARY)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
