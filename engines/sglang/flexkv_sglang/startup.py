"""What a radix cache opens before it serves: the transfer, the chain, and how passes wait for layers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from flexkv_core import EngineError, Transfer
from flexkv_core.config import EffectiveConfig
from flexkv_core.layerwise.counters import LayerCounters
from flexkv_core.layerwise.waits import LayerWaits
from flexkv_core.manager import KVManager
from flexkv_core.metrics import Metrics
from flexkv_core.models import EngineConfig
from flexkv_core.transfers.planes import DevicePlanes
from flexkv_core.transfers.poison import PoisonedTransfer, poison_allocations

from . import compat
from .identity import model_namespace
from .layer_counter import lacks, register_counter
from .layerwise import LayerwiseLoads
from .mode_choice import ModeChoice
from .pools import check_dtype, device_planes
from .transfer_log import TransferLog
from .transfers import open_transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A chain that serves one KV pool.

    Attributes:
        planes: The pool's memory.
        transfer: Owned by ``manager``.
        manager: Started.
    """

    planes: DevicePlanes
    transfer: Transfer
    manager: KVManager


def open_chain(tree: Any, ctx: Any, effective: EffectiveConfig) -> Opened:
    """Open the chain for a context's KV pool.

    Raises:
        EngineError, LayoutError: the model or pool cannot be served.
        ConfigError, DriverError, TierError, HostMemoryError: a tier cannot be opened.
    """
    config = effective.chain
    if config.engine.layerwise is True and lacks(ctx):
        raise EngineError(f"engine.layerwise: this SGLang has no {lacks(ctx)}; set it to false")
    pool = compat.kv_pool(ctx)
    planes = device_planes(pool, config.block_tokens, tree.page_size)
    check_dtype(pool, config.kv_cache_dtype)
    metrics = Metrics()
    transfer = open_transfer(planes, ctx, metrics)
    if config.engine.debug_poison:
        transfer = PoisonedTransfer(transfer, planes, metrics)
        poison_allocations(tree.token_to_kv_pool_allocator, transfer)
    try:
        manager = KVManager(
            config,
            layout=planes.layout,
            namespace=model_namespace(ctx, pool, planes.layout, configured=config.namespace),
            transfer=transfer,
            metrics=metrics,
            on_receipt=TransferLog(is_on=config.engine.log_transfers),
            source=effective.file or "environment",
        )
        manager.start()
    except BaseException:  # an interrupt, too: its thread and its host memory go with it
        transfer.close()
        raise
    return Opened(planes, transfer, manager)


def choose_mode(engine: EngineConfig, planes: DevicePlanes) -> ModeChoice:
    """Which loads of this pool are awaited layer by layer."""
    has_streams = planes.device.type == "cuda"
    return ModeChoice(engine.layerwise, has_streams=has_streams, num_layers=planes.layout.num_layers)


def await_layers(
    tree: Any, ctx: Any, opened: Opened, engine: EngineConfig, choice: ModeChoice
) -> LayerwiseLoads | None:
    """Have forward passes ask for each layer; None if no load will ever be awaited that way."""
    if not choice.may_be_by_layer:
        return None
    missing = lacks(ctx)
    if missing:
        logger.warning("[FlexKV] loads are awaited as a whole: this SGLang has no %s", missing)
        return None
    num_layers = opened.planes.layout.num_layers
    try:
        counters = LayerCounters(num_layers)
    except OSError as exc:
        if engine.layerwise is True:
            raise EngineError(f"no descriptors for {num_layers} layers (ulimit -n): {exc}") from exc
        logger.warning("[FlexKV] loads are awaited as a whole: no descriptors for their layers: %s", exc)
        return None
    waits = LayerWaits(
        counters,
        timeout_s=engine.load_deadline_s,
        rank=ctx.tp_rank,
        is_alive=opened.transfer.is_alive,
    )
    register_counter(ctx, waits)
    return LayerwiseLoads(tree, opened.manager, waits, choice)


def log_ready(ctx: Any, effective: EffectiveConfig, opened: Opened, layerwise: LayerwiseLoads | None) -> None:
    """The line that says that the chain serves."""
    config = effective.chain
    logger.info(
        "[FlexKV] Connector ready rank=%d/%d: layerwise=%s, prefetch=%s, tiers=%s, %s, namespace=%s",
        ctx.tp_rank,
        ctx.tp_size,
        config.engine.layerwise if layerwise is not None else False,
        config.engine.prefetch,
        " -> ".join(tier.name for tier in config.tiers),
        opened.planes.layout.describe(),
        opened.manager.namespace.digest().hex()[:12],
    )
