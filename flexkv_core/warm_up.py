"""What is there at start: the blocks that persistent tiers of this process list go into the index.

Threads: the chain's thread, before it serves; it blocks for the tiers' listings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from . import envelope
from .keys import BlockKey, block_key
from .links import Link
from .parts import ChainParts
from .stretch import one_block
from .tier import StoredBlock

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


def take_over(parts: ChainParts, clock: Clock, wall_clock: Clock) -> None:
    """Take over what every persistent tier lists.

    Args:
        parts: What the chain consists of.
        clock: The chain's clock, by which places age.
        wall_clock: The clock of the tiers' time stamps.
    """
    for link in parts.links:
        if link.is_indexed and link.capabilities.can_list:
            started = time.monotonic()
            good, bad = _take_over_tier(parts, link, clock(), wall_clock())
            logger.info(
                "[FlexKV] tier %s: %d blocks taken over, %d left out, %.2f s",
                link.name,
                good,
                bad,
                time.monotonic() - started,
            )


def _take_over_tier(parts: ChainParts, link: Link, now: float, wall: float) -> tuple[int, int]:
    good = bad = 0
    useless: list[BlockKey] = []
    try:
        for batch in link.wrapped.tier.list_blocks():
            for block in batch:
                if _take_over_block(parts, link, block, now - max(0.0, wall - block.last_used)):
                    good += 1
                else:
                    bad += 1
                    if not parts.index.has(link.number, block.key):
                        useless.append(block.key)
    except Exception as exc:  # noqa: BLE001 - a foreign driver: without its list the tier starts empty
        logger.warning("[FlexKV] tier %s cannot be listed: %s", link.name, exc)
    if bad:
        parts.metrics.count("foreign_blocks", bad, tier=link.name)
    over = parts.capacity.make_room(link, 0)
    if not link.config.read_only:
        # What can never be served would take its room for ever.
        link.evict([*over, *useless], now)
    return good, bad


def _take_over_block(parts: ChainParts, link: Link, block: StoredBlock, created: float) -> bool:
    try:
        header = envelope.parse(block.head, parts.layout)
    except envelope.BadValueError:
        return False
    if header.key != block.key or block_key(header.parent, header.tokens) != block.key:
        return False
    if parts.index.has(link.number, block.key):
        return False
    alone = one_block(block.key, header.parent, header.tokens, parts.layout.block_tokens)
    parts.index.add(link.number, alone, num_bytes=block.num_bytes, now=created, is_ready=True)
    return True
