"""Seals what leaves and checks what comes back: no value is believed for where it lies.

Both run in the worker's thread, beside the I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import envelope
from ..keys import BlockKey
from ..layout import PAGE_BYTES, BlockLayout, round_up
from ..tier import BufferState, Outcome, Status, Tier, failed, loaded
from .base import WrappedTier
from .encoding import is_encoded


class VerifiedTier(WrappedTier):
    """A tier whose loads are whole, undamaged, and the block that was asked for."""

    def __init__(self, inner: Tier, layout: BlockLayout) -> None:
        super().__init__(inner)
        self._layout = layout
        self._alignment = max(1, inner.capabilities.alignment_bytes)

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        outcomes = self.inner.load(keys, into)
        return [
            self._check(key, view, outcome) if outcome.is_ok else outcome
            for key, view, outcome in zip(keys, into, outcomes, strict=True)
        ]

    def _check(self, key: BlockKey, view: memoryview, outcome: Outcome) -> Outcome:
        if outcome.buffer is not BufferState.COMPLETE or not 0 <= outcome.num_bytes <= len(view):
            return failed(
                Status.INVALID,
                f"the driver said OK, but {outcome.num_bytes} B, and the buffer {outcome.buffer.value}",
            )
        try:
            header = envelope.verify(view[: outcome.num_bytes], self._layout, key)
        except envelope.BadValueError as exc:
            if is_encoded(view):  # another instance's, which has a codec: not ours to remove
                return failed(Status.MISS, "is encoded, and the tier has no codec", BufferState.COMPLETE)
            return failed(Status.CORRUPT, str(exc), BufferState.COMPLETE)
        return loaded(self._layout.header_bytes + header.payload_bytes)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        padded = []
        for value in values:
            length = envelope.seal(value, self._layout)
            stop = min(len(value), round_up(length, self._alignment))
            clean = round_up(length, PAGE_BYTES)
            if stop > clean:  # a seal clears a page's rest, and nothing of a slot's former block may leave
                value[clean:stop] = bytes(stop - clean)
            padded.append(value[:stop])
        return self.inner.store(keys, padded)
