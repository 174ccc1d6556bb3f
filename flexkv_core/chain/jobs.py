"""Jobs: one running load or store each, with what it holds.  Loads and Stores move them on.

Threads: the chain's thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..keys import BlockKey
from ..transfer import Fence, Ticket
from .choice import Choice
from .plan import LoadPlan, StorePlan

_numbers = itertools.count(1)


class LoadState(str, Enum):
    """Where a load stands; the last three are terminal."""

    STAGING = "staging"
    STAGED = "staged"
    COPYING = "copying"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_LOAD_OVER = frozenset({LoadState.DONE, LoadState.FAILED, LoadState.CANCELLED})


@dataclass(eq=False)
class LoadJob:
    """One load.

    Attributes:
        label: The request, for people.
        start: First token that it brings.
        plan: What it brings, in order.
        deadline: When it is given up, on the chain's clock.
        is_prefetch: Ends when its blocks lie in host slots.
        choice: Why it loads and does not recompute, where that was weighed.
        state: Where it stands.
        cause: Why it failed; empty otherwise.
        ticket: The copy to the device, once there is one.
        number: Unique in the process.
        is_layerwise: Its copy is awaited layer by layer, by an engine that keeps its own time.
        slots: Host slot of each block; -1 while it is not there.
        from_below: Positions of the blocks that were not in the first tier when it began.
        pinned: Blocks of the first tier that it pins; each protects all before it.
        lent: Unpublished slots that it uses.
    """

    label: str
    start: int
    plan: LoadPlan
    begun: float
    deadline: float
    is_prefetch: bool = False
    choice: Choice | None = None
    is_layerwise: bool = False
    state: LoadState = LoadState.STAGING
    cause: str = ""
    ticket: Ticket | None = None
    slots: list[int] = field(default_factory=list)
    from_below: Sequence[int] = ()
    pinned: list[BlockKey] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)
    num_waiting: int = 0
    bound: tuple[Any, Fence] | None = None
    staged: float = 0.0
    given_up: LoadState | None = None
    number: int = field(default_factory=_numbers.__next__)

    @property
    def num_tokens(self) -> int:
        """Tokens that it brings."""
        return self.plan.num_tokens

    @property
    def num_ready_tokens(self) -> int:
        """Of these, tokens that lie in host slots."""
        plan = self.plan
        return sum(
            last - first
            for slot, first, last in zip(self.slots, plan.first, plan.last, strict=True)
            if slot >= 0
        )

    def brought(self) -> list[int]:
        """Positions of the blocks that came up from below."""
        return [i for i in self.from_below if self.slots[i] >= 0]

    @property
    def is_over(self) -> bool:
        """Whether it has ended, so that nothing of it touches any slot."""
        return self.state in _LOAD_OVER


class StoreState(str, Enum):
    """Where a store stands; the last three are terminal."""

    PLANNED = "planned"
    COPYING = "copying"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_STORE_OVER = frozenset({StoreState.DONE, StoreState.FAILED, StoreState.CANCELLED})


@dataclass(eq=False)
class StoreJob:
    """One store.

    Attributes:
        label: The request, for people.
        plan: What is copied, in order.
        slots: Host slot of each block.
        state: Where it stands.
        cause: Why it failed; empty otherwise.
        ticket: The copy from the device, once there is one.
        number: Unique in the process.
    """

    label: str
    plan: StorePlan
    slots: list[int]
    begun: float
    state: StoreState = StoreState.PLANNED
    cause: str = ""
    ticket: Ticket | None = None
    is_cancelled: bool = False
    number: int = field(default_factory=_numbers.__next__)

    @property
    def num_tokens(self) -> int:
        """Tokens that are copied."""
        return self.plan.num_tokens

    @property
    def is_over(self) -> bool:
        """Whether the device slots are free of it."""
        return self.state in _STORE_OVER
