"""Which loads are awaited layer by layer, and which as a whole.

Threads: the scheduler's.
"""

from __future__ import annotations

from typing import Literal

from flexkv_core.transfer import Ticket

Mode = Literal["auto"] | bool

_WORTH_S = 0.001
"""A copy that takes less is not worth forty waits of a few microseconds each."""
_FIRST_GUESS = 20e9
"""Bytes a second, until a load was measured."""
_SMOOTHING = 0.2


class ModeChoice:
    """Whether a load is awaited layer by layer: as configured, or by how long it will take."""

    def __init__(self, mode: Mode, *, has_streams: bool, num_layers: int) -> None:
        """Decide by ``mode``; ``auto`` never takes layers without streams: the engine's thread would wait."""
        self._mode = mode
        self._may = has_streams and num_layers > 1
        self._rate = _FIRST_GUESS

    @property
    def may_be_by_layer(self) -> bool:
        """Whether any load ever will be."""
        return self._may if self._mode == "auto" else self._mode

    def take_none(self) -> None:
        """From now on no load is awaited by layer."""
        self._mode = False

    def observe(self, ticket: Ticket) -> None:
        """A load has ended: learn its speed, without what it has waited for."""
        num_bytes, seconds = ticket.pace
        if ticket.error is None and seconds > 0 and num_bytes >= 1 << 20:
            self._rate += _SMOOTHING * (num_bytes / seconds - self._rate)

    def by_layer(self, num_bytes: int) -> bool:
        """For a load of so many bytes."""
        if self._mode == "auto":
            return self._may and num_bytes / self._rate >= _WORTH_S
        return self._mode
