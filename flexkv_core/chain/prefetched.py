"""Prefetched: blocks that were brought into the first tier ahead of need, until somebody needs them.

They may take a share of the host slots only, counted from the call that brings them to their use, their
eviction, or, if nobody comes, a while later: then they are blocks like any others.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..index import BlockIndex
from ..keys import BlockKey
from ..metrics import Metrics

_MOST_FORGOTTEN = 2048
"""At one time, so that it takes a few milliseconds at most."""
_UNUSED_S = 30.0
"""A request that waits longer than this has not much use for having its blocks a little sooner."""


class Prefetched:
    """Counts tokens that were prefetched, by what became of them."""

    def __init__(self, index: BlockIndex, metrics: Metrics, *, host: int, most_blocks: int) -> None:
        """At most ``most_blocks`` at once, in tier number ``host``."""
        self._index = index
        self._metrics = metrics
        self._host = host
        self._most = most_blocks
        self._coming = 0
        self._unused: OrderedDict[BlockKey, tuple[int, float]] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Blocks that are on their way, or lie there unused."""
        return self._coming + len(self._unused)

    def room(self, now: float) -> int:
        """How many blocks more may be brought."""
        self._forget_old(now)
        return max(0, self._most - self.num_blocks)

    def begin(self, num_blocks: int) -> None:
        """Blocks are on their way."""
        self._coming += num_blocks

    def needed(self, num_tokens: int) -> None:
        """A block that is on its way is needed now: it is prefetched no more."""
        self._coming -= 1
        self._count("used", num_tokens)

    def failed(self, num_tokens: int) -> None:
        """A block does not come."""
        self._coming -= 1
        self._count("failed", num_tokens)

    def arrived(self, key: BlockKey, num_tokens: int, now: float) -> None:
        """A block lies in the first tier, and nobody has used it."""
        self._coming -= 1
        if key in self._unused:  # it was lost, not evicted, and brought once more
            self._end(key, "evicted")
        self._unused[key] = (num_tokens, now)

    def used(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are loaded from the first tier."""
        if self._unused:
            for key in keys:
                if key in self._unused:
                    self._end(key, "used")

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        """Blocks have left the first tier."""
        if not self._unused.keys().isdisjoint(keys):
            for key in keys:
                if key in self._unused:
                    self._end(key, "evicted")

    def _forget_old(self, now: float) -> None:
        for _ in range(min(len(self._unused), _MOST_FORGOTTEN)):
            key, (_, arrived) = next(iter(self._unused.items()))
            if arrived + _UNUSED_S > now:
                return
            self._end(key, "unused" if self._index.has(self._host, key) else "evicted")

    def _end(self, key: BlockKey, end: str) -> None:
        self._count(end, self._unused.pop(key)[0])

    def _count(self, end: str, num_tokens: int) -> None:
        self._metrics.count("prefetched_tokens", num_tokens, end=end)
