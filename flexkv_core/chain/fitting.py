"""Whether tiers fit into a chain: their threads, their capacity in blocks, and what cannot work.

Pure, but for a warning in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ..demands import unmet_demands
from ..layout import BlockLayout, round_up
from ..models import CodecConfig, TierConfig
from ..tier import DirectTier, Tier, TierCapabilities
from ..wrappers.encoding import stored_bytes

logger = logging.getLogger(__name__)


class LaneThreads(NamedTuple):
    """Threads of a tier's lanes."""

    load: int
    store: int
    lookup: int


def lane_threads(config: TierConfig, can: TierCapabilities) -> LaneThreads:
    """How many threads each lane gets: together no more than the driver takes calls at once.

    Each lane has one at least.  Where that is more than the driver takes, calls take turns (``Turns``).
    """
    lookups = 1 if can.shared else 0
    budget = can.max_concurrency - lookups
    loads = config.load_threads or min(-(-budget // 2), budget - (config.store_threads or 1))
    loads = max(1, min(loads, budget - 1))
    stores = max(1, min(config.store_threads or budget, budget - loads))
    wanted = (config.load_threads or 0) + (config.store_threads or 0)
    if wanted > loads + stores:
        logger.warning(
            "[FlexKV] tier %s: the driver takes %d calls at once: load_threads is %d, store_threads %d",
            config.name,
            can.max_concurrency,
            loads,
            stores,
        )
    return LaneThreads(loads, stores, lookups)


def capacity_blocks(
    capabilities: TierCapabilities, layout: BlockLayout, codec: CodecConfig | None = None
) -> int | None:
    """How many full blocks fit, or None where the store itself decides.

    With a codec each block counts with the room that it takes when it does not shrink.
    """
    if not capabilities.capacity_bytes:
        return None
    longest = stored_bytes(codec or CodecConfig(), layout)
    return capabilities.capacity_bytes // round_up(longest, max(1, capabilities.alignment_bytes))


def check_links(configs: Sequence[TierConfig], capabilities: Sequence[TierCapabilities]) -> list[str]:
    """Why this order of tiers cannot work, in all points; empty if it can."""
    return [
        f"tiers[{number}] ({configs[number].name}): {field}: {line}"
        for number, field, line in unmet_demands(configs, capabilities)
    ]


def check_values(configs: Sequence[TierConfig], tiers: Sequence[Tier], layout: BlockLayout) -> list[str]:
    """Whether blocks of this layout fit into the tiers at all."""
    findings = []
    for number, (config, tier) in enumerate(zip(configs, tiers, strict=True)):
        can = tier.capabilities
        where = f"tiers[{number}] ({config.name})"
        longest = stored_bytes(config.codec, layout)
        if can.max_value_bytes and longest > can.max_value_bytes:
            findings.append(
                f"{where}: a block takes {longest:,} B, the tier's values at most "
                f"{can.max_value_bytes:,} B: lower block_tokens"
            )
        if capacity_blocks(can, layout, config.codec) == 0:
            findings.append(
                f"{where}: a block takes {longest:,} B, the tier has room for "
                f"{can.capacity_bytes:,} B, which is less than one block: raise its capacity"
            )
        if isinstance(tier, DirectTier) and not tier.slots.capacity:
            findings.append(
                f"{where}: a block takes {longest:,} B, its memory has room for none: raise its capacity"
            )
        if number == 0 and isinstance(tier, DirectTier) != can.direct_slots:
            findings.append(
                f"{where}: the driver says direct_slots={can.direct_slots}, its class says otherwise"
            )
    return findings
