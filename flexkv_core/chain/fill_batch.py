"""Batches of fills: what one load call brings, and who waits for it.

Threads: the chain's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..keys import BlockKey
from .calls import Call
from .jobs import LoadJob
from .links import Link

Run = tuple[int, int]
"""Positions ``[first, last)``."""


@dataclass(slots=True)
class Waiter:
    """A load that waits for blocks in a row.

    Attributes:
        job: The load.
        position: Where the first of them stands in its plan.
        first: The first of them in the batch.
        last: One behind the last.
    """

    job: LoadJob
    position: int
    first: int
    last: int


@dataclass(eq=False, slots=True)
class FillBatch:
    """Blocks of one load call.

    Attributes:
        link: Where they come from.
        piece: Blocks that a worker reads at once.
        keys: The blocks.
        slots: Where each goes.
        tokens: Tokens of each.
        is_promoted: Whether they stay in the first tier.
        ahead: Positions of those that are brought ahead of need, and that nobody needs so far.
        waiting: The loads that wait for them.
        pins: Blocks of the tier that are pinned for the call.
        call: The call that brings them; None once it is over.
        is_withdrawn: It was taken back before anybody began it; its end may still have to be taken in.
        told: Positions whose failure was told before the call was over.
        quarantined: Slots that a worker may still write into, although the call was given up.
    """

    link: Link
    piece: int
    keys: list[BlockKey]
    slots: list[int]
    tokens: list[int]
    is_promoted: bool
    ahead: set[int]
    waiting: list[Waiter] = field(default_factory=list)
    pins: list[BlockKey] = field(default_factory=list)
    call: Call | None = None
    is_withdrawn: bool = False
    told: set[int] = field(default_factory=set)
    quarantined: list[int] = field(default_factory=list)

    def part(self, numbers: list[int]) -> FillBatch:
        """Some of the blocks, with those who wait for them and for no others; no call brings them."""
        new = {i: at for at, i in enumerate(numbers)}
        return FillBatch(
            self.link,
            self.piece,
            [self.keys[i] for i in numbers],
            [self.slots[i] for i in numbers],
            [self.tokens[i] for i in numbers],
            self.is_promoted,
            {new[i] for i in self.ahead if i in new},
            [
                Waiter(waiter.job, waiter.position, new[waiter.first], new[waiter.last - 1] + 1)
                for waiter in self.waiting
                if waiter.first in new
            ],
        )
