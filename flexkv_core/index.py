"""Which block is in which tier, in which state, pinned by whom.

One tree for all tiers of a chain that this process alone fills.  A *node* is a block, known by its
key; it has at most one *place* in each tier.  Children hang below their parent's key and are kept in
the order of their token ids: matching relies on it, and so does whatever looks for siblings.

Rules kept here and nowhere else:

* a block is matched only where it is READY, and only together with all blocks before it;
* a pinned or unready place never leaves; a place leaves its tier only after its children there, so
  that a pin on a block protects all before it in the same tier;
* counts never clamp: a pin given back too often is an error.

Threads: one owner, the thread that calls the chain.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from .eviction import EvictionQueue, Place
from .keys import TOKEN_BYTES, BlockChain, BlockKey
from .match import Match, Usable, longest_match
from .policy import EvictionOrder

_SUPERSEDED_WALK = 32


class Node:
    """One block: its key, what it follows, its token ids, and in how many tiers it has a place."""

    __slots__ = ("key", "num_places", "parent", "tokens")

    def __init__(self, key: BlockKey, parent: bytes, tokens: bytes) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.num_places = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the block."""
        return len(self.tokens) // TOKEN_BYTES


class BlockIndex:
    """The tree, and one eviction queue for each tier."""

    def __init__(self, block_tokens: int, orders: Sequence[EvictionOrder]) -> None:
        """An empty index for ``len(orders)`` tiers, each with its eviction order."""
        self.block_tokens = block_tokens
        self._nodes: dict[BlockKey, Node] = {}
        self._children: dict[bytes, list[tuple[bytes, BlockKey]]] = {}
        self._places: list[dict[BlockKey, Place]] = [{} for _ in orders]
        self._ready: list[dict[BlockKey, Place]] = [{} for _ in orders]
        self._queues = list(map(EvictionQueue, orders, self._places))
        self._bytes = [0] * len(orders)
        self._pins = 0

    # ---- questions -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_pins(self) -> int:
        """All pins of all places; 0 when nothing is under way."""
        return self._pins

    def count(self, tier: int) -> int:
        """Blocks in a tier, ready or not."""
        return len(self._places[tier])

    def num_bytes(self, tier: int) -> int:
        """Bytes of all blocks in a tier."""
        return self._bytes[tier]

    def node(self, key: BlockKey) -> Node | None:
        """The block of ``key``, if any tier has it."""
        return self._nodes.get(key)

    def place(self, tier: int, key: BlockKey) -> Place | None:
        """The block's place in ``tier``."""
        return self._places[tier].get(key)

    def has(self, tier: int, key: BlockKey) -> bool:
        """Whether the block has a place in ``tier``, ready or not."""
        return key in self._places[tier]

    def missing(self, tier: int, keys: Sequence[BlockKey]) -> list[int]:
        """Positions of the keys that have no place in ``tier``."""
        places = self._places[tier]
        return [i for i, key in enumerate(keys) if key not in places]

    def unready(self, tier: int, keys: Sequence[BlockKey]) -> list[int]:
        """Positions of the keys that cannot be read in ``tier``."""
        ready = self._ready[tier]
        return [i for i, key in enumerate(keys) if key not in ready]

    def keys(self, tier: int) -> list[BlockKey]:
        """All keys in a tier."""
        return list(self._places[tier])

    def match(self, chain: BlockChain, max_tokens: int, page_tokens: int, usable: Usable) -> Match:
        """The longest prefix of ``chain`` that is ready in the usable tiers.  Changes nothing.

        Args:
            chain: The prompt, under its namespace.
            max_tokens: Tokens that may be matched at most.
            page_tokens: The last block may be matched to a multiple of this.
            usable: Which tiers may be read.
        """
        if chain.block_tokens != self.block_tokens:
            raise ValueError(f"blocks of {chain.block_tokens} tokens are looked up among {self.block_tokens}")
        return longest_match(chain, max_tokens, page_tokens, usable, self._ready, self._children)

    # ---- changes -------------------------------------------------------------------------------

    def add(
        self,
        tier: int,
        key: BlockKey,
        parent: bytes,
        tokens: bytes,
        *,
        num_bytes: int,
        now: float,
        is_ready: bool = False,
    ) -> None:
        """Give a block a place in a tier.

        Raises:
            ValueError: it has one already.
        """
        places = self._places[tier]
        if key in places:
            raise ValueError("the block has a place in this tier already")
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, tokens)
            siblings = self._children.get(parent)
            if siblings is None:
                self._children[parent] = [(tokens, key)]
            else:
                insort(siblings, (tokens, key))
        node.num_places += 1
        place = places[key] = Place(num_bytes, now, now, is_ready)
        self._bytes[tier] += num_bytes
        below = self._children.get(key)
        if below:
            place.num_children = sum(child in places for _, child in below)
        above = places.get(parent)
        if above is not None:
            above.num_children += 1
        if is_ready:
            self._ready[tier][key] = place
            self._queues[tier].push(key, place)

    def publish(self, tier: int, keys: Iterable[BlockKey]) -> None:
        """The blocks' bytes in this tier may be read from now on."""
        ready = self._ready[tier]
        for key in keys:
            place = self._must(tier, key)
            place.is_ready = True
            ready[key] = place
            self._queues[tier].push(key, place)

    def remove(self, tier: int, key: BlockKey) -> None:
        """Forget a block's place.

        Raises:
            ValueError: it has none, or it is pinned.
        """
        place = self._must(tier, key)
        if place.pins:
            raise ValueError(f"a pinned block cannot leave ({place.pins} pins)")
        node = self._nodes[key]
        del self._places[tier][key]
        self._ready[tier].pop(key, None)
        self._bytes[tier] -= place.num_bytes
        above = self._places[tier].get(node.parent)
        if above is not None:
            above.num_children -= 1
            self._queues[tier].push(node.parent, above)
        node.num_places -= 1
        if not node.num_places:
            del self._nodes[key]
            siblings = self._children[node.parent]
            del siblings[bisect_left(siblings, (node.tokens, key))]
            if not siblings:
                del self._children[node.parent]

    def pin(self, tier: int, key: BlockKey) -> None:
        """Protect a block's place, and those of all blocks before it, from leaving."""
        self._must(tier, key).pins += 1
        self._pins += 1

    def unpin(self, tier: int, key: BlockKey) -> None:
        """Give one pin back.

        Raises:
            ValueError: there is none.
        """
        place = self._must(tier, key)
        if place.pins < 1:
            raise ValueError("a pin was given back twice")
        place.pins -= 1
        self._pins -= 1
        self._queues[tier].push(key, place)

    def touch(self, tier: int, keys: Iterable[BlockKey], now: float) -> None:
        """Note that blocks were loaded."""
        queue = self._queues[tier]
        backwards = queue.order.ages_backwards
        places = self._places[tier]
        for key in keys:
            place = places.get(key)
            if place is None:
                continue
            place.last_used = now
            place.hits += 1
            if backwards:
                queue.push_again(key, place)

    def renew(self, tier: int, keys: Iterable[BlockKey], oldest: float, now: float) -> None:
        """Blocks created before ``oldest`` were stored again: they count as created now."""
        ready = self._ready[tier]
        for key in keys:
            place = ready.get(key)
            if place is not None and place.created < oldest:
                place.created = place.last_used = now
                self._queues[tier].push_again(key, place)

    def superseded(self, tier: int, key: BlockKey) -> list[BlockKey]:
        """Partly filled siblings whose tokens this block repeats, free to go from ``tier``."""
        node = self._nodes[key]
        siblings = self._children.get(node.parent, ())
        if len(siblings) < 2:
            return []
        found = []
        at = bisect_left(siblings, (node.tokens, key))
        # Prefixes of a block sort before it, and mostly right before it; a block with very many
        # siblings is not worth a longer walk, since what stays behind only ages and leaves.
        for tokens, other in reversed(siblings[max(0, at - _SUPERSEDED_WALK) : at]):
            if node.tokens.startswith(tokens):
                place = self._places[tier].get(other)
                if place is not None and place.may_leave:
                    found.append(other)
        return found

    def victims(self, tier: int) -> Iterator[Node]:
        """Blocks that may leave a tier, in the order of leaving; take as many as are needed.

        Each must be removed (``remove``) before the next is taken, so that its parent can follow.
        """
        for key in self._queues[tier].leaving():
            yield self._nodes[key]

    def _must(self, tier: int, key: BlockKey) -> Place:
        place = self._places[tier].get(key)
        if place is None:
            raise ValueError("the block has no place in this tier")
        return place
