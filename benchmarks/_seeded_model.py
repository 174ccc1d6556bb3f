"""Random language models that SGLang loads, the same for the same seed.

Weights are of normal scale, so that wrong KV shows in what a model says.  Tests use it, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of Llama's or Qwen3's kind; the MLP is twice as wide as the rest.

    Attributes:
        normalizes_qk: Whether queries and keys are normalized, as Qwen3 does it.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    normalizes_qk: bool

    def config(self) -> dict[str, object]:
        """These sizes, as ``config.json`` names them."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": 2 * self.hidden,
            "vocab_size": self.vocabulary,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


def write_model(
    folder: Path, shape: Shape, config: Mapping[str, object], *, seed: int = 0, dtype: str = "float32"
) -> None:
    """Write a checkpoint and a tokenizer of one token a byte.

    Args:
        folder: Created if it is missing.
        shape: Sizes; they win over ``config``.
        config: What else ``config.json`` says.
        seed: Of the weights.
        dtype: Of the weights, as torch names it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, shape, seed, dtype)
    (folder / "config.json").write_text(json.dumps({**config, **shape.config()}, indent=1))
    _write_tokenizer(folder, shape.vocabulary)


def _write_weights(folder: Path, shape: Shape, seed: int, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)

    def normal(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * (scale or columns**-0.5)).to(kind)

    weights = {
        "model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden, 1.0),
        "model.norm.weight": torch.ones(shape.hidden, dtype=kind),
        "lm_head.weight": normal(shape.vocabulary, shape.hidden, 1.0),
    }
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes = {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (2 * shape.hidden, shape.hidden),
        "mlp.up_proj": (2 * shape.hidden, shape.hidden),
        "mlp.down_proj": (shape.hidden, 2 * shape.hidden),
    }
    norms = {"input_layernorm": shape.hidden, "post_attention_layernorm": shape.hidden}
    if shape.normalizes_qk:
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": normal(*size) for name, size in shapes.items()}
        weights |= {f"{prefix}{name}.weight": torch.ones(size, dtype=kind) for name, size in norms.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One token a byte of text, so that different texts are different tokens; the rest is filler."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{i}>" for i in range(len(words), vocabulary)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
