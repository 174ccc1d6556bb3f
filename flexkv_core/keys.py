"""Token ids -> chained block keys, under a namespace.

A block's key is a SHA-256 digest over its parent's key and its own token ids; the
first block's parent is the digest of the namespace.  So a key names a block *and
all before it*, and blocks of different models, weights, layouts, adapters or tenants
can never share one.  Keys are the same in every process and on every machine
(``tests/unit/test_keys.py`` holds golden values).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

BlockKey = bytes
"""32 bytes."""

KEY_BYTES = 32
KEY_SCHEMA = 1
TOKEN_BYTES = 8
"""Token ids are hashed and kept as little-endian signed 64-bit integers."""

REPLICATED = "replicated"
"""``Namespace.rank_slice`` of bytes that are equal on every rank."""

_BLOCK_TAG = b"flexkv.block.1\0"
_NAMESPACE_TAG = b"flexkv.namespace.1\0"


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for bytes to be reusable.

    All fields are text so that two instances can be compared by eye; ``digest`` hashes
    them with their names and lengths, so no two namespaces can run into each other.

    Attributes:
        model: Model identity (a path or hub name says little; see ``revision``).
        revision: Model revision, or a digest of its configuration.
        weights_version: Raised whenever weights change under a running engine.
        kv_dtype: Element type of the KV cache.
        layout: ``BlockLayout.fingerprint`` in hex.
        block_tokens: Tokens in a block.
        rank_slice: Which part of a block's heads and layers these bytes are, or ``replicated``.
        adapter: LoRA adapter's name; empty for none.
        adapter_digest: Digest of the adapter's content or load count.
        extra_key: The engine's own separation key; empty for none.
        cache_salt: A tenant's salt; empty for none.
    """

    model: str = ""
    revision: str = ""
    weights_version: str = "0"
    kv_dtype: str = ""
    layout: str = ""
    block_tokens: int = 64
    rank_slice: str = REPLICATED
    adapter: str = ""
    adapter_digest: str = ""
    extra_key: str = ""
    cache_salt: str = ""

    def for_request(
        self,
        *,
        adapter: str | None = None,
        adapter_digest: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Namespace:
        """The namespace of one request: this one with the request's own separators."""
        return replace(
            self,
            adapter=adapter or "",
            adapter_digest=adapter_digest or "",
            extra_key=extra_key or "",
            cache_salt=cache_salt or "",
        )

    def digest(self) -> bytes:
        """32 bytes that name this namespace; the parent of every first block."""
        h = sha256(_NAMESPACE_TAG)
        h.update(KEY_SCHEMA.to_bytes(4, "little"))
        for field in fields(self):
            name = field.name.encode()
            value = str(getattr(self, field.name)).encode("utf-8", "surrogatepass")
            h.update(len(name).to_bytes(4, "little") + name)
            h.update(len(value).to_bytes(8, "little") + value)
        return h.digest()

    def differences(self, other: Namespace) -> list[str]:
        """Names of the fields in which ``other`` differs."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


def block_key(parent: bytes, tokens: bytes | memoryview) -> BlockKey:
    """The key of the block of ``tokens`` (see ``encode_tokens``) below ``parent`` (32 bytes)."""
    h = sha256(_BLOCK_TAG)
    h.update(parent)
    h.update(tokens)
    return h.digest()


def encode_tokens(tokens: Any) -> bytes:
    """Token ids as little-endian int64 bytes: a private copy of whatever the engine passed.

    Args:
        tokens: ``array('q')``, a sequence of ints, or anything with the buffer protocol or
            ``numpy()`` that holds 64-bit integers.

    Raises:
        ValueError: an id does not fit into 64 signed bits, or the ids are not one-dimensional integers.
    """
    if isinstance(tokens, array) and tokens.typecode == "q":
        packed = tokens
    elif hasattr(tokens, "numpy") or hasattr(tokens, "__array__"):
        packed = _from_array_like(tokens)
    else:
        try:
            packed = array("q", tokens)
        except OverflowError as exc:
            raise ValueError("token ids must fit into 64 signed bits") from exc
        except TypeError as exc:
            raise ValueError(f"token ids must be integers: {exc}") from exc
    if sys.byteorder != "little":  # pragma: no cover - no such machine in the tests
        packed = array("q", packed)
        packed.byteswap()
    return packed.tobytes()


def _from_array_like(tokens: Any) -> array[int]:
    view = tokens.numpy() if hasattr(tokens, "numpy") else tokens.__array__()
    if view.ndim != 1 or view.dtype.kind not in "iu":
        raise ValueError(f"token ids must be one-dimensional integers, got {view.dtype} {view.shape}")
    if view.dtype == "uint64" and view.size and view.max() >> 63:
        raise ValueError("token ids must fit into 64 signed bits")
    packed = array("q")
    packed.frombytes(view.astype("int64").tobytes())
    return packed


def decode_tokens(encoded: bytes | memoryview) -> list[int]:
    """The ids behind ``encode_tokens``."""
    unpacked = array("q")
    unpacked.frombytes(encoded)
    if sys.byteorder != "little":  # pragma: no cover
        unpacked.byteswap()
    return unpacked.tolist()


class BlockChain:
    """One token sequence under a namespace, cut into blocks whose keys are made when asked for.

    A query that misses in its first block hashes one block, however long the prompt.

    Threads: none of its own; one owner.
    """

    __slots__ = ("_keys", "block_tokens", "num_tokens", "root", "tokens")

    def __init__(self, root: bytes, block_tokens: int, tokens: bytes) -> None:
        """Cut ``tokens`` (see ``encode_tokens``) into blocks below ``root`` (32 bytes)."""
        self.root = root
        self.block_tokens = block_tokens
        self.tokens = tokens
        self.num_tokens = len(tokens) // TOKEN_BYTES
        self._keys: list[BlockKey] = []

    @property
    def num_full_blocks(self) -> int:
        """Whole blocks in the sequence."""
        return self.num_tokens // self.block_tokens

    def hash_to(self, count: int) -> list[BlockKey]:
        """The keys so far, after making sure of the first ``count`` (at most all whole blocks).

        The list is this object's own: read it, do not change it.
        """
        keys = self._keys
        count = min(count, self.num_full_blocks)
        made = len(keys)
        if made < count:
            step = self.block_tokens * TOKEN_BYTES
            tokens = self.tokens
            parent = keys[-1] if keys else self.root
            for at in range(made * step, count * step, step):
                parent = sha256(_BLOCK_TAG + parent + tokens[at : at + step]).digest()
                keys.append(parent)
        return keys

    def key(self, block: int) -> BlockKey:
        """Key of whole block number ``block``."""
        if not 0 <= block < self.num_full_blocks:
            raise IndexError(f"block {block} of {self.num_full_blocks}")
        return self.hash_to(block + 1)[block]

    def keys(self, count: int | None = None) -> list[BlockKey]:
        """Keys of the first ``count`` whole blocks (default: of all), a copy."""
        count = self.num_full_blocks if count is None else count
        return self.hash_to(count)[:count]

    def adopt_keys(self, other: BlockChain) -> None:
        """Take over the keys of a sequence with the same beginning: a longer or shorter one, for one."""
        if other.root != self.root or other.block_tokens != self.block_tokens or self._keys:
            return
        step = self.block_tokens * TOKEN_BYTES
        same = min(len(other._keys), self.num_full_blocks)
        if self.tokens[: same * step] == other.tokens[: same * step]:
            self._keys = other._keys[:same]

    def move(self, root: bytes) -> None:
        """Hang the blocks below another namespace: their keys are made anew, in a list of their own."""
        self.root, self._keys = root, []

    def parent(self, block: int) -> bytes:
        """What block number ``block`` hangs below: the key before it, or the namespace."""
        return self.key(block - 1) if block else self.root

    def block(self, block: int, num_tokens: int | None = None) -> bytes:
        """Encoded ids of block number ``block``, cut to ``num_tokens``; shorter at the end."""
        start = block * self.block_tokens
        stop = min(start + (num_tokens or self.block_tokens), self.num_tokens)
        return self.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]

    def tail_key(self, num_tokens: int) -> BlockKey:
        """Key of the partly filled block that ends the first ``num_tokens`` tokens."""
        block, rest = divmod(num_tokens, self.block_tokens)
        if not rest:
            return self.key(block - 1)
        return block_key(self.parent(block), self.block(block, rest))


def common_tokens(a: bytes | memoryview, b: bytes | memoryview) -> int:
    """How many leading tokens two encoded sequences share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // TOKEN_BYTES
    low, high = 0, n // TOKEN_BYTES
    while high - low > 1:
        mid = (low + high) // 2
        if a[low * TOKEN_BYTES : mid * TOKEN_BYTES] == b[low * TOKEN_BYTES : mid * TOKEN_BYTES]:
            low = mid
        else:
            high = mid
    return low


def short(key: bytes) -> str:
    """The first 12 hex digits of a key, for logs."""
    return key[:6].hex()


def distinct(keys: Iterable[BlockKey]) -> list[BlockKey]:
    """Keys in order, each once."""
    return list(dict.fromkeys(keys))


__all__: Sequence[str] = (
    "KEY_BYTES",
    "KEY_SCHEMA",
    "REPLICATED",
    "TOKEN_BYTES",
    "BlockChain",
    "BlockKey",
    "Namespace",
    "block_key",
    "common_tokens",
    "decode_tokens",
    "distinct",
    "encode_tokens",
    "short",
)
