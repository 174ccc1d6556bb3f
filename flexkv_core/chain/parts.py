"""What the parts of a chain share: loads, stores, the cascade and lookups work on the same few things.

Threads: the chain's thread only, like everything in it that is not a worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..drivers import Observers
from ..index import BlockIndex
from ..layout import BlockLayout
from ..metrics import Metrics
from ..transfer import Transfer
from .capacity import Capacity
from .host import HostSlots
from .links import Arrival, Link
from .receipts import Receipt


@dataclass(frozen=True)
class ChainParts:
    """An open chain's insides.

    Attributes:
        layout: What a block's bytes mean.
        links: The tiers at work, fast to slow.
        index: Which block is where, in the tiers that this process alone fills.
        host: The slots that every block passes through.
        capacity: Makes room.
        transfer: Copies between host slots and the device.
        metrics: Where to count.
        observers: Who is told of blocks.
        on_end: Told of every finished load, store and prefetch.
    """

    layout: BlockLayout
    links: Sequence[Link]
    index: BlockIndex
    host: HostSlots
    capacity: Capacity
    transfer: Transfer
    metrics: Metrics
    observers: Observers
    on_end: Callable[[Receipt], None]

    @property
    def host_link(self) -> Link | None:
        """The tier that lends the host slots; None where a staging pool does."""
        return self.links[0] if self.host.direct is not None else None

    @property
    def kept_in(self) -> Link | None:
        """The same, if blocks that are stored stay in it; otherwise its slots are only lent."""
        link = self.host_link
        return link if link is not None and link.keeps(Arrival.STORED) else None

    @property
    def host_capacity_blocks(self) -> int:
        """Blocks that the host slots hold."""
        link = self.host_link
        if link is not None:
            return link.capacity_blocks or 0
        return self.host.region.num_bytes // self.layout.slot_bytes
