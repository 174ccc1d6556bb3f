"""Which block is in which tier, in which state, pinned by whom.

One tree (``places``) for each tier of a chain that this process alone fills.  A block is matched only
where it is READY, and only together with the blocks before it that the engine lacks.

Threads: one owner, the thread that calls the chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..keys import BlockChain, BlockKey
from .eviction import Place
from .match import Match, Usable, longest_match
from .places import TierPlaces
from .policy import EvictionOrder
from .stretch import Stretch


class BlockIndex:
    """The trees of all tiers, by the tiers' numbers in the chain."""

    def __init__(self, block_tokens: int, orders: Sequence[EvictionOrder]) -> None:
        """An empty index for ``len(orders)`` tiers, each with its eviction order."""
        self.block_tokens = block_tokens
        self._tiers = [TierPlaces(order) for order in orders]

    # ---- questions -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Blocks in all tiers together, each counted once for every tier that has it."""
        return sum(map(len, self._tiers))

    @property
    def num_pins(self) -> int:
        """All pins of all blocks; 0 when nothing is under way."""
        return sum(tier.num_pins for tier in self._tiers)

    def count(self, tier: int) -> int:
        """Blocks in a tier, ready or not."""
        return len(self._tiers[tier])

    def num_bytes(self, tier: int) -> int:
        """Bytes of all blocks in a tier."""
        return self._tiers[tier].num_bytes

    def place(self, tier: int, key: BlockKey) -> Place | None:
        """What is true of the block in ``tier``, and of those that are there with it."""
        return self._tiers[tier].get(key)

    def block(self, tier: int, key: BlockKey) -> Stretch | None:
        """The block alone, with its parent and tokens, if ``tier`` has it."""
        return self._tiers[tier].block(key)

    def has(self, tier: int, key: BlockKey) -> bool:
        """Whether the block has a place in ``tier``, ready or not."""
        return key in self._tiers[tier]

    def is_pinned(self, tier: int, key: BlockKey) -> bool:
        """Whether a job relies on this very block.  Raises ValueError if it has no place."""
        return self._tiers[tier].num_pins_of(key) > 0

    def missing(self, tier: int, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Positions of the keys that have no place in ``tier``."""
        return self._tiers[tier].missing(keys)

    def unready(self, tier: int, keys: Sequence[BlockKey]) -> list[int]:
        """Positions of the keys that cannot be read in ``tier``."""
        return self._tiers[tier].unready(keys)

    def ready(self, tier: int, keys: Sequence[BlockKey]) -> list[Stretch]:
        """Those of the blocks that can be read in ``tier``, in stretches."""
        return [
            place.part(first, last)
            for _, place, first, last in self._tiers[tier].segments(keys)
            if place.is_ready
        ]

    def run_before(self, tier: int, keys: Sequence[BlockKey], stop: int) -> int:
        """How many of a prompt's blocks are in ``tier`` right before block ``stop``, without a gap."""
        return self._tiers[tier].run_before(keys, stop)

    def keys(self, tier: int) -> list[BlockKey]:
        """All keys in a tier."""
        return list(self._tiers[tier])

    def match(
        self, chain: BlockChain, max_tokens: int, page_tokens: int, usable: Usable, *, first: int = 0
    ) -> Match:
        """How far ``chain`` is ready in the usable tiers, from block ``first`` on.  Changes nothing.

        Args:
            chain: The prompt, under its namespace.
            max_tokens: Tokens from token 0 that may be matched at most.
            page_tokens: The last block may be matched to a multiple of this.
            usable: Which tiers may be read.
            first: The first block that is wanted; what stands before it need not be anywhere.
        """
        if chain.block_tokens != self.block_tokens:
            raise ValueError(f"blocks of {chain.block_tokens} tokens are looked up among {self.block_tokens}")
        return longest_match(chain, first, max_tokens, page_tokens, usable, self._tiers)

    def superseded(self, tier: int, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Partly filled siblings whose tokens these blocks repeat, free to go from ``tier``."""
        return self._tiers[tier].superseded(keys)

    # ---- changes -------------------------------------------------------------------------------

    def add(
        self,
        tier: int,
        blocks: Stretch,
        *,
        num_bytes: int,
        now: float,
        is_ready: bool = False,
        ends: Sequence[int] = (),
    ) -> None:
        """Give blocks places in a tier.

        Args:
            tier: Which tier.
            blocks: The blocks.
            num_bytes: Length of each one's value there.
            now: When they came, on the chain's clock.
            is_ready: Whether their bytes may be read already.
            ends: How many of them come by and by: the first ``ends[0]`` together, and so on.

        Raises:
            ValueError: one has a place there already.
        """
        self._tiers[tier].add(blocks, num_bytes=num_bytes, now=now, is_ready=is_ready, ends=ends)

    def publish(self, tier: int, keys: Sequence[BlockKey]) -> None:
        """The blocks' bytes in this tier may be read from now on."""
        self._tiers[tier].publish(keys)

    def remove(self, tier: int, keys: Sequence[BlockKey]) -> None:
        """Forget blocks' places in a tier.

        Raises:
            ValueError: one has none, or is pinned; nothing was forgotten.
        """
        self._tiers[tier].remove(keys)

    def evict(self, tier: int, amount: int) -> list[Stretch]:
        """Forget up to ``amount`` blocks that may leave a tier, in the order of its policy, leaves first."""
        return self._tiers[tier].evict(amount)

    def pin(self, tier: int, key: BlockKey) -> None:
        """Protect a block in a tier, and all before it there, from leaving."""
        self._tiers[tier].pin(key)

    def pin_ends(self, tier: int, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Protect blocks by pinning the last of each run of them; returns the keys to ``unpin``."""
        return self._tiers[tier].pin_ends(keys)

    def unpin(self, tier: int, key: BlockKey) -> None:
        """Give one pin back.

        Raises:
            ValueError: there is none.
        """
        self._tiers[tier].unpin(key)

    def touch(self, tier: int, keys: Sequence[BlockKey], now: float) -> None:
        """Note that blocks were loaded."""
        self._tiers[tier].touch(keys, now)

    def renew(self, tier: int, keys: Sequence[BlockKey], oldest: float, now: float) -> None:
        """Blocks created before ``oldest`` were stored again: they count as created now."""
        self._tiers[tier].renew(keys, oldest, now)
