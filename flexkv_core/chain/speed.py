"""How long something takes: a line through what it took lately, ``seconds = fixed_s + amount / per_s``.

Recent observations count more, by number and by age, so that after a pause one new observation outweighs
the old ones.  Pure but for what it is told.

Threads: one owner.
"""

from __future__ import annotations

_KEPT = 0.8
"""Weight of what was known before, when something new is observed."""
_HALF_LIFE_S = 5.0
"""In so long an observation loses half its weight: a tier that has recovered is soon believed."""
_LEAST_SPREAD = 1e-3
"""Variance of the amounts, relative to their mean square, from which on a fixed part can be told."""


class SpeedEstimate:
    """Fits recent observations; amounts are bytes of a tier's calls, or tokens of an engine's passes."""

    def __init__(self) -> None:
        """Nothing known yet."""
        self.fixed_s = 0.0
        self.per_s = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._last = float("-inf")

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self.per_s > 0

    def observe(self, amount: float, seconds: float, now: float, times: int = 1) -> None:
        """Note that ``amount`` took ``seconds``, so many times; nothing is learnt from none of either."""
        if amount <= 0 or seconds <= 0:
            return
        kept = min(_KEPT, 0.5 ** ((now - self._last) / _HALF_LIFE_S)) * _KEPT ** (times - 1)
        new = (1 - _KEPT**times) / (1 - _KEPT)
        self._last = now
        self._weight = self._weight * kept + new
        self._x = self._x * kept + new * amount
        self._y = self._y * kept + new * seconds
        self._xx = self._xx * kept + new * amount * amount
        self._xy = self._xy * kept + new * amount * seconds
        self._fit()

    def seconds_for(self, amount: float) -> float:
        """Expected time for ``amount`` at once; infinity while nothing is known."""
        return self.fixed_s + amount / self.per_s if self.is_known else float("inf")

    def _fit(self) -> None:
        spread = self._weight * self._xx - self._x * self._x
        if spread > _LEAST_SPREAD * self._weight * self._xx:
            slope = (self._weight * self._xy - self._x * self._y) / spread
            fixed = (self._y - slope * self._x) / self._weight
            if slope > 0 and fixed >= 0:
                self.fixed_s, self.per_s = fixed, 1 / slope
                return
        self.fixed_s, self.per_s = 0.0, self._x / self._y
