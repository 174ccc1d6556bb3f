"""KV of a real model: SmolLM2-135M's keys and values of a text, by a forward pass in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional


@dataclass(frozen=True)
class TextKv:
    """What a forward pass left behind.

    Attributes:
        planes: Layer 0's K, its V, layer 1's K, ...; (planes, tokens, heads * dim), bfloat16.
        next_token: What the model would say next, for a look at whether it is the model.
    """

    planes: torch.Tensor
    next_token: str


class SmolLM2:
    """The model at float32; its KV is rounded to bfloat16, as servers keep it."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._dim = config["head_dim"]
        self._layers = config["num_hidden_layers"]
        self._theta, self._eps = config["rope_parameters"]["rope_theta"], config["rms_norm_eps"]
        self._weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @torch.inference_mode()
    def kv(self, text: str) -> TextKv:
        """The KV of a text's tokens."""
        ids = self._tokenizer.encode(text).ids
        turns = self._turns(len(ids))
        embedding = self._weights["model.embed_tokens.weight"]
        hidden = embedding[ids]
        planes: list[torch.Tensor] = []
        for layer in range(self._layers):
            hidden = self._layer(f"model.layers.{layer}.", hidden, turns, planes)
        last = self._norm(hidden[-1:], "model.norm.weight")[0]
        return TextKv(torch.stack(planes), self._tokenizer.decode([int((embedding @ last).argmax())]))

    def _turns(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        steps = self._theta ** (-torch.arange(0, self._dim, 2) / self._dim)
        angles = torch.outer(torch.arange(count), steps).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _layer(self, name: str, hidden: torch.Tensor, turns: Any, planes: list[torch.Tensor]) -> torch.Tensor:
        normed = self._norm(hidden, f"{name}input_layernorm.weight")
        query, key, value = (
            self._linear(normed, f"{name}self_attn.{which}_proj").view(len(hidden), -1, self._dim)
            for which in "qkv"
        )
        query, key = _turned(query, turns), _turned(key, turns)
        planes += [rows.flatten(1).bfloat16() for rows in (key, value)]
        wide = [rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value)]
        seen = functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
        hidden = hidden + self._linear(seen[0].transpose(0, 1).flatten(1), f"{name}self_attn.o_proj")
        normed = self._norm(hidden, f"{name}post_attention_layernorm.weight")
        gate = functional.silu(self._linear(normed, f"{name}mlp.gate_proj"))
        return hidden + self._linear(
            gate * self._linear(normed, f"{name}mlp.up_proj"), f"{name}mlp.down_proj"
        )

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(rows, self._weights[f"{name}.weight"])

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], self._weights[name], self._eps)


def _turned(rows: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions: tokens are dimension 0, pairs lie half a row apart."""
    cosine, sine = (angle.unsqueeze(1) for angle in turns)
    first, second = rows.chunk(2, dim=-1)
    return rows * cosine + torch.cat([-second, first], dim=-1) * sine
