"""Matching: the longest prefix of a prompt whose blocks are ready.

Pure: it looks at the index's tables and changes nothing.  Whole blocks are found by their keys.  Siblings
are kept in the order of their token ids, so that the longest common prefix with what follows, which may
end inside a block, is found between two neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .keys import TOKEN_BYTES, BlockChain, BlockKey, common_tokens
from .policy import Used

_FIRST_STRIDE = 16

Ready = Mapping[BlockKey, Used]
"""The places of one tier that may be read."""
Children = Mapping[bytes, Sequence[tuple[bytes, BlockKey]]]
"""Below each key the blocks that follow it, in the order of their token ids."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive whole blocks whose fastest ready place is in one tier.

    Attributes:
        tier: Which tier.
        first: Number of the first block in the prompt.
        last: One behind the last.
    """

    tier: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Inside:
    """A block that shares only its beginning with the prompt.

    Attributes:
        key: The block's key.
        num_tokens: Leading tokens that match.
        stored_tokens: Tokens of the whole block.
        tier: The fastest tier that holds it ready.
    """

    key: BlockKey
    num_tokens: int
    stored_tokens: int
    tier: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix that is ready: whole blocks from block 0, then at most one partly matched.

    Attributes:
        runs: Whole blocks, without a gap.
        inside: What follows them, if anything.
        block_tokens: Tokens in a whole block.
    """

    runs: tuple[Run, ...]
    inside: Inside | None
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        """Whole blocks."""
        return self.runs[-1].last if self.runs else 0

    @property
    def num_tokens(self) -> int:
        """Tokens from token 0."""
        rest = self.inside.num_tokens if self.inside is not None else 0
        return self.num_blocks * self.block_tokens + rest

    def tokens_by_tier(self, start: int) -> dict[int, int]:
        """Tokens behind ``start`` by tier."""
        counts: dict[int, int] = {}
        for run in self.runs:
            count = run.last * self.block_tokens - max(run.first * self.block_tokens, start)
            if count > 0:
                counts[run.tier] = counts.get(run.tier, 0) + count
        if self.inside is not None:
            count = self.num_tokens - max(self.num_blocks * self.block_tokens, start)
            if count > 0:
                counts[self.inside.tier] = counts.get(self.inside.tier, 0) + count
        return counts


@dataclass(frozen=True, slots=True)
class Usable:
    """Which tiers may be read now.

    Attributes:
        tiers: Their numbers, fast to slow.
        oldest: Per tier of the chain the creation time before which a place has expired; -inf for never.
    """

    tiers: Sequence[int]
    oldest: Sequence[float]


def longest_match(
    chain: BlockChain,
    max_tokens: int,
    page_tokens: int,
    usable: Usable,
    ready: Sequence[Ready],
    children: Children,
) -> Match:
    """The longest prefix of ``chain`` that is ready in the usable tiers.

    Args:
        chain: The prompt, under its namespace.
        max_tokens: Tokens that may be matched at most.
        page_tokens: The last block may be matched to a multiple of this.
        usable: Which tiers may be read.
        ready: Each tier's table.
        children: The tree.
    """
    size = chain.block_tokens
    max_tokens = min(max_tokens, chain.num_tokens)
    runs = _match_whole(chain, max_tokens // size, usable, ready)
    block = runs[-1].last if runs else 0
    rest = max_tokens - block * size
    inside = None
    if rest >= page_tokens:
        inside = _match_inside(chain, block, rest, page_tokens, usable, ready, children)
    return Match(tuple(runs), inside, size)


def _match_whole(chain: BlockChain, whole: int, usable: Usable, ready: Sequence[Ready]) -> list[Run]:
    runs: list[Run] = []
    tables = [(tier, ready[tier], usable.oldest[tier]) for tier in usable.tiers]
    block = 0
    stride = _FIRST_STRIDE
    while block < whole:
        # Keys are made in growing strides, so that a miss costs little, however long the prompt.
        keys = chain.hash_to(min(whole, block + stride))
        stride *= 4
        known = min(len(keys), whole)
        while block < known:
            found = _fastest_run(tables, keys, block, known)
            if found is None:
                return runs
            tier, last = found
            if runs and runs[-1].tier == tier:
                runs[-1] = Run(tier, runs[-1].first, last)
            else:
                runs.append(Run(tier, block, last))
            block = last
    return runs


def _fastest_run(
    tables: Sequence[tuple[int, Ready, float]],
    keys: Sequence[BlockKey],
    block: int,
    known: int,
) -> tuple[int, int] | None:
    """The fastest tier that has ``keys[block]``, and where the run of blocks it is fastest for ends."""
    for number, (tier, ready, oldest) in enumerate(tables):
        place = ready.get(keys[block])
        if place is None or place.created < oldest:
            continue
        last = block + 1
        faster = [table for _, table, _ in tables[:number]]
        never_expires = oldest == float("-inf")
        while (
            last < known
            and keys[last] in ready
            and (never_expires or ready[keys[last]].created >= oldest)
            and not any(keys[last] in table for table in faster)
        ):
            last += 1
        return tier, last
    return None


def _match_inside(
    chain: BlockChain,
    block: int,
    rest: int,
    page_tokens: int,
    usable: Usable,
    ready: Sequence[Ready],
    children: Children,
) -> Inside | None:
    """The sibling that shares most leading tokens with the prompt's next block."""
    siblings = children.get(chain.parent(block))
    if not siblings:
        return None
    wanted = chain.block(block, min(rest, chain.block_tokens))
    at = bisect_left(siblings, (wanted, b""))
    best: Inside | None = None
    # The longest common prefix is with a neighbour; further ones never share more, and are looked
    # at only where a nearer one is not ready, or shares as much and lies in a slower tier.
    for neighbours in (range(at, len(siblings)), range(at - 1, -1, -1)):
        for i in neighbours:
            tokens, key = siblings[i]
            shared = common_tokens(wanted, tokens) // page_tokens * page_tokens
            if shared == 0 or (best is not None and shared < best.num_tokens):
                break
            tier = _fastest(key, usable, ready)
            if tier < 0:
                continue
            if best is None or shared > best.num_tokens or tier < best.tier:
                best = Inside(key, shared, len(tokens) // TOKEN_BYTES, tier)
            if best.tier == 0:
                break
    return best


def _fastest(key: BlockKey, usable: Usable, ready: Sequence[Ready]) -> int:
    for tier in usable.tiers:
        place = ready[tier].get(key)
        if place is not None and place.created >= usable.oldest[tier]:
            return tier
    return -1
