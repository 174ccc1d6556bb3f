"""Opening a chain: a driver for each tier that is named, its options checked, all of them put to work.

Threads: the caller's; it blocks for opening and listing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from ..chain import TierChain
from ..chain.receipts import Receipt
from ..drivers import Observers, find_driver, open_tier
from ..errors import ConfigError
from ..keys import Namespace
from ..layout import BlockLayout
from ..metrics import Metrics
from ..models import ChainConfig, TierConfig
from ..tier import Tier, TierContext
from ..transfer import Transfer
from ..wrappers.encoding import head_bytes, stored_bytes

logger = logging.getLogger(__name__)


def _option_fault(number: int, fault: Mapping[str, Any]) -> str:
    """One fault of a driver's options; values are never quoted, they may be secrets."""
    path = ".".join(str(part) for part in ("options", *fault["loc"]))
    return f"tiers[{number}].{path}: {fault['msg']}"


def _open_tier(number: int, config: TierConfig, layout: BlockLayout, identity: str, source: str) -> Tier:
    spec, offer = find_driver(config.driver)
    try:
        options = spec.config.model_validate(config.options)
    except ValidationError as exc:
        faults = exc.errors(include_input=False, include_url=False, include_context=False)
        raise ConfigError(source, [_option_fault(number, fault) for fault in faults]) from None
    context = TierContext(
        name=config.name,
        value_bytes=stored_bytes(config.codec, layout),
        head_bytes=head_bytes(config.codec, layout),
        fingerprint=layout.fingerprint,
        identity=identity,
    )
    return open_tier(spec, offer.provider, options, context)


def open_chain(
    config: ChainConfig,
    layout: BlockLayout,
    namespace: Namespace,
    transfer: Transfer,
    *,
    source: str = "chain",
    observers: Observers | None = None,
    metrics: Metrics | None = None,
    on_receipt: Callable[[Receipt], None] = lambda _receipt: None,
) -> TierChain:
    """Open every tier that ``config`` names, and put them to work.  Blocks for opening and listing.

    Raises:
        ConfigError, DriverError, TierError, HostMemoryError: a tier that was asked for is never
            silently absent; those already opened are closed again.
    """
    missing = [
        f"tiers[{number}].codec.{field}: {line}"
        for number, tier in enumerate(config.tiers)
        for field, line in tier.codec.missing_extras().items()
    ]
    if missing:
        raise ConfigError(source, missing)
    identity = json.dumps(asdict(namespace), sort_keys=True)
    tiers: list[Tier] = []
    with ExitStack() as undo:
        undo.callback(_close_all, tiers)
        for number, tier in enumerate(config.tiers):
            tiers.append(_open_tier(number, tier, layout, identity, source))
        chain = TierChain(
            config=config,
            layout=layout,
            tiers=tiers,
            transfer=transfer,
            metrics=metrics,
            observers=observers if observers is not None else Observers.installed(),
            on_receipt=on_receipt,
        )
        undo.pop_all()
        undo.callback(chain.close)
        chain.warm_up()
        undo.pop_all()
    return chain


def _close_all(tiers: list[Tier]) -> None:
    """Close what was opened before something failed; a tier that fails to close hides neither."""
    for opened in reversed(tiers):
        try:
            opened.close()
        except Exception:  # noqa: BLE001 - a foreign driver; the error that matters is being raised
            logger.exception("[FlexKV] a tier failed to close")
