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
from .codec import CodecTier
from .encoding import Encoding
from .guard import GuardedTier
from .limit import LimitedTier
from .meter import MeteredTier
from .retry import RetriedTier
from .turns import Turns
from .verify import VerifiedTier


@dataclass(frozen=True)
class Wrapped:
    """A wrapped tier, and the wrappers inside it that the chain asks.

    Attributes:
        tier: What workers call.
        breaker: Whether the tier is up.
        limit: What keeps it to its rates; None where it has none.
        has_turns: Whether calls take turns at the driver.
    """

    tier: Tier
    breaker: BreakerTier
    limit: LimitedTier | None = None
    has_turns: bool = False


def wrap(
    tier: Tier,
    config: TierConfig,
    layout: BlockLayout,
    metrics: Metrics,
    on_change: StateChanged,
    clock: Callable[[], float] = time.monotonic,
    *,
    num_calls: int = 1,
    num_threads: int = 1,
    sleep: Callable[[float], object] | None = None,
) -> Wrapped:
    """Wrap a driver's tier as its configuration says.

    The breaker stands outside of the retries, so that one failed call counts once, however often it
    was tried; the check stands inside of them, since a damaged block is not better on a second look.  The
    codec stands inside of the check, which so sees the value itself, and outside of the limit, which so
    counts what passes the wire; each further try takes its turn again.

    Args:
        tier: The driver's.
        config: What to put round it.
        layout: What a value's bytes mean.
        metrics: Where to count.
        on_change: Told when the breaker opens or closes.
        clock: Monotonic seconds.
        num_calls: Loads and stores at once, at most: the codec has buffers for so many.
        num_threads: Threads that call it, of whatever lane: where the driver takes fewer calls at once, they
            take turns.
        sleep: How the limit waits; default: so that closing ends it.

    Raises:
        ConfigError: the codec needs a package that is not installed.
        HostMemoryError: the codec's buffers do not fit.
    """
    most = tier.capabilities.max_concurrency
    turns = Turns(most) if num_threads > most else None
    inner: Tier = GuardedTier(tier, config.name, metrics, turns)
    limit = None
    if config.limits.is_on:
        limit = inner = LimitedTier(
            inner, config.limits, name=config.name, metrics=metrics, clock=clock, sleep=sleep
        )
    if config.codec.is_on:
        encoding = Encoding(config.codec, layout, where=f"tier {config.name}: codec")
        inner = CodecTier(
            inner, encoding, config.codec, layout, name=config.name, metrics=metrics, num_calls=num_calls
        )
    inner = VerifiedTier(inner, layout)
    if config.retries:
        inner = RetriedTier(inner, config.retries)
    breaker = BreakerTier(
        inner,
        failures=config.breaker_failures,
        reset_s=config.breaker_reset_s,
        on_change=on_change,
        clock=clock,
    )
    return Wrapped(MeteredTier(breaker, config.name, metrics), breaker, limit, turns is not None)
