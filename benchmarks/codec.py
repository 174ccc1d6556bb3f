"""What a tier's codec does to real KV: how much it shrinks, how fast, and below which bandwidth it pays.

    python benchmarks/codec.py [--blocks 8] [--rounds 5]

KV of SmolLM2-135M over the demonstration's document, in bfloat16 and in the chain's layout (plane after
plane), and random bytes, which nothing shrinks.  Values go through the encoding that a tier uses, block by
block; rates are bytes of plain KV by processor time of the one thread, medians of rounds in which all
take turns.  The reference of the same run is a copy of the same values.

Alone means one call at a time: its thread encodes and then sends, or receives and then decodes.
Compression pays below that bandwidth of the tier, and costs time above it.  Several calls at once, on
processors of their own, move it up to that many times further.

``split`` is no codec of ours: all numbers' first bytes, then all second ones, and then zstd.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import zstandard

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._smollm2_kv import SmolLM2
from flexkv_core import BlockLayout, kv_layout
from flexkv_core.cli._demo_model import is_complete, write_smollm2
from flexkv_core.cli._demo_text import DOCUMENT_ANSWER, document
from flexkv_core.envelope import seal, write_header
from flexkv_core.models import CodecConfig
from flexkv_core.wrappers.encoding import Encoding, stored_bytes

ENTRIES = 57
BLOCK_TOKENS = 64
ENCRYPT = {"key": os.urandom(32).hex()}
CODECS = {
    "zstd 1": {"compress": "zstd", "level": 1},
    "zstd 3": {"compress": "zstd", "level": 3},
    "AES-GCM": {"encrypt": ENCRYPT},
    "zstd 1, AES": {"compress": "zstd", "level": 1, "encrypt": ENCRYPT},
    "zstd 3, AES": {"compress": "zstd", "level": 3, "encrypt": ENCRYPT},
}
Step = Callable[[memoryview, memoryview], int]


@dataclass
class Contender:
    """Two steps, each from a view into a view with the length as its result; and what they took."""

    encode: Step
    decode: Step
    num_bytes: int = 0
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


def copy(source: memoryview, into: memoryview) -> int:
    into[: len(source)] = source
    return len(source)


def of_encoding(config: CodecConfig, layout: BlockLayout) -> Contender:
    encoding, key = Encoding(config, layout), bytes(32)
    return Contender(
        lambda value, into: encoding.encode(key, value, into),
        lambda stored, into: encoding.decode(key, stored, into),
    )


def of_split(level: int) -> Contender:
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def encode(value: memoryview, into: memoryview) -> int:
        pairs = np.frombuffer(value, np.uint8).reshape(-1, 2)
        return copy(memoryview(compressor.compress(np.ascontiguousarray(pairs.T))), into)

    def decode(stored: memoryview, into: memoryview) -> int:
        halves = np.frombuffer(decompressor.decompress(stored), np.uint8).reshape(2, -1)
        np.frombuffer(into[: halves.size], np.uint8).reshape(-1, 2)[:] = halves.T
        return int(halves.size)

    return Contender(encode, decode)


def contenders(layout: BlockLayout) -> dict[str, Contender]:
    codecs = {
        name: of_encoding(CodecConfig.model_validate(options), layout) for name, options in CODECS.items()
    }
    return {"copy": Contender(copy, copy), **codecs, "split, zstd 1": of_split(1)}


def measure(value: memoryview, one: Contender, stored: memoryview, back: memoryview) -> None:
    """Encode and decode one value, and look at what came back."""
    began = time.thread_time()
    length = one.encode(value, stored)
    encoded = time.thread_time()
    got = one.decode(stored[:length], back)
    decoded = time.thread_time()
    assert back[:got] == value, "other bytes came back"
    one.num_bytes += length
    one.encode_s[-1] += encoded - began
    one.decode_s[-1] += decoded - encoded


def compare(values: list[memoryview], layout: BlockLayout, rounds: int) -> None:
    """Print a row for each contender."""
    room = stored_bytes(CodecConfig.model_validate(CODECS["AES-GCM"]), layout) + (1 << 16)
    stored, back = memoryview(bytearray(room)), memoryview(bytearray(layout.slot_bytes))
    rows = contenders(layout)
    for number in range(rounds + 1):  # the first warms up
        for one in rows.values():
            if number == 1:
                one.encode_s.clear(), one.decode_s.clear()
            one.num_bytes = 0
            one.encode_s.append(0.0), one.decode_s.append(0.0)
            for value in values:
                measure(value, one, stored, back)
    plain = sum(map(len, values))
    print("                  shrinks   encode    decode   pays alone below: stores     loads")
    for name, one in rows.items():
        ratio = plain / one.num_bytes
        rates = [plain / statistics.median(times) / 1e6 for times in (one.encode_s, one.decode_s)]
        line = f"  {name:14}   {ratio:6.3f}x {rates[0]:7.0f}   {rates[1]:7.0f} MB/s"
        if ratio > 1.01:
            line += "".join(f"{rate * (1 - 1 / ratio):14.0f}" for rate in rates) + " MB/s"
        print(line)


def blocks(planes: np.ndarray, layout: BlockLayout, count: int) -> list[memoryview]:
    """``count`` full blocks out of the whole text, each with its header."""
    num_blocks = planes.shape[1] // BLOCK_TOKENS
    found = []
    for number in np.linspace(0, num_blocks - 1, min(count, num_blocks)).astype(int):
        slot = memoryview(bytearray(layout.slot_bytes))
        rows = planes[:, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
        write_header(slot, layout, os.urandom(32), os.urandom(32), bytes(8 * BLOCK_TOKENS))
        slot[layout.header_bytes :][: layout.block_bytes] = memoryview(np.ascontiguousarray(rows)).cast("B")
        found.append(slot[: seal(slot, layout)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = ROOT / ".cache" / "demo" / "smollm2-135m"
    if not is_complete(model):
        write_smollm2(model)
    kv = SmolLM2(model).kv(document(ENTRIES))
    assert kv.next_token.strip() == DOCUMENT_ANSWER[:3], f"the model says {kv.next_token!r}"
    num_planes, num_tokens, row = kv.planes.shape
    layout = kv_layout(num_layers=num_planes // 2, row_bytes=2 * row, block_tokens=BLOCK_TOKENS)
    values = blocks(kv.planes.view(torch.int16).numpy(), layout, args.blocks)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, zstandard {version('zstandard')}, "
        f"cryptography {version('cryptography')}"
    )
    size = f"{len(values)} blocks of {BLOCK_TOKENS} tokens, {len(values[0]) / 1e6:.2f} MB"
    print(f"{size}; median of {args.rounds}")
    print(f"KV of SmolLM2-135M, {num_tokens} tokens of text, bfloat16:")
    compare(values, layout, args.rounds)
    print("random bytes:")
    compare([memoryview(os.urandom(len(value))) for value in values], layout, args.rounds)


if __name__ == "__main__":
    main()
