"""The host slots that every block passes through: the first tier's own, or a staging pool.

With a ``DirectTier`` in front, a filled slot is published there and never copied.  Without one, slots
are lent for as long as a block is on its way.  Either way a slot that something may still write into
is kept back until that has ended.

Threads: the chain's thread only; workers see views.
"""

from __future__ import annotations

from .buffers import HostRegion, Slot, SlotPool
from .keys import BlockKey
from .tier import DirectTier


class HostSlots:
    """Takes, lends, publishes and takes back slots; counts who still uses an unpublished one."""

    def __init__(self, direct: DirectTier | None, staging_bytes: int, slot_bytes: int) -> None:
        """Use ``direct``'s slots, or map a staging pool of ``staging_bytes``.

        Raises:
            HostMemoryError: the staging pool does not fit.
        """
        self.direct = direct
        self._pool: SlotPool | None = None
        if direct is None:
            self._pool = SlotPool(HostRegion(max(staging_bytes, slot_bytes)), slot_bytes)
        self._users: dict[int, int] = {}
        self._quarantined: set[int] = set()

    @property
    def region(self) -> HostRegion:
        """The memory that all slots lie in."""
        return self.direct.region if self.direct is not None else self._staging.region

    @property
    def _staging(self) -> SlotPool:
        if self._pool is None:
            raise AssertionError("a direct tier has no staging pool")
        return self._pool

    @property
    def num_lent(self) -> int:
        """Unpublished slots that somebody uses."""
        return len(self._users)

    @property
    def num_quarantined(self) -> int:
        """Slots that a late writer may still touch."""
        return len(self._quarantined)

    def take(self, count: int) -> list[Slot]:
        """Up to ``count`` slots, each with one user."""
        slots = self.direct.reserve(count) if self.direct is not None else self._staging.take(count)
        for slot in slots:
            self._users[slot.index] = 1
        return slots

    def publish(self, key: BlockKey, slot: Slot, num_bytes: int) -> None:
        """Hand a filled slot to the direct tier; its users go on by pinning the block."""
        if self.direct is None:
            raise AssertionError("a staging slot cannot be published")
        del self._users[slot.index]
        self.direct.publish(key, slot, num_bytes)

    def adopt(self, slot: Slot) -> None:
        """Take over a slot that was withdrawn from the direct tier; it has one user."""
        self._users[slot.index] = 1

    def use(self, slot: Slot) -> None:
        """One more user of an unpublished slot."""
        self._users[slot.index] += 1

    def drop(self, slot: Slot) -> None:
        """One user fewer; the last one frees the slot."""
        self._users[slot.index] -= 1
        if self._users[slot.index]:
            return
        del self._users[slot.index]
        if self.direct is not None:
            self.direct.release(slot)
        else:
            self._staging.give(slot)

    def quarantine(self, slot: Slot) -> None:
        """Keep a slot back although its last user is going: something may still write into it."""
        self._quarantined.add(slot.index)

    def end_quarantine(self, slot: Slot) -> None:
        """Nothing writes into it any more: drop the user that was kept for it."""
        self._quarantined.discard(slot.index)
        self.drop(slot)

    def close(self) -> None:
        """Unmap the staging pool; a direct tier closes itself."""
        if self._pool is not None:
            self._pool.region.close()
