"""How long prefill passes take: what ``load_or_recompute: auto`` weighs loading against.

Passes end in the order in which they were launched, and the next one may be launched before the results
of the last one are there.  A pass has the device from its launch, or from the end of the one before it.

Threads: the scheduler's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MOST_UNDER_WAY = 4
"""More than any scheduler keeps in flight: one that raised in its launch is forgotten."""


class PrefillTimes:
    """Times passes from their launch to their results."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """None under way."""
        self._clock = clock
        self._under_way: deque[tuple[int, float]] = deque(maxlen=_MOST_UNDER_WAY)
        self._last_end = float("-inf")

    def begins(self, num_tokens: int) -> None:
        """A pass is launched that computes so many tokens of prompts."""
        self._under_way.append((num_tokens, self._clock()))

    def ends(self) -> tuple[int, float] | None:
        """The oldest pass has ended: its tokens and seconds, if it computed any."""
        if not self._under_way:
            return None
        num_tokens, launched = self._under_way.popleft()
        began, self._last_end = max(launched, self._last_end), self._clock()
        return (num_tokens, self._last_end - began) if num_tokens else None
