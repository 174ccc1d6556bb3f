"""Weighing: what the choice between loading and computing is made from, out of a chain's state.

Looking changes nothing; ``prefill`` and the tiers' estimates are told by others.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from ..index.match import Match, Run
from ..keys import BlockChain, BlockKey
from ..models import EngineConfig
from .choice import Choice, Cut, Offer, Speed, choose
from .links import Link
from .parts import ChainParts
from .speed import SpeedEstimate

_TRY_BLOCKS = 16
"""Most blocks of a load that only measures (or what makes a hit): enough for several calls, little to wait
for."""


class Weighing:
    """Cuts matches to what is worth loading.

    Attributes:
        prefill: Measured time of the engine's prefill passes, by their tokens.
        is_on_its_way: Whether a block is being brought into a host slot.
    """

    def __init__(self, parts: ChainParts, engine: EngineConfig) -> None:
        """Weigh for tiers that say ``load_or_recompute: auto``; cheap where none does."""
        self._links = parts.links
        self._layout = parts.layout
        self._is_host = parts.host_link is not None
        self._engine = engine
        # A try that is shorter than a hit would never be made; the prompt may begin inside a block.
        self._try_blocks = max(_TRY_BLOCKS, -(-engine.min_hit_tokens // parts.layout.block_tokens) + 1)
        self._is_on = any(self._is_auto(link) for link in parts.links)
        self.prefill = SpeedEstimate()
        self.is_on_its_way: Callable[[BlockKey], bool] = lambda _key: False

    def weigh(self, chain: BlockChain, match: Match, start: int, now: float) -> tuple[Match, Choice | None]:
        """Cut ``match`` where computing is sooner.

        Args:
            chain: The prompt.
            match: What can be had of it.
            start: Tokens that the engine has already.
            now: The chain's clock.
        """
        if not self._is_on or not any(
            self._is_auto(self._links[tier]) for tier in match.tokens_by_tier(start)
        ):
            return match, None
        runs, offers = self._offers(chain, match, start)
        cut, choice = choose(
            offers,
            [self._speed(link, now) for link in self._links],
            [link.name for link in self._links],
            self.tokens_per_s,
            try_blocks=self._try_blocks,
        )
        return _cut(match, runs, cut, len(offers)), choice

    @property
    def tokens_per_s(self) -> float:
        """The engine's prefill speed as configured or measured; 0 where neither is known."""
        return self._engine.prefill_tokens_per_s or self.prefill.per_s

    def _is_auto(self, link: Link) -> bool:
        return link.config.load_or_recompute == "auto" and not self._is_in_host(link.number)

    def _is_in_host(self, tier: int) -> bool:
        return self._is_host and tier == 0

    def _offers(self, chain: BlockChain, match: Match, start: int) -> tuple[list[Run], list[Offer]]:
        """Runs, cut where what is on its way ends; and per run an offer, one more for a part of a block."""
        size = self._layout.block_tokens
        runs = [piece for run in match.runs for piece in self._pieces(chain, run)]
        offers = []
        for run in runs:
            tokens = run.last * size - max(run.first * size, start)
            is_free = self.is_on_its_way(chain.key(run.first))
            offers.append(self._offer(run.tier, run.last - run.first, tokens, is_free=is_free))
        inside = match.inside
        if inside is not None:
            tokens = max(0, match.num_tokens - max(match.num_blocks * size, start))
            is_free = tokens == 0 or self.is_on_its_way(inside.key)
            offers.append(self._offer(inside.tier, 1, tokens, is_free=is_free))
        return runs, offers

    def _pieces(self, chain: BlockChain, run: Run) -> list[Run]:
        """What is on its way, and the rest."""
        if self._is_in_host(run.tier):
            return [run]
        at = run.first
        while at < run.last and self.is_on_its_way(chain.key(at)):
            at += 1
        edges = [run.first, at, run.last]
        return [Run(run.tier, a, b) for a, b in zip(edges, edges[1:], strict=False) if a < b]

    def _offer(self, tier: int, num_blocks: int, num_tokens: int, *, is_free: bool) -> Offer:
        is_free = is_free or self._is_in_host(tier)
        is_forced = not is_free and not self._is_auto(self._links[tier])
        return Offer(tier, num_blocks, num_tokens, is_free, is_forced)

    def _speed(self, link: Link, now: float) -> Speed:
        threads = link.workers.load_threads
        call_s, known = link.speed.fixed_s, link.speed.is_known
        block_bytes = self._layout.value_bytes(self._layout.block_tokens)
        bytes_s = block_bytes / link.speed.per_s if known else 0.0
        block_s = (bytes_s + call_s / max(1, link.capabilities.max_batch)) / threads
        return Speed(
            fixed_s=call_s + link.num_loading * block_s,
            block_s=block_s,
            num_at_once=threads,
            is_known=known,
            may_try=link.may_try(now),
            most_s=min(link.config.load_deadline_s, self._engine.load_deadline_s),
        )


def _cut(match: Match, runs: list[Run], cut: Cut, num_offers: int) -> Match:
    """``match`` up to ``cut``; a block that is matched in part is the last offer."""
    if cut.num_offers == num_offers:
        return match
    kept = runs[: cut.num_offers]
    inside = None
    if cut.num_blocks and cut.num_offers < len(runs):
        run = runs[cut.num_offers]
        kept.append(Run(run.tier, run.first, min(run.last, run.first + cut.num_blocks)))
    elif cut.num_blocks:
        inside = match.inside
    return Match(match.first, tuple(_merged(kept)), inside, match.block_tokens)


def _merged(runs: list[Run]) -> list[Run]:
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].tier == run.tier:
            merged[-1] = Run(run.tier, merged[-1].first, run.last)
        else:
            merged.append(run)
    return merged
