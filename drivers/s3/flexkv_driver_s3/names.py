"""Where things lie in the bucket.

``PREFIX/LAYOUT/blocks/SHARD/KEY`` one value each; ``PREFIX/LAYOUT/journal/TIME-WRITER-NUMBER`` what was
stored lately; ``PREFIX/LAYOUT/namespaces/ID.json`` for people.  LAYOUT is the layout's fingerprint, so
that a chain lists no values that it could not use; KEY is 64 hex digits, SHARD its first few.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv_core import BlockKey

_KEY_HEX = 64


@dataclass(frozen=True, slots=True)
class Names:
    """Names below one prefix and layout.

    Attributes:
        root: ``PREFIX/LAYOUT`` without a slash at its end.
        shard_chars: Hex digits in a shard's name; 0 for no shards.
    """

    root: str
    shard_chars: int

    @property
    def blocks(self) -> str:
        """What all values' names begin with."""
        return f"{self.root}/blocks/"

    @property
    def journal(self) -> str:
        """What all journal entries' names begin with."""
        return f"{self.root}/journal/"

    def block(self, key: BlockKey) -> str:
        """Name of a value."""
        text = key.hex()
        shard = f"{text[: self.shard_chars]}/" if self.shard_chars else ""
        return f"{self.root}/blocks/{shard}{text}"

    def key(self, name: str) -> BlockKey | None:
        """The key of a value's name; None for anything else that lies there."""
        text = name.rpartition("/")[2]
        if len(text) != _KEY_HEX:
            return None
        try:
            key = bytes.fromhex(text)
        except ValueError:
            return None
        return key if self.block(key) == name else None


def names_of(prefix: str, fingerprint: bytes, shard_chars: int) -> Names:
    """Names for a layout below a prefix."""
    layout = fingerprint.hex()
    return Names(f"{prefix}/{layout}" if prefix else layout, shard_chars)
