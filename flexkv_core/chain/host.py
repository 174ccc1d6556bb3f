"""The host slots that every block passes through: the first tier's own, or a staging pool.

With a ``DirectTier`` in front, a filled slot is published there and never copied.  Without one, slots
are lent for as long as a block is on its way.  Either way a slot that something may still write into
is kept back until that has ended.

Threads: the chain's thread only; workers see views, and seal (``_sealing`` is held for as long, and nothing
else is locked inside).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .. import envelope
from ..buffers import HostRegion, SlotPool
from ..keys import BlockKey
from ..layout import BlockLayout
from ..tier import DirectTier


class HostSlots:
    """Takes, lends, publishes and takes back slots; counts who still uses an unpublished one."""

    def __init__(self, direct: DirectTier | None, staging_bytes: int, slot_bytes: int) -> None:
        """Use ``direct``'s slots, or map a staging pool of ``staging_bytes``.

        Raises:
            HostMemoryError: the staging pool does not fit.
        """
        self.direct = direct
        if direct is None:
            self.pool = SlotPool(HostRegion(max(staging_bytes, slot_bytes)), slot_bytes)
        else:
            self.pool = direct.slots
        self._num_lent = 0
        self._more_users: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self._unsealed: set[int] = set()
        self._sealing = threading.Lock()

    @property
    def region(self) -> HostRegion:
        """The memory that all slots lie in."""
        return self.pool.region

    @property
    def num_lent(self) -> int:
        """Unpublished slots that somebody uses."""
        return self._num_lent

    @property
    def num_quarantined(self) -> int:
        """Slots that a late writer may still touch."""
        return len(self._quarantined)

    def take(self, count: int) -> list[int]:
        """Up to ``count`` slots, each with one user."""
        slots = self.direct.reserve(count) if self.direct is not None else self.pool.take(count)
        self._num_lent += len(slots)
        if self._unsealed:
            self._unsealed.difference_update(slots)
        return slots

    def publish(self, keys: Sequence[BlockKey], slots: Sequence[int], sizes: Sequence[int]) -> None:
        """Hand filled slots to the direct tier; their users go on by pinning the blocks."""
        if self.direct is None:
            raise AssertionError("a staging slot cannot be published")
        if self._more_users and not self._more_users.keys().isdisjoint(slots):
            raise AssertionError("a slot with several users cannot be published")
        self._num_lent -= len(slots)
        self.direct.publish(keys, slots, sizes)

    def adopt(self, slots: Sequence[int]) -> None:
        """Take over slots that were withdrawn from the direct tier; each has one user."""
        self._num_lent += len(slots)

    def use(self, slots: Sequence[int]) -> None:
        """One more user of unpublished slots."""
        for slot in slots:
            self._more_users[slot] = self._more_users.get(slot, 0) + 1

    def drop(self, slots: Sequence[int]) -> None:
        """One user fewer; the last one frees a slot.

        Raises:
            ValueError: a slot has no user.
        """
        freed = slots
        if self._more_users and not self._more_users.keys().isdisjoint(slots):
            freed = [slot for slot in slots if not self._has_others(slot)]
        if not freed:
            return
        if self.direct is not None:
            self.direct.release(freed)
        else:
            self.pool.give(freed)
        self._num_lent -= len(freed)

    def _has_others(self, slot: int) -> bool:
        """Whether a slot has users left after one has dropped it."""
        others = self._more_users.pop(slot, 0)
        if others > 1:
            self._more_users[slot] = others - 1
        return others > 0

    def filled(self, slots: Sequence[int]) -> None:
        """The device has filled these: they have no header yet, or that of their last blocks."""
        self._unsealed.update(slots)

    def seal(
        self, slot: int, value: memoryview, layout: BlockLayout, key: BlockKey, parent: bytes, tokens: bytes
    ) -> None:
        """For workers: see to it that a slot whose block leaves host memory has its header and checksum.

        Several may do so at once for one slot; the first does it, and nobody stores a half-sealed one.
        """
        with self._sealing:
            if slot in self._unsealed:
                envelope.write_header(value, layout, key, parent, tokens)
                envelope.seal(value, layout)
                self._unsealed.discard(slot)

    def quarantine(self, slot: int) -> None:
        """Keep a slot back although its last user is going: something may still write into it."""
        self._quarantined.add(slot)

    def end_quarantine(self, slot: int) -> None:
        """Nothing writes into it any more: drop the user that was kept for it."""
        self._quarantined.discard(slot)
        self.drop([slot])

    def close(self) -> None:
        """Unmap the staging pool; a direct tier closes itself."""
        if self.direct is None:
            self.pool.region.close()
