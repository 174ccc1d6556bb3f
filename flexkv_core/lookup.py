"""Lookups: how long a prefix of a prompt can be restored, and why not more.  Pure queries.

The index knows what tiers of this process have; of shared tiers there is what they said or showed
lately.  Nothing is asked here: ``Lookup.wants_probe`` says that asking could lengthen the hit.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .choice import Choice
from .keys import BlockChain, BlockKey
from .links import Link
from .match import Match, Run, Usable
from .parts import ChainParts
from .weighing import Weighing

_NEVER = float("-inf")
_FIRST_STRIDE = 16


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a prompt would get.

    Attributes:
        num_tokens: Length of the prefix that can be restored, from token 0.
        match: The blocks that make it up; None where nothing is worth loading.
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
        """The longest prefix of ``chain`` that can be restored now.

        Args:
            chain: The prompt, under its namespace.
            start: Tokens that the engine has already.
            limit: Longest prefix that is of use.
            now: The chain's clock.
            is_promised: The engine counts on it already, so it is not weighed whether it is worth it.
        """
        match = self._index.match(chain, limit, self._layout.page_tokens, self._usable(now))
        match, wants_probe = self._beyond(chain, match, limit, now)
        match, is_cut = self._affordable(match, start)
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

    def _beyond(self, chain: BlockChain, match: Match, limit: int, now: float) -> tuple[Match, bool]:
        """Add whole blocks that shared tiers are known to have behind the local hits."""
        shared = [link for link in self._links if not link.is_indexed and link.takes_loads]
        whole = limit // self._layout.block_tokens
        number = match.num_blocks
        if not shared or number >= whole:
            return match, False
        runs = list(match.runs)
        wants_probe = False
        stride = _FIRST_STRIDE
        while number < whole:
            keys = chain.hash_to(min(whole, number + stride))  # made in strides: most prompts end sooner
            stride *= 4
            there, last = self._shared_run(shared, keys, number, min(len(keys), whole), now)
            if last == number:
                wants_probe = any(link.known.get(keys[number], now) is None for link in shared)
                break
            if runs and runs[-1].tier == there.number:
                runs[-1] = Run(there.number, runs[-1].first, last)
            else:
                runs.append(Run(there.number, number, last))
            number = last
        if number == match.num_blocks:
            return match, wants_probe
        # A partly matched local block is dropped for the whole one that a shared tier has.
        return Match(tuple(runs), None, match.block_tokens), wants_probe

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

    def _affordable(self, match: Match, start: int) -> tuple[Match, bool]:
        """Promise no more than host slots can carry at once; True if that made it shorter."""
        room = self._parts.host_capacity_blocks
        runs: list[Run] = []
        is_host = self._parts.host_link is not None
        for run in match.runs:
            first = max(run.first, start // match.block_tokens)
            if is_host and run.tier == 0:
                if run.last > first:
                    room -= run.last - run.first  # pinned, so that nothing can come in their place
                runs.append(run)
                continue
            if run.last <= first:
                runs.append(run)
                continue
            fits = max(0, min(run.last - first, room))
            room -= fits
            if fits < run.last - first:
                if first + fits > run.first:
                    runs.append(Run(run.tier, run.first, first + fits))
                return Match(tuple(runs), None, match.block_tokens), True
            runs.append(run)
        inside = match.inside
        if inside is not None and not (is_host and inside.tier == 0) and room < 1:
            return Match(match.runs, None, match.block_tokens), True
        return match, False
