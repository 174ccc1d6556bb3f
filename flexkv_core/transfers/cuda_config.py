"""How copies on a CUDA device are made.  The defaults were found on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CudaCopyConfig:
    """How copies are made.

    Attributes:
        method: ``auto`` measures at start from which size staging pays; the others force a way.
        load_staged_bytes: Loads of at least this many bytes are staged; None measures.
        store_staged_bytes: The same for stores.
        ring_bytes: Device memory for each direction's ring.  The larger a piece, the fewer pauses
            the copy engine makes.
        ring_parts: Pieces of full size that a ring holds: with three, a piece finds room beside
            one that fills and one that empties, wherever those lie.
        batch_bytes: Most bytes of one launch.
        load_window_bytes: Most bytes of loads under way on the device; None for no limit, so that
            the engine's stream can be ordered behind a whole load soon after it was queued.
        store_window_bytes: The same for stores.  A small window lets a device-wide
            synchronisation (an elastic pool's unmap) wait for a millisecond or two only.
        load_blocks: Thread blocks of a direct load: reads over the link need many in flight.
        store_blocks: Thread blocks of a direct store: writes need few.
        ring_blocks: Thread blocks between ring and pages.
        edge_blocks: The same where a kernel's time would be added to the link's: at a store's beginning
            and at a load's end.
        store_head_bytes: About so much goes in a store's first piece.
        pieces_at_once: Pieces of a copy that the calling thread submits itself; 0 leaves all to the
            workers.  Two are the whole of a small copy.
        pin: ``require`` refuses a region that cannot be pinned; ``prefer`` goes on without, more
            slowly, and says so.
        pin_chunk_bytes: Bytes pinned in one call, rounded down to whole slots.
    """

    method: Literal["auto", "direct", "staged"] = "auto"
    load_staged_bytes: int | None = None
    store_staged_bytes: int | None = None
    ring_bytes: int = 192 << 20
    ring_parts: int = 3
    batch_bytes: int = 64 << 20
    load_window_bytes: int | None = None
    store_window_bytes: int | None = 96 << 20
    load_blocks: int = 16
    store_blocks: int = 8
    ring_blocks: int = 16
    edge_blocks: int = 128
    store_head_bytes: int = 8 << 20
    pieces_at_once: int = 2
    pin: Literal["require", "prefer"] = "prefer"
    pin_chunk_bytes: int = 1 << 30
