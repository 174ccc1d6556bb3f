"""Stretches: consecutive blocks, each hanging below the one before, handled as one thing.

A long prompt has a thousand blocks that are stored, loaded and dropped together; what is done once for a
stretch costs the scheduler's thread next to nothing for each of its blocks.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..keys import TOKEN_BYTES, BlockChain, BlockKey

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Stretch:
    """Whole blocks in a row, or one partly filled block.

    Attributes:
        keys: The blocks, at least one.
        parent: Key that the first hangs below; each other one hangs below the one before it.
        ids: Encoded ids of tokens, those of the blocks among them: a sequence is not copied for its parts.
        at: Byte of ``ids`` at which the first block's begin.
        num_tokens: Tokens of all blocks.
        block_tokens: Tokens of a whole block.
    """

    keys: list[BlockKey]
    parent: bytes
    ids: bytes
    at: int
    num_tokens: int
    block_tokens: int

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def is_tail(self) -> bool:
        """Whether it is one partly filled block."""
        return self.num_tokens < self.block_tokens

    @property
    def tokens_each(self) -> int:
        """Tokens of each block."""
        return min(self.num_tokens, self.block_tokens)

    def tokens(self, number: int) -> bytes:
        """Encoded ids of one block's tokens."""
        size = self.tokens_each
        start = self.at + number * size * TOKEN_BYTES
        return self.ids[start : start + size * TOKEN_BYTES]

    def part(self, first: int, last: int) -> Stretch:
        """Blocks ``first`` to ``last``, the last one not included; at least one."""
        size = self.tokens_each
        parent = self.keys[first - 1] if first else self.parent
        at = self.at + first * size * TOKEN_BYTES
        return Stretch(self.keys[first:last], parent, self.ids, at, (last - first) * size, self.block_tokens)

    def own_ids(self, most: int) -> None:
        """Copy the blocks' tokens if ``ids`` is over ``most`` times as long: all of it would stay."""
        size = self.num_tokens * TOKEN_BYTES
        if len(self.ids) > most * size:
            self.ids, self.at = self.ids[self.at : self.at + size], 0

    def rows(self) -> Iterator[tuple[BlockKey, bytes, bytes]]:
        """Key, parent and encoded tokens of each block."""
        parent = self.parent
        for number, key in enumerate(self.keys):
            yield key, parent, self.tokens(number)
            parent = key


def one_block(key: BlockKey, parent: bytes, tokens: bytes, block_tokens: int) -> Stretch:
    """A block alone; ``tokens`` are its encoded ids."""
    return Stretch([key], parent, tokens, 0, len(tokens) // TOKEN_BYTES, block_tokens)


def whole_blocks(chain: BlockChain, first: int, last: int) -> Stretch:
    """Whole blocks ``first`` to ``last`` of a sequence, the last one not included."""
    size = chain.block_tokens
    keys = chain.hash_to(last)[first:last]
    at = first * size * TOKEN_BYTES
    return Stretch(keys, chain.parent(first), chain.tokens, at, (last - first) * size, size)


def tail_block(chain: BlockChain, num_tokens: int) -> Stretch:
    """The partly filled block that ends the first ``num_tokens`` tokens of a sequence."""
    block, rest = divmod(num_tokens, chain.block_tokens)
    key = chain.tail_key(num_tokens)
    return one_block(key, chain.parent(block), chain.block(block, rest), chain.block_tokens)


def in_a_row(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Rising numbers as runs, ``[first, last)``, without gaps inside."""
    if not numbers:
        return []
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return [(numbers[0], numbers[-1] + 1)]
    runs: list[tuple[int, int]] = []
    first = before = numbers[0]
    for number in numbers[1:]:
        if number != before + 1:
            runs.append((first, before + 1))
            first = number
        before = number
    runs.append((first, before + 1))
    return runs


def at_positions(values: list[T], numbers: Sequence[int]) -> list[T]:
    """Values at rising positions."""
    if not numbers:
        return []
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return values[numbers[0] : numbers[-1] + 1]
    return [values[i] for i in numbers]


def alike(here: list[BlockKey], keys: Sequence[BlockKey], at: int, stop: int) -> tuple[int, int]:
    """Which ``here[first:last]`` ``keys[at:stop]`` begins with; ``keys[at]`` is among ``here``."""
    first = 0 if here[0] == keys[at] else here.index(keys[at])
    length = min(len(here) - first, stop - at)
    if here[first : first + length] != keys[at : at + length]:
        pairs = zip(here[first:], keys[at:], strict=False)
        length = next(i for i, (mine, other) in enumerate(pairs) if mine != other)
    return first, first + length
