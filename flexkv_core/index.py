"""Which block is in which tier, in which state, pinned by whom.

One tree for all tiers of a chain that this process alone fills.  A *node* is a block, known by its
key; it has at most one *place* in each tier.  Children hang below their parent's key and are kept in
the order of their token ids, so that the longest common prefix with a prompt, which may end inside
a block, is found between two neighbours.

Rules kept here and nowhere else:

* a block is matched only where it is READY, and only together with all blocks before it;
* a pinned or unready place never leaves; a place leaves its tier only after its children there, so
  that a pin on a block protects all before it in the same tier;
* counts never clamp: a pin given back too often is an error.

Threads: one owner, the thread that calls the chain.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .keys import TOKEN_BYTES, BlockChain, BlockKey, common_tokens
from .policy import EvictionOrder, Rank

_SUPERSEDED_WALK = 32
_FIRST_STRIDE = 16
_QUEUE_SLACK = 1024


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
    is_ready: bool
    hits: int = 0
    pins: int = 0
    num_children: int = 0
    is_queued: bool = False


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


class BlockIndex:
    """The tree, and one eviction queue for each tier."""

    def __init__(self, block_tokens: int, orders: Sequence[EvictionOrder]) -> None:
        """An empty index for ``len(orders)`` tiers, each with its eviction order."""
        self.block_tokens = block_tokens
        self._orders = list(orders)
        self._nodes: dict[BlockKey, Node] = {}
        self._children: dict[bytes, list[tuple[bytes, BlockKey]]] = {}
        self._places: list[dict[BlockKey, Place]] = [{} for _ in orders]
        self._ready: list[dict[BlockKey, Place]] = [{} for _ in orders]
        self._queues: list[list[tuple[Rank, int, BlockKey]]] = [[] for _ in orders]
        self._numbers = itertools.count()
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
        max_tokens = min(max_tokens, chain.num_tokens)
        runs = self._match_whole(chain, max_tokens // self.block_tokens, usable)
        block = runs[-1].last if runs else 0
        rest = max_tokens - block * self.block_tokens
        inside = None
        if rest >= page_tokens:
            inside = self._match_inside(chain, block, rest, page_tokens, usable)
        return Match(tuple(runs), inside, self.block_tokens)

    def _match_whole(self, chain: BlockChain, whole: int, usable: Usable) -> list[Run]:
        runs: list[Run] = []
        tables = [(tier, self._ready[tier], usable.oldest[tier]) for tier in usable.tiers]
        block = 0
        stride = _FIRST_STRIDE
        while block < whole:
            # Keys are made in growing strides, so that a miss costs little, however long the prompt.
            keys = chain.hash_to(min(whole, block + stride))
            stride *= 4
            known = min(len(keys), whole)
            while block < known:
                found = self._fastest_run(tables, keys, block, known)
                if found is None:
                    return runs
                tier, last = found
                if runs and runs[-1].tier == tier:
                    runs[-1] = Run(tier, runs[-1].first, last)
                else:
                    runs.append(Run(tier, block, last))
                block = last
        return runs

    @staticmethod
    def _fastest_run(
        tables: Sequence[tuple[int, dict[BlockKey, Place], float]],
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
        self, chain: BlockChain, block: int, rest: int, page_tokens: int, usable: Usable
    ) -> Inside | None:
        """The sibling that shares most leading tokens with the prompt's next block."""
        siblings = self._children.get(chain.parent(block))
        if not siblings:
            return None
        wanted = chain.block(block, min(rest, self.block_tokens))
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
                tier = self._fastest(key, usable)
                if tier < 0:
                    continue
                if best is None or shared > best.num_tokens or tier < best.tier:
                    best = Inside(key, shared, len(tokens) // TOKEN_BYTES, tier)
                if best.tier == 0:
                    break
        return best

    def _fastest(self, key: BlockKey, usable: Usable) -> int:
        for tier in usable.tiers:
            place = self._ready[tier].get(key)
            if place is not None and place.created >= usable.oldest[tier]:
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
            self._queue(tier, key, place)

    def publish(self, tier: int, keys: Iterable[BlockKey]) -> None:
        """The blocks' bytes in this tier may be read from now on."""
        ready = self._ready[tier]
        for key in keys:
            place = self._must(tier, key)
            place.is_ready = True
            ready[key] = place
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
        del self._places[tier][key]
        self._ready[tier].pop(key, None)
        self._bytes[tier] -= place.num_bytes
        above = self._places[tier].get(node.parent)
        if above is not None:
            above.num_children -= 1
            self._queue(tier, node.parent, above)
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
        self._queue(tier, key, place)

    def touch(self, tier: int, keys: Iterable[BlockKey], now: float) -> None:
        """Note that blocks were loaded."""
        backwards = self._orders[tier].ages_backwards
        places = self._places[tier]
        for key in keys:
            place = places.get(key)
            if place is None:
                continue
            place.last_used = now
            place.hits += 1
            if backwards and place.is_queued:
                # The queue's entry is too late now; a second, earlier one makes it good.
                place.is_queued = False
                self._queue(tier, key, place)

    def renew(self, tier: int, keys: Iterable[BlockKey], oldest: float, now: float) -> None:
        """Blocks created before ``oldest`` were stored again: they count as created now."""
        ready = self._ready[tier]
        for key in keys:
            place = ready.get(key)
            if place is not None and place.created < oldest:
                place.created = place.last_used = now
                if place.is_queued:  # its rank may be an earlier one now
                    place.is_queued = False
                    self._queue(tier, key, place)

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
            place = self._places[tier].get(key)
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
        if not place.num_children and place.is_ready and not place.pins and not place.is_queued:
            place.is_queued = True
            queue = self._queues[tier]
            heapq.heappush(queue, (self._orders[tier].rank(place), next(self._numbers), key))
            if len(queue) > 2 * len(self._places[tier]) + _QUEUE_SLACK:
                self._compact(tier)

    def _compact(self, tier: int) -> None:
        """Drop entries of blocks that are gone, or that have a better one: the first is the best."""
        places = self._places[tier]
        best: dict[BlockKey, tuple[Rank, int, BlockKey]] = {}
        for entry in sorted(self._queues[tier]):
            place = places.get(entry[2])
            if place is not None and place.is_queued:
                best.setdefault(entry[2], entry)
        self._queues[tier][:] = best.values()  # in order, so a heap; in place, since victims() reads it

    def _must(self, tier: int, key: BlockKey) -> Place:
        place = self._places[tier].get(key)
        if place is None:
            raise ValueError("the block has no place in this tier")
        return place
