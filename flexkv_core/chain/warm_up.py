"""What is there at start: the blocks that persistent tiers of this process list go into the index.

Threads: the chain's thread, before it serves; it blocks for the tiers' listings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .. import envelope
from ..index.stretch import Stretch
from ..keys import TOKEN_BYTES, BlockKey, block_key
from ..tier import StoredBlock
from .links import Link
from .parts import ChainParts

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_ALIKE_S = 60.0
"""Blocks of a row whose times lie no further apart count as stored together.  An index of single blocks is
twice as large and slower to look up; an eviction order that is a minute off harms nobody."""


class _Block(NamedTuple):
    """A block that a tier lists.

    Attributes:
        parent: What it hangs below.
        tokens: Its encoded ids.
        created: When it was last used, on the chain's clock.
    """

    parent: bytes
    tokens: bytes
    created: float


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
    found: dict[BlockKey, _Block] = {}
    foreign: list[BlockKey] = []
    bad = 0
    try:
        for batch in link.wrapped.tier.list_blocks():
            for stored in batch:
                block = _read(parts, stored, now - max(0.0, wall - stored.last_used))
                is_new = stored.key not in found and not parts.index.has(link.number, stored.key)
                if block is None:
                    foreign.append(stored.key)
                elif is_new:
                    found[stored.key] = block
                bad += block is None or not is_new
    except Exception as exc:  # noqa: BLE001 - a foreign driver: without its list the tier starts empty
        logger.warning("[FlexKV] tier %s cannot be listed: %s", link.name, exc)
    if bad:
        parts.metrics.count("foreign_blocks", bad, tier=link.name)
    good = len(found)
    for blocks, created in _stretches(found, parts.layout.block_tokens):
        size = parts.layout.value_bytes(blocks.tokens_each)
        parts.index.add(link.number, blocks, num_bytes=size, now=created, is_ready=True)
    over = parts.capacity.make_room(link, 0)
    if not link.config.read_only:
        # What can never be served would take its room for ever.
        useless = [key for key in foreign if not parts.index.has(link.number, key)]
        link.evict([*over, *useless], now)
    return good, bad


def _read(parts: ChainParts, stored: StoredBlock, created: float) -> _Block | None:
    """What a listed value says of itself; None if it is none of ours."""
    try:
        header = envelope.parse(stored.head, parts.layout)
    except envelope.BadValueError:
        return None
    if header.key != stored.key or block_key(header.parent, header.tokens) != stored.key:
        return None
    return _Block(header.parent, header.tokens, created)


def _stretches(found: dict[BlockKey, _Block], block_tokens: int) -> Iterator[tuple[Stretch, float]]:
    """The blocks, those that were stored together in a row, each row with the age of its oldest.

    A row ends before a partly filled block, where several blocks follow, and where the next is much younger
    or older.  Empties ``found``, so that no block is held twice.
    """
    whole = block_tokens * TOKEN_BYTES
    after: dict[bytes, BlockKey | None] = {}
    for key, block in found.items():
        after[block.parent] = None if block.parent in after else key
    for parent, follower in after.items():
        above = found.get(parent)
        if above is None or follower is None or not len(above.tokens) == len(found[follower].tokens) == whole:
            after[parent] = None
    begins = [key for key, block in found.items() if after[block.parent] != key]
    for begin in begins:
        at: BlockKey | None = begin
        while at is not None:
            row: list[BlockKey] = []
            created = oldest = found[at].created
            while at is not None and abs(found[at].created - created) <= _ALIKE_S:
                oldest = min(oldest, found[at].created)
                row.append(at)
                at = after.get(at)
            blocks = [found.pop(key) for key in row]
            ids = b"".join(block.tokens for block in blocks)
            yield Stretch(row, blocks[0].parent, ids, 0, len(ids) // TOKEN_BYTES, block_tokens), oldest
