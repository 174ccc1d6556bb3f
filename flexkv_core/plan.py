"""Index and request -> plan.  Pure: no I/O, no clock, no threads.

A plan says which blocks are moved and which of their tokens; who moves them, and into which slots,
is decided later.  Plans are columns, one entry a block: a long prompt has thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .keys import BlockChain, BlockKey
from .match import Match


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

    def tokens_by_tier(self) -> dict[int, int]:
        """Tokens by where they are."""
        counts: dict[int, int] = {}
        for tier, first, last in zip(self.tiers, self.first, self.last, strict=True):
            counts[tier] = counts.get(tier, 0) + last - first
        return counts


@dataclass(slots=True)
class StorePlan:
    """Blocks of a store, in order.

    Attributes:
        keys: The blocks.
        parents: Key that each hangs below.
        tokens: Encoded ids of each block's tokens.
        starts: Place of each block's first token in the sequence.
        counts: Tokens in each.
    """

    keys: list[BlockKey]
    parents: list[bytes]
    tokens: list[bytes]
    starts: list[int]
    counts: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens that are copied."""
        return sum(self.counts)

    def cut(self, count: int) -> None:
        """Keep the first ``count`` blocks only."""
        for column in (self.keys, self.parents, self.tokens, self.starts, self.counts):
            del column[count:]

    def ranges(self) -> list[tuple[int, int]]:
        """Runs of tokens, ``[start, stop)``, merged where blocks follow one another."""
        runs: list[tuple[int, int]] = []
        for start, count in zip(self.starts, self.counts, strict=True):
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], start + count)
            else:
                runs.append((start, start + count))
        return runs


def plan_load(chain: BlockChain, match: Match, start: int) -> LoadPlan:
    """Blocks that bring tokens ``start`` to the end of ``match``.

    ``start`` may lie inside a block: the engine has that block's beginning already.
    """
    size = chain.block_tokens
    begin = min(start // size, match.num_blocks)
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
    numbers = missing(keys[:whole])
    plan = StorePlan(
        [keys[n] for n in numbers],
        [keys[n - 1] if n else chain.root for n in numbers],
        [chain.block(n) for n in numbers],
        [n * size for n in numbers],
        [size] * len(numbers),
    )
    rest = num_tokens - whole * size
    if with_tail and rest:
        key = chain.tail_key(num_tokens)
        if missing([key]):
            plan.keys.append(key)
            plan.parents.append(chain.parent(whole))
            plan.tokens.append(chain.block(whole, rest))
            plan.starts.append(whole * size)
            plan.counts.append(rest)
    return plan
