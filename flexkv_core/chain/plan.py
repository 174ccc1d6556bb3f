"""Index and request -> plan.  Pure: no I/O, no clock, no threads.

A plan says which blocks are moved and which of their tokens; who moves them, and into which slots,
is decided later.  A long prompt has thousands of blocks: plans are columns and stretches, not a record for
each block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..index.match import Match
from ..index.stretch import Stretch, in_a_row, tail_block, whole_blocks
from ..keys import BlockChain, BlockKey


@dataclass(slots=True)
class LoadPlan:
    """Blocks of a load, in order.

    Attributes:
        keys: The blocks.
        tiers: Where each is now.
        stored_tokens: Tokens of each whole stored block.
        first: First wanted token inside each block.
        last: One behind the last.
        block: Number of the first block in the prompt.
    """

    keys: list[BlockKey]
    tiers: list[int]
    stored_tokens: list[int]
    first: list[int]
    last: list[int]
    block: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are brought."""
        return sum(self.last) - sum(self.first)

    def cut(self, count: int) -> None:
        """Keep the first ``count`` blocks only."""
        for column in (self.keys, self.tiers, self.stored_tokens, self.first, self.last):
            del column[count:]

    def keys_in(self, tier: int) -> list[BlockKey]:
        """The blocks that lie in ``tier``."""
        if self.tiers.count(tier) == len(self.tiers):
            return self.keys
        return [key for key, at in zip(self.keys, self.tiers, strict=True) if at == tier]

    def tokens_by_tier(self) -> dict[int, int]:
        """Tokens by where they are."""
        tiers = set(self.tiers)
        if len(tiers) == 1:
            return {tiers.pop(): self.num_tokens}
        counts: dict[int, int] = {}
        for tier, first, last in zip(self.tiers, self.first, self.last, strict=True):
            counts[tier] = counts.get(tier, 0) + last - first
        return counts


@dataclass(slots=True)
class StorePlan:
    """Blocks of a store, in order.

    Attributes:
        stretches: The blocks.
        starts: Place of each stretch's first token in the sequence.
    """

    stretches: list[Stretch]
    starts: list[int]

    @property
    def keys(self) -> list[BlockKey]:
        """All blocks."""
        return [key for stretch in self.stretches for key in stretch.keys]

    @property
    def counts(self) -> list[int]:
        """Tokens in each block."""
        counts: list[int] = []
        for stretch in self.stretches:
            counts += [stretch.tokens_each] * len(stretch)
        return counts

    @property
    def num_blocks(self) -> int:
        """How many blocks are copied."""
        return sum(map(len, self.stretches))

    @property
    def num_tokens(self) -> int:
        """Tokens that are copied."""
        return sum(stretch.num_tokens for stretch in self.stretches)

    def cut(self, count: int) -> None:
        """Keep the first ``count`` blocks only."""
        for number, stretch in enumerate(self.stretches):
            if count < len(stretch):
                self.stretches[number:] = [stretch.part(0, count)] if count else []
                del self.starts[len(self.stretches) :]
                return
            count -= len(stretch)

    def ranges(self) -> list[tuple[int, int]]:
        """Runs of tokens, ``[start, stop)``, merged where blocks follow one another."""
        runs: list[tuple[int, int]] = []
        for start, stretch in zip(self.starts, self.stretches, strict=True):
            stop = start + stretch.num_tokens
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return runs


def plan_load(chain: BlockChain, match: Match, start: int) -> LoadPlan:
    """Blocks that bring tokens ``start`` to the end of ``match``.

    ``start`` may lie inside a block: the engine has that block's beginning already.

    Raises:
        ValueError: the match begins behind the block of ``start``.
    """
    size = chain.block_tokens
    begin = min(start // size, match.num_blocks)
    if begin < match.first:
        raise ValueError(f"a match from block {match.first} on does not bring token {start}")
    keys = chain.keys(match.num_blocks)[begin:]
    tiers: list[int] = []
    for run in match.runs:
        tiers += [run.tier] * (run.last - max(run.first, begin)) if run.last > begin else []
    plan = LoadPlan(keys, tiers, [size] * len(keys), [0] * len(keys), [size] * len(keys), begin)
    inside = match.inside
    if inside is not None and match.num_tokens > start:
        plan.keys.append(inside.key)
        plan.tiers.append(inside.tier)
        plan.stored_tokens.append(inside.stored_tokens)
        plan.first.append(0)
        plan.last.append(inside.num_tokens)
    if plan.keys:
        plan.first[0] = max(0, start - begin * size)
    return plan


def plan_store(
    chain: BlockChain,
    num_tokens: int,
    missing: Callable[[Sequence[BlockKey]], Sequence[int]],
    *,
    page_tokens: int,
    with_tail: bool,
) -> StorePlan:
    """Blocks of the first ``num_tokens`` tokens that are not there yet, in order.

    Args:
        chain: The sequence, under its namespace.
        num_tokens: Tokens whose KV is final.
        missing: Positions of those keys that are neither kept, nor on their way, in the tier that
            stores go to.
        page_tokens: The engine's page: the tail is cut to a multiple of it.
        with_tail: Whether the last, partly filled block is stored too.
    """
    size = chain.block_tokens
    num_tokens = min(num_tokens, chain.num_tokens) // page_tokens * page_tokens
    whole = num_tokens // size
    keys = chain.hash_to(whole)
    runs = in_a_row(missing(keys if len(keys) == whole else keys[:whole]))
    plan = StorePlan(
        [whole_blocks(chain, first, last) for first, last in runs], [first * size for first, _ in runs]
    )
    if with_tail and num_tokens > whole * size:
        tail = tail_block(chain, num_tokens)
        if missing(tail.keys):
            plan.stretches.append(tail)
            plan.starts.append(whole * size)
    return plan
