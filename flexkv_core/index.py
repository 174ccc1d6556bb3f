"""Which block is in which tier, in which state, pinned by whom.

One tree for all tiers of a chain that this process alone fills.  A *node* is a block, known by its
key; it has at most one *place* in each tier.  Children hang below their parent's key and are kept in
the order of their token ids, so that the longest common prefix with a prompt, which may end inside
a block, is found between two neighbours.

Rules kept here and nowhere else:

* a block is matched only where it is READY, and only together with all blocks before it;
* a pinned or unready place never leaves; a place leaves its tier only after its children there;
* counts never clamp: a pin given back too often is an error.

Threads: one owner, the thread that calls the chain.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .keys import TOKEN_BYTES, BlockChain, BlockKey, common_tokens
from .policy import EvictionOrder, Rank


@dataclass(slots=True)
class Place:
    """One block in one tier.

    Attributes:
        num_bytes: Length of the value there.
        created: When it was added, on the chain's clock.
        last_used: When it was last loaded or stored again.
        hits: How often it was loaded.
        is_ready: Whether its bytes may be read.
        pins: How many jobs rely on it.
        num_children: Children of the block that are in this tier too.
        is_queued: Whether the eviction queue knows it.
    """

    num_bytes: int
    created: float
    last_used: float
    hits: int = 0
    is_ready: bool = False
    pins: int = 0
    num_children: int = 0
    is_queued: bool = False


_SUPERSEDED_WALK = 32


class Node:
    """One block: its key, what it follows, its token ids, and its places by tier."""

    __slots__ = ("key", "parent", "places", "tokens")

    def __init__(self, key: BlockKey, parent: bytes, tokens: bytes, num_tiers: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.places: list[Place | None] = [None] * num_tiers

    @property
    def num_tokens(self) -> int:
        """Tokens in the block."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Hit:
    """One matched block.

    Attributes:
        key: The block's key.
        num_tokens: How many of its leading tokens match; all of them but in the last hit.
        stored_tokens: Tokens of the whole stored block.
        tier: The fastest tier that holds it ready.
    """

    key: BlockKey
    num_tokens: int
    stored_tokens: int
    tier: int


class BlockIndex:
    """The tree, and one eviction queue for each tier."""

    def __init__(self, block_tokens: int, orders: Sequence[EvictionOrder]) -> None:
        """An empty index for ``len(orders)`` tiers, each with its eviction order."""
        self.block_tokens = block_tokens
        self._orders = list(orders)
        self._nodes: dict[BlockKey, Node] = {}
        self._children: dict[bytes, list[tuple[bytes, BlockKey]]] = {}
        self._queues: list[list[tuple[Rank, int, BlockKey]]] = [[] for _ in orders]
        self._numbers = itertools.count()
        self._counts = [0] * len(orders)
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
        return self._counts[tier]

    def num_bytes(self, tier: int) -> int:
        """Bytes of all blocks in a tier."""
        return self._bytes[tier]

    def node(self, key: BlockKey) -> Node | None:
        """The block of ``key``, if any tier has it."""
        return self._nodes.get(key)

    def place(self, tier: int, key: BlockKey) -> Place | None:
        """The block's place in ``tier``."""
        node = self._nodes.get(key)
        return node.places[tier] if node is not None else None

    def keys(self, tier: int) -> list[BlockKey]:
        """All keys in a tier, in no order."""
        return [key for key, node in self._nodes.items() if node.places[tier] is not None]

    def match(
        self,
        chain: BlockChain,
        max_tokens: int,
        page_tokens: int,
        is_usable: Sequence[bool],
        oldest: Sequence[float],
    ) -> list[Hit]:
        """The longest prefix of ``chain`` that is ready in the usable tiers.  Changes nothing.

        Args:
            chain: The prompt, under its namespace.
            max_tokens: Tokens that may be matched at most.
            page_tokens: The last hit may end inside a block, at a multiple of this.
            is_usable: Per tier whether it may be read now.
            oldest: Per tier the creation time before which a place is expired.

        Returns:
            Hits in order, without a gap from token 0.
        """
        hits: list[Hit] = []
        nodes = self._nodes
        block_tokens = self.block_tokens
        max_tokens = min(max_tokens, chain.num_tokens)
        for block in range(max_tokens // block_tokens):
            node = nodes.get(chain.key(block))
            tier = -1 if node is None else self._fastest(node, is_usable, oldest)
            if node is None or tier < 0:
                break
            hits.append(Hit(node.key, block_tokens, block_tokens, tier))
        rest = max_tokens - len(hits) * block_tokens
        if rest >= page_tokens:
            last = self._match_inside(chain, len(hits), rest, page_tokens, is_usable, oldest)
            if last is not None:
                hits.append(last)
        return hits

    def _match_inside(
        self,
        chain: BlockChain,
        block: int,
        rest: int,
        page_tokens: int,
        is_usable: Sequence[bool],
        oldest: Sequence[float],
    ) -> Hit | None:
        """The sibling that shares most leading tokens with the prompt's next block."""
        siblings = self._children.get(chain.parent(block))
        if not siblings:
            return None
        wanted = chain.block(block, min(rest, self.block_tokens))
        at = bisect_left(siblings, (wanted, b""))
        best: Hit | None = None
        # The longest common prefix is with a neighbour; further ones never share more, and are looked
        # at only where a nearer one is not ready, or shares as much and lies in a slower tier.
        for neighbours in (range(at, len(siblings)), range(at - 1, -1, -1)):
            for i in neighbours:
                tokens, key = siblings[i]
                shared = common_tokens(wanted, tokens) // page_tokens * page_tokens
                if shared == 0 or (best is not None and shared < best.num_tokens):
                    break
                node = self._nodes[key]
                tier = self._fastest(node, is_usable, oldest)
                if tier < 0:
                    continue
                if best is None or shared > best.num_tokens or tier < best.tier:
                    best = Hit(key, shared, node.num_tokens, tier)
                if best.tier == 0:
                    break
        return best

    @staticmethod
    def _fastest(node: Node, is_usable: Sequence[bool], oldest: Sequence[float]) -> int:
        for tier, place in enumerate(node.places):
            if place is not None and place.is_ready and is_usable[tier] and place.created >= oldest[tier]:
                return tier
        return -1

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
    ) -> Place:
        """Give a block a place in a tier.

        Raises:
            ValueError: it has one already.
        """
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, tokens, len(self._orders))
            insort(self._children.setdefault(parent, []), (tokens, key))
        if node.places[tier] is not None:
            raise ValueError("the block has a place in this tier already")
        place = Place(num_bytes, created=now, last_used=now, is_ready=is_ready)
        place.num_children = sum(
            self._nodes[child].places[tier] is not None for _, child in self._children.get(key, ())
        )
        node.places[tier] = place
        self._counts[tier] += 1
        self._bytes[tier] += num_bytes
        above = self.place(tier, parent)
        if above is not None:
            above.num_children += 1
        self._queue(tier, key, place)
        return place

    def publish(self, tier: int, key: BlockKey) -> None:
        """The block's bytes in this tier may be read from now on."""
        place = self._must(tier, key)
        place.is_ready = True
        self._queue(tier, key, place)

    def remove(self, tier: int, key: BlockKey) -> None:
        """Forget a block's place.

        Raises:
            ValueError: it has none, or it is pinned.
        """
        place = self._must(tier, key)
        if place.pins:
            raise ValueError(f"a pinned block cannot leave ({place.pins} pins)")
        node = self._nodes[key]
        node.places[tier] = None
        self._counts[tier] -= 1
        self._bytes[tier] -= place.num_bytes
        above = self.place(tier, node.parent)
        if above is not None:
            above.num_children -= 1
            self._queue(tier, node.parent, above)
        if not any(node.places):
            del self._nodes[key]
            siblings = self._children[node.parent]
            del siblings[bisect_left(siblings, (node.tokens, key))]
            if not siblings:
                del self._children[node.parent]

    def pin(self, tier: int, key: BlockKey) -> None:
        """Protect a block's place from leaving."""
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
        self._queue(tier, key, place)

    def touch(self, tier: int, keys: Sequence[BlockKey], now: float, *, is_hit: bool) -> None:
        """Note that blocks were used."""
        backwards = self._orders[tier].ages_backwards
        for key in keys:
            place = self.place(tier, key)
            if place is None:
                continue
            place.last_used = now
            place.hits += is_hit
            if backwards and place.is_queued:
                # The queue's entry is too late now; a second, earlier one makes it good.
                place.is_queued = False
                self._queue(tier, key, place)

    def superseded(self, tier: int, key: BlockKey) -> list[BlockKey]:
        """Partly filled siblings whose tokens this block repeats, free to go from ``tier``."""
        node = self._nodes[key]
        siblings = self._children.get(node.parent, ())
        found = []
        at = bisect_left(siblings, (node.tokens, key))
        # Prefixes of a block sort before it, and mostly right before it; a block with very many
        # siblings is not worth a longer walk, since what stays behind only ages and leaves.
        for tokens, other in reversed(siblings[max(0, at - _SUPERSEDED_WALK) : at]):
            if node.tokens.startswith(tokens):
                place = self._nodes[other].places[tier]
                if place is not None and self._may_leave(place):
                    found.append(other)
        return found

    def victims(self, tier: int) -> Iterator[Node]:
        """Blocks that may leave a tier, in the order of leaving; take as many as are needed.

        Each must be removed (``remove``) before the next is taken, so that its parent can follow.
        """
        queue = self._queues[tier]
        order = self._orders[tier]
        while queue:
            rank, number, key = heapq.heappop(queue)
            place = self.place(tier, key)
            if place is None or not place.is_queued:
                continue
            now_rank = order.rank(place)
            if now_rank > rank:
                heapq.heappush(queue, (now_rank, number, key))
                continue
            place.is_queued = False
            if self._may_leave(place):
                yield self._nodes[key]

    @staticmethod
    def _may_leave(place: Place) -> bool:
        return place.is_ready and not place.pins and not place.num_children

    def _queue(self, tier: int, key: BlockKey, place: Place) -> None:
        if not place.is_queued and self._may_leave(place):
            place.is_queued = True
            heapq.heappush(self._queues[tier], (self._orders[tier].rank(place), next(self._numbers), key))

    def _must(self, tier: int, key: BlockKey) -> Place:
        place = self.place(tier, key)
        if place is None:
            raise ValueError("the block has no place in this tier")
        return place
