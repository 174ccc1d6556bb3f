"""Index and request -> plan.  Pure: no I/O, no clock, no threads.

A plan says which blocks are moved and which of their tokens; who moves them, and into which slots,
is decided later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .index import Hit
from .keys import BlockChain, BlockKey


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """One block of a load.

    Attributes:
        key: The block.
        stored_tokens: Tokens of the whole stored block.
        first: First token of it that is wanted.
        last: One behind the last.
        tier: Where it is now.
        parent: Key that the block hangs below.
        tokens: Encoded ids of its tokens as far as the prompt knows them.
    """

    key: BlockKey
    stored_tokens: int
    first: int
    last: int
    tier: int
    parent: bytes
    tokens: bytes


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """One block of a store.

    Attributes:
        key: The block.
        parent: Key that it hangs below.
        tokens: Encoded ids of all its tokens.
        start: Place of its first token in the sequence.
        num_tokens: Tokens in it.
    """

    key: BlockKey
    parent: bytes
    tokens: bytes
    start: int
    num_tokens: int


def hit_tokens(hits: Sequence[Hit]) -> int:
    """Tokens that the hits cover."""
    return sum(hit.num_tokens for hit in hits)


def plan_load(chain: BlockChain, hits: Sequence[Hit], start: int) -> list[LoadBlock]:
    """Blocks that bring tokens ``start`` to the end of ``hits``.

    ``start`` may lie inside a block: the engine has that block's beginning already.
    """
    blocks = []
    for number, hit in enumerate(hits):
        begin = number * chain.block_tokens
        if begin + hit.num_tokens <= start:
            continue
        first = max(0, start - begin)
        blocks.append(
            LoadBlock(
                hit.key,
                hit.stored_tokens,
                first,
                hit.num_tokens,
                hit.tier,
                chain.parent(number),
                chain.block(number),
            )
        )
    return blocks


def plan_store(
    chain: BlockChain,
    num_tokens: int,
    is_there: Callable[[BlockKey], bool],
    *,
    page_tokens: int,
    with_tail: bool,
) -> list[StoreBlock]:
    """Blocks of the first ``num_tokens`` tokens that are not there yet, in order.

    Args:
        chain: The sequence, under its namespace.
        num_tokens: Tokens whose KV is final.
        is_there: Whether a block is kept, or on its way, in the tier that stores go to.
        page_tokens: The engine's page: the tail is cut to a multiple of it.
        with_tail: Whether the last, partly filled block is stored too.
    """
    num_tokens = min(num_tokens, chain.num_tokens) // page_tokens * page_tokens
    whole = num_tokens // chain.block_tokens
    blocks = []
    for number, key in enumerate(chain.keys(whole)):
        if not is_there(key):
            blocks.append(
                StoreBlock(
                    key,
                    chain.parent(number),
                    chain.block(number),
                    number * chain.block_tokens,
                    chain.block_tokens,
                )
            )
    rest = num_tokens - whole * chain.block_tokens
    if with_tail and rest:
        key = chain.tail_key(num_tokens)
        if not is_there(key):
            blocks.append(
                StoreBlock(
                    key,
                    chain.parent(whole),
                    chain.block(whole, rest),
                    whole * chain.block_tokens,
                    rest,
                )
            )
    return blocks
