"""Puts the wrappers round a driver's tier, in the one order that makes sense."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..layout import BlockLayout
from ..metrics import Metrics
from ..models import TierConfig
from ..tier import Tier
from .breaker import BreakerTier, StateChanged
from .guard import GuardedTier
from .meter import MeteredTier
from .retry import RetriedTier
from .verify import VerifiedTier


@dataclass(frozen=True)
class Wrapped:
    """A wrapped tier, and the breaker inside it that the chain asks.

    Attributes:
        tier: What workers call.
        breaker: Whether the tier is up.
    """

    tier: Tier
    breaker: BreakerTier


def wrap(
    tier: Tier,
    config: TierConfig,
    layout: BlockLayout,
    metrics: Metrics,
    on_change: StateChanged,
    clock: Callable[[], float] = time.monotonic,
) -> Wrapped:
    """Wrap a driver's tier as its configuration says.

    The breaker stands outside of the retries, so that one failed call counts once, however often it
    was tried; the check stands inside of them, since a damaged block is not better on a second look.
    """
    inner: Tier = VerifiedTier(GuardedTier(tier, config.name, metrics), layout)
    if config.retries:
        inner = RetriedTier(inner, config.retries)
    breaker = BreakerTier(
        inner,
        failures=config.breaker_failures,
        reset_s=config.breaker_reset_s,
        on_change=on_change,
        clock=clock,
    )
    return Wrapped(MeteredTier(breaker, config.name, metrics), breaker)
