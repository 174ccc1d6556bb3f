"""One line in the log for each finished transfer.

Threads: the scheduler's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flexkv_core.chain.receipts import Receipt

logger = logging.getLogger(__name__)

_DIRECTION = {"load": "H2D", "store": "D2H", "prefetch": "PREFETCH"}


class TransferLog:
    """Writes one line for each finished transfer, in the form that FlexKV's users search for."""

    def __init__(self, *, is_on: bool) -> None:
        """Lines at INFO if ``is_on``, and every receipt at DEBUG."""
        self._is_on = is_on
        self._number = 0

    def __call__(self, receipt: Receipt) -> None:
        """Log one."""
        self._number += 1
        if receipt.status == "recompute":
            logger.log(logging.INFO if self._is_on else logging.DEBUG, "%s", receipt.line())
            return
        if receipt.status != "ok":
            logger.warning("%s", receipt.line())
            return
        logger.debug("%s", receipt.line())
        if self._is_on:
            seconds = receipt.copy_s or receipt.staging_s
            logger.info(
                "[FlexKV] %s transfer request: %d finished transfer data size: %.6f GB transfer time: %.4f s "
                "transfer bandwidth: %.2f GB/s rid=%r blocks=%d tokens=%d from=%s%s",
                "LAYERWISE" if receipt.is_layerwise else _DIRECTION[receipt.kind],
                self._number,
                receipt.num_bytes / 1e9,
                seconds,
                receipt.num_bytes / 1e9 / seconds if seconds > 0 else 0.0,
                receipt.label,
                receipt.num_blocks,
                receipt.num_tokens,
                places(receipt.tokens_by_tier),
                f" choice={receipt.choice}" if receipt.choice is not None else "",
            )


def places(tokens_by_tier: Mapping[str, int]) -> str:
    """Where tokens are, as the log tells it."""
    return ",".join(f"{tier}:{tokens}" for tier, tokens in tokens_by_tier.items()) or "device"
