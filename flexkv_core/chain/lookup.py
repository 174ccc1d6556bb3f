"""Lookups: how far a prompt can be restored behind what the engine has, and why not more.  Pure queries.

The index knows what tiers of this process have; of shared tiers there is what they said or showed
lately.  Nothing is asked here: ``Lookup.wants_probe`` says that asking could lengthen the hit.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..index.match import Match, Run, Usable
from ..keys import BlockChain, BlockKey
from .choice import Choice
from .links import Link
from .parts import ChainParts
from .weighing import Weighing

_NEVER = float("-inf")
_FIRST_STRIDE = 16


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a prompt would get.

    Attributes:
        num_tokens: Length of the prefix, from token 0, that the engine has and can have restored.
        match: The blocks that are restored; None where nothing is worth loading.
        tokens_by_tier: Tokens behind ``start`` by tier.
        wants_probe: Whether a shared tier should be asked for more (see ``TierChain.probe``).
        why: Why not more, in a word: ``all``, ``miss``, ``tier_down``, ``host_slots``, ``recompute``,
            ``closed``, ``no_salt``.
        choice: What was weighed, if a tier says ``load_or_recompute: auto``.
    """

    num_tokens: int
    match: Match | None
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    wants_probe: bool = False
    why: str = "miss"
    choice: Choice | None = None


class Lookups:
    """Answers a chain's lookups."""

    def __init__(self, parts: ChainParts, weighing: Weighing, min_hit_tokens: int) -> None:
        """Look among ``parts``; fewer than ``min_hit_tokens`` tokens are no hit."""
        self._weighing = weighing
        self._parts = parts
        self._layout = parts.layout
        self._links = parts.links
        self._index = parts.index
        self._min_hit_tokens = min_hit_tokens

    def find(
        self, chain: BlockChain, start: int, limit: int, now: float, *, is_promised: bool = False
    ) -> Lookup:
        """How far ``chain`` can be restored now.

        Args:
            chain: The prompt, under its namespace.
            start: Tokens that the engine has already; their blocks need not be anywhere else.
            limit: Longest prefix that is of use.
            now: The chain's clock.
            is_promised: The engine counts on it already, so it is not weighed whether it is worth it.
        """
        match, wants_probe = self._longest(chain, start // self._layout.block_tokens, limit, now)
        match, is_cut = self._affordable(chain, match)
        choice = None
        if not is_promised:
            found = match.num_tokens
            match, choice = self._weighing.weigh(chain, match, start, now)
            if match.num_tokens < found:
                return self._answer(match, start, choice, "recompute")
        page = self._layout.page_tokens
        total = match.num_tokens
        is_all = total >= limit // page * page and total - start >= self._min_hit_tokens
        why = "all" if is_all else self._why_not(is_cut=is_cut)
        return self._answer(match, start, choice, why, wants_probe=wants_probe)

    def _answer(
        self, match: Match, start: int, choice: Choice | None, why: str, *, wants_probe: bool = False
    ) -> Lookup:
        total = match.num_tokens
        if total - start < self._min_hit_tokens:
            return Lookup(start, None, wants_probe=wants_probe, why=why, choice=choice)
        by_tier = {self._links[tier].name: count for tier, count in match.tokens_by_tier(start).items()}
        return Lookup(total, match, by_tier, wants_probe, why, choice)

    def _why_not(self, *, is_cut: bool) -> str:
        if is_cut:
            return "host_slots"
        return "miss" if all(link.is_up for link in self._links) else "tier_down"

    def _usable(self, now: float) -> Usable:
        tiers = [link.number for link in self._links if link.is_indexed and link.takes_loads]
        oldest = [now - link.config.ttl_s if link.config.ttl_s else _NEVER for link in self._links]
        return Usable(tiers, oldest)

    def _longest(self, chain: BlockChain, first: int, limit: int, now: float) -> tuple[Match, bool]:
        """What own tiers have, and in their gaps whole blocks that shared ones are known to have.

        Returns:
            The match, and whether a shared tier should be asked for what comes behind it.
        """
        usable, page, whole = self._usable(now), self._layout.page_tokens, limit // self._layout.block_tokens
        shared = [link for link in self._links if not link.is_indexed and link.takes_loads]
        match = self._index.match(chain, limit, page, usable, first=first)
        runs: list[Run] = []
        while shared and match.num_blocks < whole:
            more, wants_probe = self._shared_runs(chain, shared, match.num_blocks, whole, now)
            if not more:
                return Match(first, (*runs, *match.runs), match.inside, match.block_tokens), wants_probe
            # A partly matched block is dropped for the whole one that a shared tier has.
            runs += [*match.runs, *more]
            match = self._index.match(chain, limit, page, usable, first=more[-1].last)
        return Match(first, (*runs, *match.runs), match.inside, match.block_tokens), False

    def _shared_runs(
        self, chain: BlockChain, shared: Sequence[Link], number: int, whole: int, now: float
    ) -> tuple[list[Run], bool]:
        """Blocks from ``number`` on that shared tiers are known to have, and whether to ask for the next."""
        runs: list[Run] = []
        stride = _FIRST_STRIDE
        while number < whole:
            keys = chain.hash_to(min(whole, number + stride))  # made in strides: most prompts end sooner
            stride *= 4
            there, last = self._shared_run(shared, keys, number, min(len(keys), whole), now)
            if last == number:
                return runs, any(link.known.get(keys[number], now) is None for link in shared)
            if runs and runs[-1].tier == there.number:
                runs[-1] = Run(there.number, runs[-1].first, last)
            else:
                runs.append(Run(there.number, number, last))
            number = last
        return runs, False

    @staticmethod
    def _shared_run(
        shared: Sequence[Link], keys: Sequence[BlockKey], number: int, stop: int, now: float
    ) -> tuple[Link, int]:
        """The fastest of the tiers that is known to have ``keys[number]``, and a run of blocks in it."""
        for link in shared:
            # What a faster one lacks may end with the next block.
            last = link.known.there_until(keys, number, stop if link is shared[0] else number + 1, now)
            if last > number:
                return link, last
        return shared[0], number

    def _affordable(self, chain: BlockChain, match: Match) -> tuple[Match, bool]:
        """Promise no more than host slots can carry at once; True if that made it shorter.

        What lies in the first tier is pinned, with all that stands before it there, so that nothing can come
        in its place; the rest needs a slot.
        """
        first, runs, inside = match.first, match.runs, match.inside
        is_host = self._parts.host_link is not None
        free = runs[0].last - first if is_host and runs and runs[0].tier == 0 else 0
        if is_host and free == match.num_blocks - first and (inside is None or inside.tier == 0):
            return match, False  # all of it is there
        room = self._parts.host_capacity_blocks
        if free:
            room -= self._index.run_before(0, chain.hash_to(first), first)
        if match.num_blocks - first + (inside is not None) <= room:
            return match, False
        stop = first + max(free, room)
        cut = tuple(Run(run.tier, run.first, min(run.last, stop)) for run in runs if run.first < stop)
        return Match(first, cut, None, match.block_tokens), True
