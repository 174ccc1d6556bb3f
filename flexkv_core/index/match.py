"""Matching: how far a prompt goes on in blocks that are ready, from the block that the engine lacks first.

Pure: it looks at the index's trees and changes nothing.  Whole blocks are found by their keys, a stretch
at a time.  Siblings are kept in the order of their token ids, so that the longest common prefix with what
follows, which may end inside a block, is found between two neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..keys import TOKEN_BYTES, BlockChain, BlockKey, common_tokens
from .places import TierPlaces

_FIRST_STRIDE = 16


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
    """What is ready: whole blocks from block ``first`` on, then at most one partly matched.

    What stands before is the engine's, wherever else it lies.

    Attributes:
        first: Number of the first block that was looked for.
        runs: Whole blocks, without a gap.
        inside: What follows them, if anything.
        block_tokens: Tokens in a whole block.
    """

    first: int
    runs: tuple[Run, ...]
    inside: Inside | None
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        """Whole blocks from block 0."""
        return self.runs[-1].last if self.runs else self.first

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
    first: int,
    max_tokens: int,
    page_tokens: int,
    usable: Usable,
    tiers: Sequence[TierPlaces],
) -> Match:
    """How far ``chain`` is ready in the usable tiers, from block ``first`` on.

    Args:
        chain: The prompt, under its namespace.
        first: Number of the first block that is wanted; what stands before it need not be anywhere.
        max_tokens: Tokens from token 0 that may be matched at most.
        page_tokens: The last block may be matched to a multiple of this.
        usable: Which tiers may be read.
        tiers: Each tier's blocks.
    """
    size = chain.block_tokens
    max_tokens = min(max_tokens, chain.num_tokens)
    runs = _match_whole(chain, first, max_tokens // size, usable, tiers)
    block = runs[-1].last if runs else first
    rest = max_tokens - block * size
    inside = None
    if rest >= page_tokens:
        wanted = chain.block(block, min(rest, size))
        inside = _match_inside(chain.parent(block), wanted, page_tokens, usable, tiers)
    return Match(first, tuple(runs), inside, size)


def _match_whole(
    chain: BlockChain, first: int, whole: int, usable: Usable, tiers: Sequence[TierPlaces]
) -> list[Run]:
    runs: list[Run] = []
    block = first
    stride = _FIRST_STRIDE
    while block < whole:
        # Keys are made in growing strides, so that a miss costs little, however long the prompt.
        keys = chain.hash_to(min(whole, block + stride))
        stride *= 4
        known = min(len(keys), whole)
        seen = _Seen()
        while block < known:
            tier, last = _fastest_run(keys, block, known, usable, tiers, seen)
            if last == block:
                return runs
            if runs and runs[-1].tier == tier:
                runs[-1] = Run(tier, runs[-1].first, last)
            else:
                runs.append(Run(tier, block, last))
            block = last
    return runs


@dataclass(slots=True)
class _Seen:
    """What was looked up already: tiers that have blocks in turns are not read again at each turn.

    Attributes:
        ready: Per tier one behind the last block of the run that was read last.
        present: Per tier the first block that is there, of those behind where it was looked for.
    """

    ready: dict[int, int] = field(default_factory=dict)
    present: dict[int, int] = field(default_factory=dict)


def _fastest_run(
    keys: Sequence[BlockKey],
    block: int,
    known: int,
    usable: Usable,
    tiers: Sequence[TierPlaces],
    seen: _Seen,
) -> tuple[int, int]:
    """The fastest tier that has ``keys[block]``, and where the run of blocks it is fastest for ends."""
    for number, tier in enumerate(usable.tiers):
        last = seen.ready.get(tier, 0)
        if last <= block:
            last = seen.ready[tier] = tiers[tier].ready_until(keys, block, known, usable.oldest[tier])
        if last > block:
            for faster in usable.tiers[:number]:
                if seen.present.get(faster, 0) <= block:
                    seen.present[faster] = tiers[faster].first_of(keys, block + 1, known)
                last = min(last, seen.present[faster])
            return tier, last
    return -1, block


def _match_inside(
    parent: bytes, wanted: bytes, page_tokens: int, usable: Usable, tiers: Sequence[TierPlaces]
) -> Inside | None:
    """What shares most leading tokens with ``wanted`` below ``parent``; among equals the fastest."""
    best: Inside | None = None
    for tier in usable.tiers:
        for siblings in tiers[tier].nearest(parent, wanted, usable.oldest[tier]):
            tokens, key = next(siblings, (b"", b""))
            shared = common_tokens(wanted, tokens) // page_tokens * page_tokens
            if shared > (best.num_tokens if best is not None else 0):
                best = Inside(key, shared, len(tokens) // TOKEN_BYTES, tier)
    return best
