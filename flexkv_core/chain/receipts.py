"""What a request got from the chain, and why not more: the proof of a hit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .choice import Choice


@dataclass(frozen=True)
class Receipt:
    """One finished load or store, or a load that was not begun since computing is sooner.

    Attributes:
        kind: ``load``, ``store`` or ``prefetch``.
        label: The request, as the engine names it.
        status: ``ok``, ``failed``, ``cancelled``, or ``recompute``: nothing is loaded.
        num_tokens: Tokens that were moved.
        num_blocks: Blocks that they lie in.
        num_bytes: KV bytes that were moved between host and device.
        tokens_by_tier: Where the tokens came from (load).
        staging_s: Time until all blocks lay in host slots.
        copy_s: Time of the copy between host and device.
        total_s: From the request to the end.
        cause: Why it ended as it did, if not well; a cause of the miss counters.
        choice: What was weighed before, if a tier says ``load_or_recompute: auto``.
        is_layerwise: The copy was awaited layer by layer (load).
    """

    kind: str
    label: str
    status: str
    num_tokens: int
    num_blocks: int
    num_bytes: int
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    staging_s: float = 0.0
    copy_s: float = 0.0
    total_s: float = 0.0
    cause: str = ""
    choice: Choice | None = None
    is_layerwise: bool = False

    def line(self) -> str:
        """One line for the log."""
        rate = self.num_bytes / self.copy_s / 1e9 if self.copy_s > 0 else 0.0
        origin = " ".join(f"{tier}={tokens}" for tier, tokens in self.tokens_by_tier.items())
        parts = [
            f"[FlexKV] {self.kind} request={self.label!r} status={self.status}",
            f"tokens={self.num_tokens} blocks={self.num_blocks} bytes={self.num_bytes}",
            f"staging={self.staging_s * 1e3:.2f}ms copy={self.copy_s * 1e3:.2f}ms",
            f"total={self.total_s * 1e3:.2f}ms bandwidth={rate:.2f}GB/s",
        ]
        if origin:
            parts.append(f"from {origin}")
        if self.choice is not None:
            parts.append(f"choice={self.choice}")
        if self.cause:
            parts.append(f"cause={self.cause}")
        return " ".join(parts)
